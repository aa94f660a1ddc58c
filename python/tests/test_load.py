"""A loaded shard is the file, byte for byte, in one piece of memory."""

from __future__ import annotations

import gc
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import preshard

torch = pytest.importorskip("torch")
safetensors_torch = pytest.importorskip("safetensors.torch")

FILE = "model-rank-{}-part-0.safetensors"


@pytest.mark.parametrize("rank", [0, 1])
def test_equals_safetensors(llama: Path, rank: int) -> None:
    reference = safetensors_torch.load_file(llama / FILE.format(rank))
    shard = preshard.load(llama, rank)
    assert set(shard) == set(reference) and len(shard) == len(reference)
    for name, tensor in reference.items():
        assert (shard[name].dtype, shard[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(shard[name], tensor), name


def test_packed_bytes_and_their_description(packed: Path) -> None:
    reference = safetensors_torch.load_file(packed / FILE.format(0))
    shard = preshard.load(packed)
    types = dict(preshard._native.ggml_types())
    seen = 0
    for name in shard:
        assert torch.equal(shard[name], reference[name]), name
        entry = shard.info(name)
        if not entry.packed:
            continue
        seen += 1
        assert entry.logical is not None and entry.logical[0] == entry.shape[0]
        assert [m.rows[1] for m in entry.members][-1] == entry.shape[0]
        assert shard[name + "_type"].tolist() == [types[m.types[0]] for m in entry.members]
    assert seen == 10  # embedding, head, and four in each of two layers


def test_tensors_are_views_of_one_allocation(llama: Path) -> None:
    shard = preshard.load(llama)
    for name in shard:
        assert shard[name].data_ptr() == shard.address + shard.info(name).offset
    norm = shard["model.norm.weight"]
    assert shard["model.norm.weight"] is norm
    norm[0] = 42
    again = torch.frombuffer(shard.raw("model.norm.weight"), dtype=torch.bfloat16)
    assert again[0] == 42


def test_a_tensor_outlives_its_shard(llama: Path) -> None:
    shard = preshard.load(llama)
    norm = shard["model.norm.weight"]
    expected = norm.clone()
    del shard
    gc.collect()
    assert torch.equal(norm, expected)
    raw = memoryview(preshard.load(llama).raw("model.norm.weight"))
    gc.collect()
    assert bytes(raw) == expected.view(torch.uint8).numpy().tobytes()


def test_torch_is_not_needed(llama: Path) -> None:
    program = f"""
import sys
sys.modules["torch"] = None
import preshard
shard = preshard.load({str(llama)!r})
raw = shard.raw("model.norm.weight")
assert len(memoryview(raw)) == raw.nbytes == 512 and raw.dtype == "BF16"
try:
    shard["model.norm.weight"]
except ImportError:
    print("fine")
"""
    out = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=llama
    )
    assert out.stdout == "fine\n"


def test_numpy_reads_float32_through_dlpack(llama: Path) -> None:
    numpy = pytest.importorskip("numpy")
    raw = preshard.load(llama).raw("model.layers.0.self_attn.attn._k_scale")
    assert raw.__dlpack_device__() == (1, 0)
    assert numpy.from_dlpack(raw) == 1.0


def test_manifest(llama: Path) -> None:
    manifest = preshard.Manifest.read(llama)
    text = json.loads((llama / "preshard.json").read_text())
    assert manifest.model.class_name == text["model"]["class"] == "LlamaForCausalLM"
    assert (manifest.policy.tp, manifest.policy.weights) == (2, "bf16")
    entry = manifest.shard(1)
    assert entry is not None and entry.file == FILE.format(1)
    assert entry.bytes == (llama / entry.file).stat().st_size
    assert preshard.load(llama, 1).manifest == manifest
    assert manifest.shard(2) is None and not manifest.packed
    assert manifest.shards[-1] is entry and manifest.shards[:] == (manifest.shard(0), entry)
    copy = pickle.loads(pickle.dumps(manifest))
    assert copy == manifest and copy.shard(1) == entry and hash(copy) == hash(manifest)


def test_no_such_rank(llama: Path) -> None:
    with pytest.raises(preshard.ShardsError, match="holds no part model of stage 0, rank 7"):
        preshard.load(llama, 7)


def test_no_manifest(tmp_path: Path) -> None:
    with pytest.raises(preshard.ShardsError, match="preshard.json: not found"):
        preshard.load(tmp_path)
    with pytest.raises(preshard.FileError) as error:
        preshard.load(tmp_path / "nowhere")
    assert isinstance(error.value, OSError) and error.value.errno == 2


def test_a_changed_byte_is_found_and_named(own_llama: Path) -> None:
    file = own_llama / FILE.format(0)
    entry = preshard.Manifest.read(own_llama).shard(0)
    assert entry is not None
    tensor = next(t for t in entry.tensors if t.name == "model.layers.1.mlp.down_proj.weight")
    data = bytearray(file.read_bytes())
    data[tensor.offset + 17] ^= 1
    file.write_bytes(data)
    with pytest.raises(preshard.ShardsError, match="leaves damaged"):
        preshard.load(own_llama)
    assert not preshard.load(own_llama, verify=False).stats.verified
    preshard.load(own_llama, 1)


def test_truncated_and_stray_files(own_llama: Path) -> None:
    file = own_llama / FILE.format(0)
    size = file.stat().st_size
    os.truncate(file, size - 1)
    with pytest.raises(preshard.ShardsError, match=f"{size - 1} bytes, expected {size}"):
        preshard.load(own_llama)
    (own_llama / "model-rank-9-part-0.safetensors").write_bytes(b"")
    with pytest.raises(preshard.ShardsError, match="not in the manifest"):
        preshard.load(own_llama, 1)


@pytest.mark.parametrize(
    ("place", "value", "text"),
    [
        (("policy", "tp"), 4, "vocab_rows"),
        (("policy", "pp"), 2, "stages"),
        (("policy", "stages"), [0, 1], "stages"),
        (("policy", "layout"), "hf", "layout"),
        (("policy", "weights"), "f16", "dtype BF16, with --weights f16"),
        (("policy", "weights"), "best", "unknown variant .best., expected one of .keep., .bf16."),
        (("model", "layers"), 3, "stages"),
        (("model", "vocab"), 1, "vocab_rows"),
        (("model", "vocab_padded"), 1 << 40, "vocab_rows"),
        (("model", "experts"), 8, "experts"),
        (("model", "class"), "MistralForCausalLM", "config.json: names the class LlamaForCausalLM"),
        (("shards", 1, "tp"), 0, "whose file is called model-rank-0-part-0.safetensors"),
        (("shards", 1, "tp"), 2, "rank 2 of 1 stages of 2 ranks"),
        (("shards", 1, "pp"), 1, "stage 1"),
        (("shards", 1, "part"), "mtp", "mtp"),
        (("shards", 1, "vocab_rows"), [0, 256], "vocab_rows"),
        (("shards", 1, "experts"), [0], "experts"),
        (("shards", 1, "blake3"), "0" * 64, "do not fold"),
        (("shards", 1, "tensors", 0, "name"), "x", "not as in model-rank-0"),
        (("shards", 1, "tensors", 0, "dtype"), "F32", "bytes"),
        (("shards", 1, "tensors", 0, "shape"), [1], "bytes"),
        (("shards", 1, "tensors", 0, "members"), [], "without members"),
        (("shards", 1, "tensors", 0, "members", 0, "rows"), [0, 1], "row"),
        (("shards", 1, "tensors", 0, "members", 0, "types"), ["q9_9"], "expected a float or quantised"),
    ],
)
def test_a_manifest_that_contradicts_itself(
    own_llama: Path, place: tuple[str | int, ...], value: object, text: str
) -> None:
    path = own_llama / "preshard.json"
    manifest = json.loads(path.read_text())
    at = manifest
    for key in place[:-1]:
        at = at[key]
    at[place[-1]] = value
    path.write_text(json.dumps(manifest))
    with pytest.raises(preshard.ShardsError, match=text) as error:
        preshard.load(own_llama)
    assert len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"device": "tpu"}, "expected cpu, cuda or cuda:N"),
        ({"device": "cuda:-1"}, "expected cpu, cuda or cuda:N"),
        ({"method": "telepathy"}, "expected auto"),
        ({"chunk": 12345}, "power of two"),
        ({"threads": 0}, "expected 1 to 256"),
        ({"memory": torch.empty(8)}, "for a GPU only"),
        ({"memory": torch.empty(8, 8).T[:3]}, "not contiguous"),
    ],
)
def test_wrong_arguments(llama: Path, arguments: dict[str, object], text: str) -> None:
    with pytest.raises(preshard.RequestError, match=text):
        preshard.load(llama, **arguments)  # type: ignore[arg-type]


