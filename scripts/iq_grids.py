#!/usr/bin/env python3
"""Writes src/quant/grids.rs from the tables in the PyPI package `gguf` (0.19.0).

usage: python scripts/iq_grids.py > src/quant/grids.rs && cargo fmt

Each entry of an IQ grid is 8 (iq1, iq2) or 4 (iq3) small numbers taken from at most 8 levels, so
it packs into 16 bits: element j is level number (entry >> j * width) & mask.
"""

import gguf.quants as q

GRIDS = [
    ("IQ1", q.IQ1_S, "iq1_s and iq1_m"),
    ("IQ2_XXS", q.IQ2_XXS, "iq2_xxs"),
    ("IQ2_XS", q.IQ2_XS, "iq2_xs"),
    ("IQ2_S", q.IQ2_S, "iq2_s"),
    ("IQ3_XXS", q.IQ3_XXS, "iq3_xxs"),
    ("IQ3_S", q.IQ3_S, "iq3_s"),
]

HEAD = """\
//! The grids of the iq1, iq2 and iq3 types. Written by `scripts/iq_grids.py`; do not edit.
//!
//! ggml stores each grid as 32- or 64-bit words of small numbers (`iq2xxs_grid` and the others in
//! `ggml-common.h`). Here an entry is 16 bits: 8 elements of 2 bits, or 4 elements of 4 bits, each the
//! number of a level. `unpack` turns them back into ggml's words when the crate is compiled.

const fn unpack<const N: usize, const E: usize>(packed: [u16; N], levels: &[i8]) -> [[i8; E]; N] {
    let width = 16 / E;
    let mut grid = [[0; E]; N];
    let mut i = 0;
    while i < N {
        let mut j = 0;
        while j < E {
            grid[i][j] = levels[(packed[i] >> (j * width)) as usize & ((1 << width) - 1)];
            j += 1;
        }
        i += 1;
    }
    grid
}
"""

print(HEAD)
for name, kind, users in GRIDS:
    raw = bytes.fromhex(kind.grid_hex.decode())
    entries = [raw[i] | raw[i + 1] << 8 for i in range(0, len(raw), 2)]
    n, elements = kind.grid_shape
    assert len(entries) == n
    levels = ", ".join(str(v) for v in kind.grid_map)
    print(f"/// The grid of {users}: {n} entries of {elements} elements.")
    print(f"pub(super) static {name}: [[i8; {elements}]; {n}] = unpack({name}_PACKED, &[{levels}]);\n")
for name, kind, _ in GRIDS:
    raw = bytes.fromhex(kind.grid_hex.decode())
    words = [f"0x{raw[i] | raw[i + 1] << 8:04x}," for i in range(0, len(raw), 2)]
    print(f"#[rustfmt::skip]\nconst {name}_PACKED: [u16; {len(words)}] = [")
    for i in range(0, len(words), 15):
        print("    " + " ".join(words[i : i + 15]))
    print("];\n")
