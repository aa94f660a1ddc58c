"""What the vLLM plugin does to a model, on models made here: vLLM itself is run by scripts/interop_vllm.sh."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

import preshard
from preshard import ShardsError

torch = pytest.importorskip("torch")

from preshard import bind
from preshard.vllm import contract


def module(parts: dict[str, torch.Tensor]) -> torch.nn.Module:
    """A module tree with these parameters."""
    root = torch.nn.Module()
    for name, tensor in parts.items():
        *path, leaf = name.split(".")
        at = root
        for step in path:
            if step not in at._modules:
                at.add_module(step, torch.nn.Module())
            at = at._modules[step]
        at.register_parameter(leaf, torch.nn.Parameter(tensor, requires_grad=False))
    return root


def model(shard: preshard.Shard) -> torch.nn.Module:
    return module({name: torch.empty_like(shard[name]) for name in shard})


def refuse(slot: object, entry: object, view: object) -> None:
    raise AssertionError("nothing here is packed")


def test_every_parameter_is_a_view_of_the_shard(llama: Path) -> None:
    shard = preshard.load(llama)
    built = model(shard)
    objects = dict(built.named_parameters())
    bind.bind(bind.match(built, shard.entry), shard, refuse)
    for name, parameter in built.named_parameters():
        assert parameter is objects[name]
        assert parameter.data_ptr() == shard[name].data_ptr()
        assert torch.equal(parameter, shard[name])


def test_large_parameters_have_no_memory_until_they_are_bound() -> None:
    with bind.released():
        built = module({"big": torch.empty(1 << 20, dtype=torch.float32), "small": torch.zeros(4)})
        built.add_module("plain", torch.nn.Linear(1024, 1024))  # writes to its parameters as it is built
    for parameter, size in (
        (built.big, 0),
        (built.plain.weight, 0),
        (built.small, 16),
        (built.plain.bias, 4096),
    ):
        assert parameter.untyped_storage().nbytes() == size
    assert built.big.shape == (1 << 20,) and built.plain.weight.shape == (1024, 1024)
    assert module({"x": torch.empty(1 << 20)}).x.untyped_storage().nbytes() == 4 << 20


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_model_on_a_gpu_never_needs_its_memory_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the plugin does: built without its memory, loaded into memory of torch's allocator, bound."""
    from conftest import LLAMA

    preshard.convert(LLAMA, tmp_path / "tp1", weights="f32")
    reference = preshard.load(tmp_path / "tp1")
    monkeypatch.setattr(bind, "_SMALL", 1 << 14)  # the model is small
    large = sum(t.bytes for t in reference.entry.tensors if t.bytes >= 1 << 14)
    assert large > reference.entry.bytes // 2
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with bind.released(), torch.device("cuda:0"):
        built = module(
            {n: torch.empty(reference[n].shape, dtype=reference[n].dtype) for n in reversed(list(reference))}
        )
    small = torch.cuda.memory_allocated() - before
    assert small < reference.entry.bytes - large + len(reference) * 512
    pairs = bind.match(built, reference.entry)
    memory = torch.empty(reference.entry.bytes, dtype=torch.uint8, device="cuda:0")
    shard = preshard.load(tmp_path / "tp1", 0, "cuda:0", memory=memory)
    bind.bind(pairs, shard, refuse)
    del memory, shard
    assert torch.cuda.max_memory_allocated() - before < reference.entry.bytes + small + (4 << 20)
    assert torch.cuda.memory_allocated() - before < reference.entry.bytes + (4 << 20)
    for name, parameter in built.named_parameters():
        assert parameter.device == torch.device("cuda:0")
        assert torch.equal(parameter.cpu(), reference[name]), name
    assert torch.isfinite(torch.nn.functional.linear(built.model.norm.weight, built.lm_head.weight)).all()


def test_lod_03_shared_parameters_are_bound_once_and_by_any_name(llama: Path) -> None:
    shard = preshard.load(llama)
    built = model(shard)
    built.add_module("again", built.model)
    head = built.lm_head.weight
    built.register_buffer("rows", head.data[2:4], persistent=False)
    built.kept = head.data
    bind.bind(bind.match(built, shard.entry), shard, refuse)
    assert built.again.norm.weight is built.model.norm.weight
    assert torch.equal(built.rows, shard["lm_head.weight"][2:4])
    assert built.kept.data_ptr() == shard["lm_head.weight"].data_ptr()
    assert built.rows.data_ptr() == shard["lm_head.weight"][2:4].data_ptr()