def test_errors_travel_between_processes(llama: Path) -> None:
    with pytest.raises(preshard.ShardsError) as error:
        preshard.load(llama, 7)
    copy = pickle.loads(pickle.dumps(error.value))
    assert (type(copy), str(copy), copy.problems) == (
        type(error.value),
        str(error.value),
        error.value.problems,
    )


def test_ctrl_c(llama: Path) -> None:
    timer = threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        for _ in range(100_000):
            preshard.load(llama)
    timer.join()
    assert len(preshard.load(llama)) > 0


gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@gpu
@pytest.mark.parametrize("lend", [False, True])
def test_gpu(packed: Path, lend: bool) -> None:
    entry = preshard.Manifest.read(packed).shard(0)
    assert entry is not None
    memory = torch.empty(entry.bytes, dtype=torch.uint8, device="cuda:0") if lend else None
    shard = preshard.load(packed, 0, "cuda:0", memory=memory)
    reference = safetensors_torch.load_file(packed / FILE.format(0), device="cuda:0")
    assert set(shard) == set(reference)
    for name in shard:
        assert shard[name].device == torch.device("cuda:0")
        assert (shard[name].dtype, shard[name].shape) == (reference[name].dtype, reference[name].shape)
        assert shard[name].data_ptr() == shard.address + shard.info(name).offset
        assert torch.equal(shard[name], reference[name]), name
    assert shard.device == "cuda:0" and repr(shard).endswith("on cuda:0>")
    with pytest.raises(BufferError, match="in GPU memory"):
        memoryview(shard.raw("model.norm.weight"))
    if memory is not None:
        assert shard.address == memory.data_ptr()
    # A view outlives the shard.
    norm = shard["model.norm.weight"]
    del shard, memory
    gc.collect()
    torch.empty(64 << 20, dtype=torch.uint8, device="cuda:0").fill_(255)
    assert torch.equal(norm, reference["model.norm.weight"])


@gpu
def test_gpu_refusals(own_llama: Path) -> None:
    entry = preshard.Manifest.read(own_llama).shard(0)
    assert entry is not None
    short = torch.empty(entry.bytes - 1, dtype=torch.uint8, device="cuda:0")
    with pytest.raises(preshard.RequestError, match=f"expected at least {entry.bytes}"):
        preshard.load(own_llama, 0, "cuda:0", memory=short)
    with pytest.raises(preshard.DeviceError, match="^cuda:99: "):
        preshard.load(own_llama, 0, "cuda:99")
    file = own_llama / FILE.format(0)
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(preshard.ShardsError, match="leaves damaged"):
        preshard.load(own_llama, 0, "cuda:0")
    assert preshard.load(own_llama, 1, "cuda:0").stats.verified
