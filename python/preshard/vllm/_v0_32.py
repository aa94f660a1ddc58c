"""vLLM 0.32, with vllm-gguf-plugin 0.0.5 for packed weights."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from vllm.config import ModelConfig, VllmConfig
from vllm.config.load import LoadConfig
from vllm.distributed import get_pp_group, get_tp_group
from vllm.logger import init_logger
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

from .. import bind
from ..errors import RequestError, ShardsError
from ..manifest import Manifest, TensorEntry
from ..plugin import FORMAT, Options, fill, local
from .contract import Engine, Packing, check, row_ranges

if TYPE_CHECKING:
    from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

logger: logging.Logger = init_logger("vllm.preshard")

_NEEDS_GGUF = (
    "holds packed weights, which vLLM computes with through vllm-gguf-plugin: "
    "pip install vllm-gguf-plugin==0.0.5, or convert with --weights bf16"
)


def register() -> None:
    """Registers the load format, once."""
    from vllm.model_executor.model_loader import _LOAD_FORMAT_TO_MODEL_LOADER

    if FORMAT not in _LOAD_FORMAT_TO_MODEL_LOADER:
        register_model_loader(FORMAT)(PreshardLoader)


class PreshardLoader(BaseModelLoader):
    """Serves a directory that ``preshard convert`` wrote; :class:`preshard.plugin.Options`."""

    def __init__(self, load_config: LoadConfig) -> None:
        super().__init__(load_config)
        self._options = Options(load_config.model_loader_extra_config)
        self._part = "model"

    def download_model(self, model_config: ModelConfig) -> None:
        """Nothing is downloaded: the directory is local."""
        self._directory(model_config)

    @staticmethod
    def _directory(model_config: ModelConfig) -> str:
        return local(str(model_config.model_weights or model_config.model))

    def create_model(self, vllm_config: VllmConfig, model_config: ModelConfig, prefix: str = "") -> nn.Module:
        """Checks the directory against the engine, then builds the model without its memory."""
        path = self._directory(model_config)
        manifest = Manifest.read(path)
        speculative = vllm_config.speculative_config
        draft = speculative is not None and model_config is speculative.draft_model_config
        # A multi-token-prediction draft lives in its target's directory, in a file of its own.
        own = speculative is not None and speculative.target_model_config is not None
        same = own and str(speculative.target_model_config.model) == str(model_config.model)
        self._part = "mtp" if draft and same else "model"
        if (
            vllm_config.offload_config.uva.cpu_offload_gb
            or vllm_config.offload_config.prefetch.offload_group_size
        ):
            raise RequestError(
                f"{path}: weights cannot be offloaded to the CPU: leave out the offloading options"
            )
        parallel = vllm_config.parallel_config
        check(
            path,
            manifest,
            Engine(
                tp=get_tp_group().world_size,
                pp=get_pp_group().world_size,
                ep=parallel.enable_expert_parallel,
                dp=parallel.data_parallel_size,
                class_names=() if draft else tuple(model_config.architectures),
                quantization=_asked(vllm_config, model_config),
            ),
        )
        rank, stage = get_tp_group().rank_in_group, get_pp_group().rank_in_group
        entry = manifest.shard(rank, pp=stage, part=self._part)
        if entry is None:
            raise ShardsError(
                f"{path}: holds no part {self._part} of stage {stage}, rank {rank}: convert it, or copy it here"
            )
        _tie(model_config, Packing(entry))
        before = vllm_config.quant_config
        if manifest.packed:
            vllm_config.quant_config = _quantisation(path, Packing(entry))
        try:
            with nullcontext() if self._options.allocate else bind.released():
                return super().create_model(vllm_config, model_config, prefix)
        finally:
            if draft:
                vllm_config.quant_config = before

    def load_weights(self, model: nn.Module, model_config: ModelConfig) -> None:
        """Loads this rank's file and points the model's parameters at it."""
        path = self._directory(model_config)
        rank, stage = get_tp_group().rank_in_group, get_pp_group().rank_in_group
        entry = Manifest.read(path).shard(rank, pp=stage, part=self._part)
        if entry is None:
            raise ShardsError(f"{path}: holds no part {self._part} of stage {stage}, rank {rank}")
        fill(path, model, entry, self._options, _install, logger)


def _asked(vllm_config: VllmConfig, model_config: ModelConfig) -> str | None:
    """The quantisation that was asked for, by option or config.json."""
    if vllm_config.quant_config is not None and not getattr(vllm_config.quant_config, "preshard", False):
        return str(vllm_config.quant_config.get_name())
    return None if model_config.quantization is None else str(model_config.quantization)


def _tie(model_config: ModelConfig, packing: Packing) -> None:
    """Ties head and embedding again where the file holds their matrix once, under the head's name.

    vLLM takes a head in the file for a head of its own, but for the formats that it knows to hold
    its own state.
    """
    if not model_config.word_embeddings_untied_by_checkpoint:
        return
    names = packing.packed | packing.plain
    if all(head in names and embedding not in names for embedding, head in packing.TIED.items()):
        model_config.hf_config.tie_word_embeddings = True
        model_config.hf_config.get_text_config().tie_word_embeddings = True
        model_config.word_embeddings_untied_by_checkpoint = False


def _quantisation(path: str, packing: Packing) -> QuantizationConfig:
    """vllm-gguf-plugin's configuration, that asks the manifest which layers are packed."""
    try:
        from vllm_gguf_plugin.quantization import (
            GGUFConfig,
            GGUFEmbeddingMethod,
            GGUFLinearMethod,
            GGUFMoEMethod,
        )
    except ImportError as e:
        raise ShardsError(f"{path}: {_NEEDS_GGUF} ({e})") from None
    from vllm.model_executor.layers.fused_moe import RoutedExperts
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
    from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
    from vllm.model_executor.layers.vocab_parallel_embedding import (
        ParallelLMHead,
        UnquantizedEmbeddingMethod,
        VocabParallelEmbedding,
    )

    class PreshardGGUFConfig(GGUFConfig):
        """The plugin's own test looks for parts of names; this one compares whole names."""

        preshard = True

        def get_quant_method(self, layer: nn.Module, prefix: str) -> Any:
            if isinstance(layer, LinearBase):
                return GGUFLinearMethod(self) if packing.is_packed(prefix) else UnquantizedLinearMethod()
            if isinstance(layer, VocabParallelEmbedding):
                head = isinstance(layer, ParallelLMHead)
                packed = packing.is_packed(prefix) if head else packing.embedding_packed(prefix)
                return GGUFEmbeddingMethod(self) if packed else UnquantizedEmbeddingMethod()
            if isinstance(layer, RoutedExperts):
                packed = packing.experts_packed(prefix)
                return (
                    GGUFMoEMethod(self, layer.moe_config)
                    if packed
                    else UnquantizedFusedMoEMethod(layer.moe_config)
                )
            return None

    return PreshardGGUFConfig(sorted(packing.plain))


