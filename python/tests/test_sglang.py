"""What the SGLang plugin does and refuses, with stand-ins for SGLang's modules: scripts/interop_sglang.sh runs its own."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest

import preshard
from preshard import Manifest, RequestError, ShardsError

torch = pytest.importorskip("torch")

from conftest import FIXTURES, GLM5, LLAMA
from test_vllm_bind import module

from preshard.sglang import contract

DSV3 = FIXTURES / "dsv3" / "tiny-dsv3-Q4_K_M.gguf"
QWEN3MOE = FIXTURES / "dense" / "tiny-qwen3moe-Q4_K_M.gguf"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory):
    """Converts for SGLang, each choice once."""
    root = tmp_path_factory.mktemp("sglang")
    done: dict[str, Path] = {}

    def convert(source: Path, **options: object) -> Path:
        key = f"{source.name} {options}"
        if key not in done:
            done[key] = root / str(len(done))
            preshard.convert(source, done[key], **{"tp": 2, "layout": "sglang", "weights": "bf16", **options})
        return done[key]

    return convert


ENGINE = contract.Engine(
    tp=2, pp=1, ep=1, attention_dp=1, class_names=("LlamaForCausalLM",), quantization=None
)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            {"tp": 8},
            "tensor parallel size 2, the engine runs 8: start with --tp-size 2, or convert again with --tp 8",
        ),
        ({"pp": 2}, "pipeline parallel size 1, the engine runs 2: start with --pp-size 1"),
        ({"attention_dp": 2}, "attention over 2 ranks .*: start without --enable-dp-attention"),
        ({"class_names": ("Qwen2ForCausalLM",)}, "class LlamaForCausalLM, the engine runs Qwen2ForCausalLM"),
        ({"quantization": "fp8"}, "quantization fp8 asked for, expected none: leave out --quantization"),
    ],
)
def test_another_engine_is_refused(made, change: dict[str, object], text: str) -> None:
    manifest = Manifest.read(made(LLAMA))
    contract.check("dir", manifest, ENGINE)
    contract.check("dir", manifest, dataclasses.replace(ENGINE, ep=2))  # a dense model does not care
    with pytest.raises(ShardsError, match=text):
        contract.check("dir", manifest, dataclasses.replace(ENGINE, **change))


@pytest.mark.parametrize("ep", [False, True])
def test_expert_parallelism_must_agree(made, ep: bool) -> None:
    manifest = Manifest.read(made(QWEN3MOE, ep=ep))
    engine = dataclasses.replace(ENGINE, class_names=("Qwen3MoeForCausalLM",), ep=2 if ep else 1)
    contract.check("dir", manifest, engine)
    other = dataclasses.replace(engine, ep=1 if ep else 2)
    with pytest.raises(ShardsError, match=f"expert parallel size {engine.ep}, the engine runs {other.ep}"):
        contract.check("dir", manifest, other)


def test_what_was_written_for_another_engine_is_refused(llama: Path, packed: Path, tmp_path: Path) -> None:
    with pytest.raises(
        ShardsError, match=r"another engine \(layout vllm-dense\): convert with --layout sglang"
    ):
        contract.check("dir", Manifest.read(llama), ENGINE)
    with pytest.raises(ShardsError, match="holds packed weights, where .* expect bf16: convert again"):
        contract.check("dir", Manifest.read(packed), dataclasses.replace(ENGINE, tp=1))
    preshard.convert(LLAMA, tmp_path / "hf", layout="hf")
    with pytest.raises(ShardsError, match="an ordinary checkpoint .*: leave out --load-format preshard"):
        contract.check("dir", Manifest.read(tmp_path / "hf"), dataclasses.replace(ENGINE, tp=1))


def entry(directory: Path, part: str = "model") -> preshard.ShardEntry:
    found = Manifest.read(directory).shard(0, part=part)
    assert found is not None
    return found


def names(directory: Path, part: str = "model") -> list[str]:
    return [t.name for t in entry(directory, part).tensors]


@pytest.mark.parametrize(("source", "part"), [(DSV3, "model"), (GLM5, "model"), (GLM5, "mtp")])
def test_shared_experts_in_the_other_form_are_refused(made, source: Path, part: str) -> None:
    fused, separate = (made(source, shared_experts=form) for form in ("fused", "separate"))
    for a in (fused, separate):
        contract.forms("dir", entry(a, part), names(a, part))
    text = "shared experts fused, the engine holds them separate: start with --enforce-shared-experts-fusion"
    with pytest.raises(ShardsError, match=f"{text}, or convert again with --shared-experts separate"):
        contract.forms("dir", entry(fused, part), names(separate, part))
    text = "shared experts separate, the engine holds them fused: start with --disable-shared-experts-fusion"
    with pytest.raises(ShardsError, match=f"{text}, or convert again with --shared-experts fused"):
        contract.forms("dir", entry(separate, part), names(fused, part))


def test_an_indexer_in_the_other_form_is_refused(made) -> None:
    fused, separate = made(GLM5), made(GLM5, layout="sglang-dsa-separate")
    text = (
        "weights_proj fused, the engine holds them separate: start without SGLANG_DISABLE_DSA_INDEXER_FUSION"
    )
    with pytest.raises(ShardsError, match=f"{text}, or convert again with --layout sglang-dsa-separate"):
        contract.forms("dir", entry(fused), names(separate))
    text = (
        "weights_proj separate, the engine holds them fused: start with SGLANG_DISABLE_DSA_INDEXER_FUSION=1"
    )
    with pytest.raises(ShardsError, match=f"{text}, or convert again with --layout sglang"):
        contract.forms("dir", entry(separate), names(fused))


@dataclasses.dataclass
class Stand:
    """What the stand-ins answer, and what they were told."""

    plugin: types.ModuleType
    choices: list[str]
    hooks: dict[str, object]
    parallel: types.SimpleNamespace
    build: object = None
    steps: list[str] = dataclasses.field(default_factory=list)


@pytest.fixture
def sglang(monkeypatch: pytest.MonkeyPatch) -> Stand:
    """SGLang, as far as the plugin knows it."""
    packages = {
        "sglang": {},
        "sglang.srt": {},
        "sglang.srt.configs": {},
        "sglang.srt.configs.device_config": {"DeviceConfig": object},
        "sglang.srt.configs.load_config": {"LoadConfig": object},
        "sglang.srt.configs.model_config": {"ModelConfig": object},
        "sglang.srt.arg_groups": {},
        "sglang.srt.model_loader": {},
        "sglang.srt.plugins": {},
    }
    stand = Stand(
        types.ModuleType("none"),
        ["auto"],
        {},
        types.SimpleNamespace(tp_size=2, pp_size=1, moe_ep_size=1, attn_dp_size=1, tp_rank=1),
    )

    class BaseModelLoader:
        def __init__(self, load_config: object) -> None:
            self.load_config = load_config

    class DefaultModelLoader(BaseModelLoader):
        @staticmethod
        def postprocess_weights(model: object, device: object) -> None:
            stand.steps.append("layers")

    @contextlib.contextmanager
    def set_default_torch_dtype(dtype: torch.dtype) -> Iterator[None]:
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        yield
        torch.set_default_dtype(before)

    packages["sglang.srt.model_loader.loader"] = {
        "BaseModelLoader": BaseModelLoader,
        "DefaultModelLoader": DefaultModelLoader,
        "set_default_torch_dtype": set_default_torch_dtype,
        "_initialize_model": lambda config, load_config, quantisation: stand.build(),
        "post_load_weights": lambda model: stand.steps.append("model"),
    }
    packages["sglang.srt.arg_groups.choices"] = {
        "LOAD_FORMAT_CHOICES": stand.choices,
        "add_load_format_choices": stand.choices.extend,
    }

    class HookRegistry:
        @staticmethod
        def register(target: str, hook: object, kind: str) -> None:
            stand.hooks[f"{kind} {target}"] = hook

    packages["sglang.srt.plugins.hook_registry"] = {
        "HookRegistry": HookRegistry,
        "HookType": types.SimpleNamespace(AROUND="around"),
    }
    packages["sglang.srt.runtime_context"] = {"get_parallel": lambda: stand.parallel}
    for name, members in packages.items():
        made = types.ModuleType(name)
        made.__path__ = []
        vars(made).update(members)
        monkeypatch.setitem(sys.modules, name, made)
        parent, _, leaf = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], leaf, made)
    monkeypatch.delitem(sys.modules, "preshard.sglang._v0_5_23", raising=False)
    preshard.sglang.register()
    stand.plugin = sys.modules["preshard.sglang._v0_5_23"]
    return stand


def load(
    sglang: Stand, directory: Path, architecture: str, draft: bool = False, **extra: object
) -> torch.nn.Module:
    """As SGLang does: the configuration says which loader, the loader gives the model."""
    config = types.SimpleNamespace(load_format="preshard", model_loader_extra_config=extra)
    [(target, hook)] = sglang.hooks.items()
    assert target == "around sglang.srt.configs.load_config.LoadConfig._verify_load_format"
    hook(lambda config: pytest.fail("SGLang does not know the format"), config)
    model_config = types.SimpleNamespace(
        model_path=str(directory),
        dtype=torch.bfloat16,
        is_draft_model=draft,
        hf_config=types.SimpleNamespace(architectures=[architecture]),
        quantization=None,
    )
    return config.load_format(config).load_model(
        model_config=model_config, device_config=types.SimpleNamespace(device="cpu")
    )


def like(directory: Path, part: str = "model", rank: int = 1):
    """Builds a model with the parameters of a file, none of them its values."""
    shard = preshard.load(directory, rank, part=part)
    return lambda: module({name: torch.full_like(shard[name], 7) for name in shard})


def test_other_formats_are_left_to_sglang(sglang: Stand) -> None:
    assert sglang.choices == ["auto", "preshard"]
    seen = []
    config = types.SimpleNamespace(load_format="auto")
    sglang.plugin._verify_load_format(seen.append, config)
    assert seen == [config] and config.load_format == "auto"


def test_every_parameter_is_the_files(sglang: Stand, made) -> None:
    directory = made(LLAMA)
    sglang.build = like(directory)
    built = load(sglang, directory, "LlamaForCausalLM")
    shard = preshard.load(directory, 1)
    assert {name for name, _ in built.named_parameters()} == set(shard)
    for name, parameter in built.named_parameters():
        assert torch.equal(parameter, shard[name])
    # The model derives from its weights before its layers do, as with SGLang's own loader.
    assert sglang.steps == ["model", "layers"]


def test_the_draft_lies_beside_the_model_or_alone(sglang: Stand, made) -> None:
    for directory in (made(GLM5), made(GLM5, mtp="only")):
        sglang.build = like(directory, "mtp")
        built = load(sglang, directory, "GlmMoeDsaForCausalLMNextN", draft=True)
        shard = preshard.load(directory, 1, part="mtp")
        assert "model.decoder.mlp.gate.weight" in shard
        assert all(torch.equal(parameter, shard[name]) for name, parameter in built.named_parameters())
    with pytest.raises(ShardsError, match="holds no part model of rank 1"):
        load(sglang, made(GLM5, mtp="only"), "GlmMoeDsaForCausalLM")


def test_damage_is_found_before_the_model_is_served(sglang: Stand, made, tmp_path: Path) -> None:
    import shutil

    directory = Path(shutil.copytree(made(LLAMA), tmp_path / "damaged"))
    sglang.build = like(directory)
    file = directory / "model-rank-1-part-0.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(ShardsError, match="model-rank-1-part-0.safetensors"):
        load(sglang, directory, "LlamaForCausalLM")
    assert sglang.steps == []


def test_a_kernel_with_up_before_gate_is_refused(sglang: Stand, made) -> None:
    directory = made(QWEN3MOE)

    def build() -> torch.nn.Module:
        model = like(directory)()
        model.get_submodule("model.layers.0.mlp.experts").quant_method = types.SimpleNamespace(
            load_up_proj_weight_first=True
        )
        return model

    sglang.build = build
    with pytest.raises(ShardsError, match="holds up before gate.*start with --moe-runner-backend triton"):
        load(sglang, directory, "Qwen3MoeForCausalLM")


def test_options_and_places_are_checked(sglang: Stand, made, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="--model-loader-extra-config: speed unknown"):
        load(sglang, made(LLAMA), "LlamaForCausalLM", speed=9)
    with pytest.raises(RequestError, match="no directory"):
        load(sglang, tmp_path / "none", "LlamaForCausalLM")
    sglang.parallel.tp_size = 4
    with pytest.raises(ShardsError, match="converted for tensor parallel size 2, the engine runs 4"):
        load(sglang, made(LLAMA), "LlamaForCausalLM")