def test_an_alias_serves_where_the_engine_has_no_such_name(llama: Path) -> None:
    shard = preshard.load(llama)
    old, new = "model.norm.weight", "model.final_norm.weight"
    built = module({new if name == old else name: torch.empty_like(shard[name]) for name in shard})
    with pytest.raises(ShardsError, match="no tensor for 1 parameters of the model: model.final_norm.weight"):
        bind.match(built, shard.entry)
    tensors = tuple(
        dataclasses.replace(t, aliases=(new,)) if t.name == old else t for t in shard.entry.tensors
    )
    bind.bind(bind.match(built, dataclasses.replace(shard.entry, tensors=tensors)), shard, refuse)
    assert torch.equal(built.model.final_norm.weight, shard[old])


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda t: None, "1 tensors that the model has no parameter for: model.norm.weight"),
        (lambda t: t[:-1], r"model.norm.weight: BF16 \[256\], the model has BF16 \[255\]"),
        (lambda t: t.repeat(2)[:257], r"model.norm.weight: BF16 \[256\], the model has BF16 \[257\]"),
        (lambda t: t.view(1, 256), r"model.norm.weight: BF16 \[256\], the model has BF16 \[1, 256\]"),
        (lambda t: t.view(torch.float16), r"model.norm.weight: BF16 \[256\], the model has F16 \[256\]"),
        (lambda t: t.float(), r"model.norm.weight: BF16 \[256\], the model has F32 \[256\]"),
    ],
)
def test_lod_02_what_does_not_fit_is_refused(llama: Path, change, text: str) -> None:
    shard = preshard.load(llama)
    parts = {name: torch.empty_like(shard[name]) for name in shard}
    changed = change(parts.pop("model.norm.weight"))
    if changed is not None:
        parts["model.norm.weight"] = changed
    with pytest.raises(ShardsError, match=text):
        bind.match(module(parts), shard.entry)


ENGINE = contract.Engine(tp=2, pp=1, ep=False, dp=1, class_names=("LlamaForCausalLM",), quantization=None)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"tp": 8}, "tensor parallel size 2, the engine runs 8: start with --tensor-parallel-size 2"),
        ({"pp": 2}, "pipeline parallel size 1, the engine runs 2"),
        ({"class_names": ("Qwen2ForCausalLM",)}, "class LlamaForCausalLM, the engine runs Qwen2ForCausalLM"),
        ({"quantization": "gguf"}, "holds no packed weights"),
        ({"quantization": "fp8"}, "leave out --quantization"),
    ],
)
def test_another_engine_is_refused(llama: Path, change: dict[str, object], text: str) -> None:
    manifest = preshard.Manifest.read(llama)
    contract.check(str(llama), manifest, ENGINE)
    with pytest.raises(ShardsError, match=text):
        contract.check(str(llama), manifest, dataclasses.replace(ENGINE, **change))


def test_expert_parallelism_must_agree(llama: Path) -> None:
    manifest = preshard.Manifest.read(llama)
    contract.check(str(llama), manifest, dataclasses.replace(ENGINE, ep=True))  # a dense model does not care
    manifest = dataclasses.replace(manifest, model=dataclasses.replace(manifest.model, experts=8))
    with pytest.raises(ShardsError, match="expert parallelism off, the engine runs on"):
        contract.check(str(llama), manifest, dataclasses.replace(ENGINE, ep=True))


def test_an_ordinary_checkpoint_is_refused(tmp_path: Path) -> None:
    from conftest import LLAMA

    preshard.convert(LLAMA, tmp_path / "hf", layout="hf")
    manifest = preshard.Manifest.read(tmp_path / "hf")
    with pytest.raises(ShardsError, match="leave out --load-format preshard"):
        contract.check("hf", manifest, dataclasses.replace(ENGINE, tp=1))


def test_packed_layers_are_told_by_their_whole_names(packed: Path) -> None:
    entry = preshard.Manifest.read(packed).shard(0)
    assert entry is not None and preshard.Manifest.read(packed).packed
    packing = contract.Packing(entry)
    assert packing.is_packed("model.layers.1.self_attn.qkv_proj")
    assert (
        packing.is_packed("lm_head")
        and packing.embedding_packed("")
        and packing.embedding_packed("model.embed_tokens")
    )
    assert not packing.is_packed("model.norm") and not packing.is_packed("model.layers.1.self_attn.qkv")
    assert not packing.is_packed("layers.1.self_attn.qkv_proj")