def _install(slot: bind.Slot, entry: TensorEntry, view: torch.Tensor) -> None:
    """Puts a packed tensor, or its types, where the layer's uninitialised parameter is."""
    from vllm.model_executor.layers.linear import QKVParallelLinear
    from vllm_gguf_plugin.quantization import GGUFWeightParameter, GGUFWeightTypeParameter

    for module, attribute in slot.owners:
        old = module._parameters[attribute]
        if attribute.endswith("_type"):
            types = view.tolist()
            new = GGUFWeightTypeParameter(data=view, weight_loader=old.weight_loader)
            new.weight_type = types[0]
            if len(types) > 1:
                new.shard_weight_type = dict(zip(_members(module, len(types), QKVParallelLinear), types))
        else:
            want = tuple(old.tensor_shape)
            if attribute.startswith("w2_"):  # the layer states it as (experts, columns, rows)
                want = (want[0], want[2], want[1])
            if entry.logical != want:
                raise ShardsError(
                    f"{entry.name}: {list(entry.logical or ())} elements, the layer has {list(want)}"
                )
            new = GGUFWeightParameter(
                data=view,
                weight_loader=old.weight_loader,
                input_dim=old.input_dim,
                output_dim=old.output_dim,
                tensor_shape=old.tensor_shape,
            )
            ranges = row_ranges(entry)
            if len(ranges) > 1 and view.dim() == 2:
                new.shard_id = _members(module, len(ranges), QKVParallelLinear)
                new.shard_id_map = {name: i for i, name in enumerate(new.shard_id)}
                new.shard_offset_map = dict(zip(new.shard_id, ranges))
        module.register_parameter(attribute, new)


def _members(module: nn.Module, count: int, qkv: type) -> list[Any]:
    """The names by which a layer calls the members of its merged matrix."""
    if isinstance(module, qkv) and count == 3:
        return ["q", "k", "v"]
    return list(range(count))
