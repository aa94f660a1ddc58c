#!/usr/bin/env python3
"""Writes what gguf-py reads from a GGUF (all its splits), for tests/parse.rs to compare with.

Usage: gguf_expected.py OUT.json FIRST.gguf [MORE.gguf ...]      (needs gguf 0.19 and numpy)
       gguf_expected.py --all-values OUT.gguf     writes a file with every kind of metadata value

Bytes are written as one character each (Latin-1), floats as the 16 hex digits of their f64 bits, so
that JSON loses nothing. Offsets are from the start of the file.
"""

import json
import os
import struct
import sys

import numpy as np
from gguf import GGUFReader, GGUFWriter, GGUFValueType as T


def scalar(kind, part):
    if kind == T.STRING:
        return bytes(part).decode("latin-1")
    value = part[0]
    if kind in (T.FLOAT32, T.FLOAT64):
        return {"f64": struct.pack(">d", float(value)).hex()}
    return bool(value) if kind == T.BOOL else int(value)


def value(field):
    if field.types[0] != T.ARRAY:
        return scalar(field.types[0], field.parts[field.data[0]])
    # An empty array's parts end with its length; its data is empty.
    return [scalar(field.types[-1], field.parts[i]) for i in field.data]


def main(out, paths):
    model = {"files": [], "metadata": {}, "tensors": []}
    for number, path in enumerate(paths):
        reader = GGUFReader(path)
        data = open(path, "rb").read()
        model["files"].append({"file": os.path.basename(path), "data_start": int(reader.data_offset)})
        if number == 0:
            for key, field in sorted(reader.fields.items()):
                # gguf-py adds the three counts of the header under GGUF.*.
                if not key.startswith("GGUF."):
                    model["metadata"][key] = value(field)
        for t in reader.tensors:
            end = int(t.data_offset) + int(t.n_bytes)
            model["tensors"].append(
                {
                    "name": t.name,
                    "type": int(t.tensor_type),
                    "ne": [int(n) for n in t.shape],
                    "file": number,
                    "offset": int(t.data_offset),
                    "bytes": int(t.n_bytes),
                    "first": data[int(t.data_offset) :][:4].hex(),
                    "last": data[:end][-4:].hex(),
                }
            )
    with open(out, "w") as f:
        json.dump(model, f, indent=0)
        f.write("\n")


def all_values(out):
    writer = GGUFWriter(out, "llama")
    numbers = {
        T.UINT8: [0, 255], T.INT8: [-128, 127], T.UINT16: [0, 65535], T.INT16: [-32768, 32767],
        T.UINT32: [0, 2**32 - 1], T.INT32: [-(2**31), 2**31 - 1],
        T.UINT64: [0, 2**64 - 1], T.INT64: [-(2**63), 2**63 - 1],
        T.FLOAT32: [0.1, -1e-45, float("inf")], T.FLOAT64: [0.1, -5e-324, float("-inf")],
        T.BOOL: [True, False], T.STRING: ["", "caf\u00e9 \U0001f600", "a\0b"],
    }
    for kind, values in numbers.items():
        for i, v in enumerate(values):
            writer.add_key_value(f"scalar.{kind.name}.{i}", v, kind)
        writer.add_key_value(f"array.{kind.name}", values, T.ARRAY, sub_type=kind)
    writer.add_key_value("array.bytes", [b"\xff\xfe", b"", b"ok"], T.ARRAY, sub_type=T.STRING)
    writer.add_tensor("a", np.arange(6, dtype=np.float32).reshape(2, 3))
    writer.add_tensor("b", np.arange(5, dtype=np.int8))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    if sys.argv[1] == "--all-values":
        all_values(sys.argv[2])
    else:
        main(sys.argv[1], sys.argv[2:])
