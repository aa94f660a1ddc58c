#!/usr/bin/env python3
"""Writes kernels/grids.cuh from src/quant/grids.rs, where the grids of the iq types live.

usage: scripts/emit_grids.py [--check]    --check writes nothing and fails on a difference
"""

import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "quant" / "grids.rs"
HEADER = ROOT / "kernels" / "grids.cuh"
PER_LINE = 12


def emit(rust):
    """The text of grids.cuh: every `const NAME_PACKED: [u16; N]` as `NAME[N]`."""
    tables = re.findall(r"const (\w+)_PACKED: \[u16; (\d+)\] = \[([^\]]*)\]", rust)
    if not tables:
        sys.exit(f"{SOURCE.name}: no table of packed entries found")
    out = [
        "// The grids of the iq1, iq2 and iq3 types, from src/quant/grids.rs. Written by",
        "// scripts/emit_grids.py; do not edit. An entry is 8 elements of 2 bits, or 4 of 4 bits, each the",
        "// number of a level.",
        "#pragma once",
    ]
    for name, count, body in tables:
        entries = re.findall(r"0x[0-9a-f]{4}", body)
        if len(entries) != int(count):
            sys.exit(f"{SOURCE.name}: {name}: {len(entries)} entries, {count} declared")
        out += ["", f"__device__ const unsigned short {name}[{count}] = {{"]
        out += ["    " + ", ".join(entries[i : i + PER_LINE]) + "," for i in range(0, len(entries), PER_LINE)]
        out += ["};"]
    return "\n".join(out) + "\n"


def main():
    text = emit(SOURCE.read_text())
    if sys.argv[1:] == ["--check"]:
        if HEADER.read_text() != text:
            sys.exit(f"{HEADER.name}: differs from {SOURCE.name}: run scripts/emit_grids.py and commit the result")
    elif sys.argv[1:]:
        sys.exit(__doc__)
    else:
        HEADER.write_text(text)


main()
