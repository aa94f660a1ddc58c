"""SGLang 0.5.23."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from sglang.srt.configs.device_config import DeviceConfig
from sglang.srt.configs.load_config import LoadConfig
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.model_loader import loader as loaders
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.srt.runtime_context import get_parallel
from torch import nn

from .. import bind
from ..errors import ShardsError
from ..manifest import Manifest, ShardEntry, TensorEntry
from ..plugin import FORMAT, Options, fill, local
from .contract import Engine, check, forms

logger = logging.getLogger("sglang.preshard")


def register() -> None:
    """Makes the load format known: to the command line, and to the configuration that chooses a loader."""
    from sglang.srt.arg_groups.choices import LOAD_FORMAT_CHOICES, add_load_format_choices

    if FORMAT not in LOAD_FORMAT_CHOICES:
        add_load_format_choices([FORMAT])
        target = "sglang.srt.configs.load_config.LoadConfig._verify_load_format"
        HookRegistry.register(target, _verify_load_format, HookType.AROUND)


def _verify_load_format(verify: Callable[[LoadConfig], None], config: LoadConfig) -> None:
    """The formats that SGLang verifies are a closed list; a class stands for the loader that it is."""
    if config.load_format == FORMAT:
        config.load_format = PreshardLoader
    else:
        verify(config)


class PreshardLoader(loaders.BaseModelLoader):
    """Serves a directory that ``preshard convert --layout sglang`` wrote; :class:`preshard.plugin.Options`."""

    def __init__(self, load_config: LoadConfig) -> None:
        super().__init__(load_config)
        self._options = Options(load_config.model_loader_extra_config)

    def download_model(self, model_config: ModelConfig) -> None:
        """Nothing is downloaded: the directory is local."""
        local(str(model_config.model_path))

    def load_model(self, *, model_config: ModelConfig, device_config: DeviceConfig) -> nn.Module:
        """Checks the directory, builds the model without its memory, and points it at this rank's file."""
        path = local(str(model_config.model_path))
        entry = self._entry(path, model_config)
        device = torch.device(device_config.device)
        memory_later = nullcontext() if self._options.allocate else bind.released()
        with loaders.set_default_torch_dtype(model_config.dtype), device, memory_later:
            model = loaders._initialize_model(model_config, self.load_config, None)
        forms(path, entry, (name for name, _ in model.named_parameters()))
        _refuse_reordered(path, model)
        fill(path, model, entry, self._options, _unexpected, logger)
        # In the order in which SGLang's own loader has the model and then its layers derive from the weights.
        loaders.post_load_weights(model)
        loaders.DefaultModelLoader.postprocess_weights(model, torch.device(device_config.device))
        return model.eval()

    @staticmethod
    def _entry(path: str, model_config: ModelConfig) -> ShardEntry:
        """This rank's file, once the directory is one for what the engine runs."""
        manifest = Manifest.read(path)
        draft = bool(model_config.is_draft_model)
        parallel = get_parallel()
        check(
            path,
            manifest,
            Engine(
                tp=parallel.tp_size,
                pp=parallel.pp_size,
                ep=parallel.moe_ep_size,
                attention_dp=parallel.attn_dp_size,
                class_names=() if draft else tuple(model_config.hf_config.architectures),
                quantization=model_config.quantization,
            ),
        )
        part = "mtp" if draft else "model"
        entry = manifest.shard(parallel.tp_rank, part=part)
        if entry is None:
            raise ShardsError(
                f"{path}: holds no part {part} of rank {parallel.tp_rank}: convert it, or copy it here"
            )
        return entry


def _refuse_reordered(path: str, model: nn.Module) -> None:
    """Kernels that want up before gate are served by SGLang's own loader alone."""
    for name, module in model.named_modules():
        if getattr(getattr(module, "quant_method", None), "load_up_proj_weight_first", False):
            raise ShardsError(
                f"{path}: {name} is run by a kernel that holds up before gate, the files hold gate first: "
                "start with --moe-runner-backend triton"
            )


def _unexpected(slot: bind.Slot, entry: TensorEntry, view: torch.Tensor) -> Any:
    """No layer that holds bf16 is without a shape before it is loaded."""
    raise ShardsError(f"{entry.name}: {min(slot.names)} has no shape yet: the engine expects packed weights")
