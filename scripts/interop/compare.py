"""compare.py DIR STATE [PART [BUT…]]: what the workers held (a PROBE_DUMP) against a converted directory's files, all bytes.

PART: model, or mtp for the draft's files. BUT: leave out names with this in them. Exit status 1 on any difference. Reads safetensors by itself.
"""

import json
import pathlib
import struct
import sys


def tensors(path: pathlib.Path) -> dict[str, tuple[str, list[int], bytes]]:
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    header.pop("__metadata__", None)
    base = 8 + length
    return {
        name: (
            t["dtype"],
            t["shape"],
            data[base + t["data_offsets"][0] : base + t["data_offsets"][1]],
        )
        for name, t in header.items()
    }


def main(directory: str, state: str, part: str = "model", *but: str) -> int:
    files = sorted(pathlib.Path(directory).glob(f"{part}-rank-*-part-0.safetensors"))
    count = problems = 0
    for file in files:
        held = pathlib.Path(state, file.name.replace(f"{part}-rank", "model-rank", 1))
        ours, theirs = tensors(file), tensors(held)
        for name in sorted(ours.keys() | theirs.keys()):
            if any(b in name for b in but):
                continue
            count += 1
            if name not in ours or name not in theirs:
                print(f"{file.name}: {name}: only in the {'file' if name in ours else 'engine'}")
                problems += 1
            elif ours[name] != theirs[name]:
                print(
                    f"{file.name}: {name}: {ours[name][:2]} in the file, {theirs[name][:2]} in the engine, or other bytes"
                )
                problems += 1
    print(f"{len(files)} files, {count} tensors, {problems} problems")
    return int(problems > 0 or count == 0)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
