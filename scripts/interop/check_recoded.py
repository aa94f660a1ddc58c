#!/usr/bin/env python3
"""Holds a checkpoint of `--weights fast` against compressed-tensors and transformers.

    check_recoded.py FAST F32 [--prompt TEXT]

FAST and F32 are one GGUF converted by `--layout hf --weights fast` (or fast-f16) and `--weights f32`. Each
recoded matrix is decoded by numpy, from the format's description, and by compressed-tensors itself: the codes have
to be the same, the error that of the manifest. With a prompt, transformers loads both checkpoints, and the logits
are compared. Needs numpy, safetensors, torch, compressed-tensors and, for logits, transformers.
"""

import argparse
import json
from pathlib import Path

import numpy as np
import torch
from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32
from safetensors import safe_open


def tensors(directory: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint, by name."""
    found = {}
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            names = list(file.keys())
            found.update((name, file.get_tensor(name)) for name in names)
    return found


def codes(words: np.ndarray, bits: int, cols: int) -> np.ndarray:
    """Codes less their middle: from the lowest bits of each word on."""
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    found = words.view(np.uint32)[:, :, None] >> shifts & np.uint32((1 << bits) - 1)
    return found.reshape(len(words), -1)[:, :cols].astype(np.int32) - (1 << (bits - 1))


def weights(fast: Path, f32: Path) -> None:
    """Compares every recoded matrix."""
    packed, plain = tensors(fast), tensors(f32)
    manifest = json.loads((fast / "preshard.json").read_text())
    entries = [
        t for s in manifest["shards"] for t in s["tensors"] if t.get("recoded", {}).get("holds") == "codes"
    ]
    exact, largest, furthest = 0, 0.0, 0.0
    for entry in entries:
        bits, group = entry["recoded"]["bits"], entry["recoded"]["group"]
        name = entry["members"][0]["hf"].removesuffix("weight")
        words, scale = packed[name + "weight_packed"], packed[name + "weight_scale"]
        shape = torch.Size(packed[name + "weight_shape"].tolist())
        found = codes(words.numpy(), bits, shape[1])
        theirs = unpack_from_int32(words, bits, shape)
        assert np.array_equal(theirs.numpy(), found.astype(np.int8)), name
        scales = scale.to(torch.float64).numpy().repeat(group, 1)
        expected = plain[name + "weight"].to(torch.float64).numpy()
        error = np.sqrt(np.square(found * scales - expected).sum() / np.square(expected).sum())
        told = entry["recoded"]["error"] / 1e6
        assert (error == 0) == (told == 0), f"{name}: error {error}, told {told}"
        assert abs(error - told) <= 0.1 * told + 1e-6, f"{name}: error {error}, told {told}"
        exact += error == 0
        largest = max(largest, error)
        furthest = max(furthest, abs(error - told) / told if told else 0.0)
    print(
        f"{len(entries)} matrices, {exact} exact, error {largest:.4%} at most, "
        f"the manifest's within {furthest:.2%} of it"
    )


def logits(directory: Path, prompt: str) -> torch.Tensor:
    """The logits of a prompt, computed in f32."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokens = AutoTokenizer.from_pretrained(directory)(prompt, return_tensors="pt")
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    with torch.no_grad():
        return model(**tokens).logits[0]


def main() -> None:
    """Compares weights and, with a prompt, logits."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("fast", type=Path)
    parser.add_argument("f32", type=Path)
    parser.add_argument("--prompt")
    args = parser.parse_args()
    weights(args.fast, args.f32)
    if args.prompt:
        found, expected = logits(args.fast, args.prompt), logits(args.f32, args.prompt)
        error = ((found - expected).square().sum() / expected.square().sum()).sqrt().item()
        same = (found.argmax(-1) == expected.argmax(-1)).sum().item()
        print(f"logits differ by {error:.4%}; {same} of {len(found)} tokens have the same first choice")


if __name__ == "__main__":
    main()
