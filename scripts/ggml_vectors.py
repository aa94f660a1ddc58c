#!/usr/bin/env python3
"""Writes tests/fixtures/decode/vectors.{bin,json}: random blocks of every type and what ggml makes of them.

usage: python scripts/ggml_vectors.py

Needs numpy and llama-cpp-python 0.3.36, of which only ggml's C library (libggml-base) is used.
ggml decodes the quantised types, f16 and bf16; numpy does the f64 and f32 casts and the rounding of
all f32 results to bf16 and f16.

Blocks are random bytes; in the first ones of each type every f16 scale is one of SCALES (zeros,
subnormals, the largest, infinities, NaNs), or every byte scale one of BYTE_SCALES.

vectors.bin holds for each type, in the order of vectors.json: the blocks, then the elements as f32,
bf16 and f16, little-endian. NaNs of decoded values are written as one NaN (0x7fc00000, 0x7fc0,
0x7e00), except where a float type keeps its dtype (a copy), in bf16 to f32 (exact) and in f32 to bf16
(sign and upper payload stay, bit 6 is set).
"""

import ctypes
import importlib.util
import json
import pathlib

import numpy as np

ROOT = pathlib.Path(__file__).resolve().parent.parent
LLAMA = pathlib.Path(importlib.util.find_spec("llama_cpp").origin).parent
GGML = ctypes.CDLL(str(LLAMA / "lib" / "libggml-base.so"))

SCALES = [0x0000, 0x8000, 0x0001, 0x83FF, 0x0400, 0x7BFF, 0xFBFF, 0x7C00, 0xFC00, 0x7C01, 0x7E00, 0xFFFF]
BYTE_SCALES = [0, 1, 2, 7, 8, 0x7E, 0x7F, 0x80, 0x81, 252, 253, 254, 255]
BLOCKS = 16

# Offsets of the f16 scales in each block (ggml-common.h).
F16_AT = {
    "q4_0": [0], "q4_1": [0, 2], "q5_0": [0], "q5_1": [0, 2], "q8_0": [0],
    "q2_K": [80, 82], "q3_K": [108], "q4_K": [0, 2], "q5_K": [0, 2], "q6_K": [208],
    "iq2_xxs": [0], "iq2_xs": [0], "iq3_xxs": [0], "iq1_s": [0], "iq4_nl": [0], "iq3_s": [0],
    "iq2_s": [0], "iq4_xs": [0], "tq1_0": [52], "tq2_0": [64], "q1_0": [0], "q2_0": [0],
}
BYTES_AT = {"mxfp4": [0], "nvfp4": [0, 1, 2, 3]}


class Traits(ctypes.Structure):
    _fields_ = [
        ("name", ctypes.c_char_p),
        ("block", ctypes.c_int64),
        ("interleave", ctypes.c_int64),
        ("bytes", ctypes.c_size_t),
        ("quantised", ctypes.c_bool),
        ("to_float", ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)),
    ]


GGML.ggml_get_type_traits.restype = ctypes.POINTER(Traits)


def canonical(f32):
    return np.where(np.isnan(f32), np.uint32(0x7FC00000), f32.view(np.uint32)).view(np.float32)


def to_bf16(f32):
    bits = f32.view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return np.where(np.isnan(f32), bits >> 16 | 64, rounded).astype("<u2")


def to_f16(f32):
    with np.errstate(all="ignore"):
        halves = f32.astype(np.float16).view(np.uint16)
    return np.where(np.isnan(f32), np.uint16(0x7E00), halves).astype("<u2")


def set_f16(block, at, value):
    block[at : at + 2] = [value & 255, value >> 8]


def random_blocks(rng, name, size):
    """Blocks of `size` bytes, the first ones with special scales."""
    blocks = rng.integers(0, 256, (BLOCKS, size), dtype=np.uint8)
    for i, block in enumerate(blocks):
        special = i < len(SCALES)
        for j, at in enumerate(F16_AT.get(name, [])):
            # Two scales take different special values; the ordinary blocks stay finite.
            ordinary = int(rng.integers(0, 0x7C00)) | int(rng.integers(0, 2)) << 15
            set_f16(block, at, SCALES[(i + 5 * j) % len(SCALES)] if special else ordinary)
        for j, at in enumerate(BYTES_AT.get(name, [])):
            block[at] = BYTE_SCALES[(i + 5 * j) % len(BYTE_SCALES)] if special else rng.integers(0, 256)
        if name == "iq1_m":
            # A quarter of the f16 scale in the top nibble of each of the last four words.
            scale = SCALES[i] if special else int(rng.integers(0, 0x7C00))
            for k in range(4):
                block[49 + 2 * k] = block[49 + 2 * k] & 15 | (scale >> 4 * k & 15) << 4
    return blocks.reshape(-1)


def random_floats(rng, name, size):
    """Random bit patterns, so that NaNs, infinities and subnormals are among them."""
    count = 1024
    if name != "f64":
        return rng.integers(0, 256, count * size, dtype=np.uint8)
    # Most f64 overflow f32 or vanish in it: half of them are f32 values with noise below.
    f32 = rng.integers(0, 1 << 32, count // 2, dtype=np.uint64).astype(np.uint32).view(np.float32)
    with np.errstate(all="ignore"):
        near = f32.astype(np.float64).view(np.uint64) ^ rng.integers(0, 1 << 30, count // 2, dtype=np.uint64)
    wild = rng.integers(0, 1 << 64, count // 2, dtype=np.uint64, endpoint=False)
    return np.concatenate([near, wild]).view(np.uint8)


def main():
    rows, data = [], []
    for id in range(43):
        traits = GGML.ggml_get_type_traits(id).contents
        name = (traits.name or b"").decode()
        if traits.bytes == 0 or not (traits.to_float or name in ("f32", "f64")):
            continue
        rng = np.random.default_rng([20, id])
        if traits.quantised:
            blocks = random_blocks(rng, name, traits.bytes)
        else:
            blocks = random_floats(rng, name, traits.bytes)
        count = blocks.size // traits.bytes * traits.block
        if name == "f32":
            f32 = blocks.view(np.float32)
        elif name == "f64":
            with np.errstate(all="ignore"):
                f32 = canonical(blocks.view(np.float64).astype(np.float32))
        else:
            f32 = np.zeros(count, np.float32)
            traits.to_float(blocks.ctypes.data, f32.ctypes.data, count)
            if name != "bf16":
                f32 = canonical(f32)
        outputs = {"f32": f32.view(np.uint32).astype("<u4"), "bf16": to_bf16(f32), "f16": to_f16(f32)}
        if name in outputs:
            outputs[name] = blocks
        rows.append({"id": id, "name": name, "elements": int(count)})
        data += [blocks.tobytes()] + [outputs[k].tobytes() for k in ("f32", "bf16", "f16")]
    folder = ROOT / "tests" / "fixtures" / "decode"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vectors.bin").write_bytes(b"".join(data))
    (folder / "vectors.json").write_text("[\n" + ",\n".join(json.dumps(r) for r in rows) + "\n]\n")


main()
