#!/usr/bin/env python3
"""Lists the metadata keys that llama.cpp reads and its converter writes, for the architectures of mappings/config.

usage: metadata_keys.py LLAMA_CPP_SOURCE > tests/fixtures/metadata/llama_cpp.tsv
(the copy there is of the llama.cpp vendored in llama-cpp-python 0.3.36)

A key is one that src/llama-model.cpp reads for every model, that src/models reads for the architecture, that
src/llama-vocab.cpp or src/llama-arch.cpp knows (tokenizer.*, general.*), or that a class of the converter with this
architecture writes, one of its base classes included. Lines: architecture, key, who ("reads", "writes" or both).
Everything is taken from the source's text, so that the list stands beside our tables and not on them.
"""
import re
import sys
from pathlib import Path

root = Path(sys.argv[1])
text = lambda name: (root / name).read_text(encoding="utf-8")

kv = dict(re.findall(r'\{\s*(LLM_KV_\w+),\s*"([^"]+)"\s*\}', text("src/llama-arch.cpp")))
short = lambda key: key.removeprefix("%s.")
asked = lambda code: {short(kv[k]) for k in re.findall(r"(LLM_KV_\w+)", code) if k in kv}

# What is read for every model; the blocks that ask for one architecture's name are other architectures'.
model = text("src/llama-model.cpp")
loader = re.search(r"void llama_model_base::load_hparams\(.*?\n\}\n", model, re.S)
common = re.sub(r"if \(arch == LLM_ARCH_WAVTOKENIZER_DEC\) \{.*?\n    \}\n", "", loader.group(0), flags=re.S)
everywhere = {k for k in asked(common) if not k.startswith("general.")}
everywhere |= {name for name in kv.values() if name.startswith(("tokenizer.", "general."))}

# The converter: writer methods and the keys they set.
constants = text("gguf-py/gguf/constants.py")
keys_class = re.search(r"class Keys:\n(.*?)\n\n\n", constants, re.S).group(1)
names, path = {}, []
for line in keys_class.splitlines():
    depth = (len(line) - len(line.lstrip())) // 4 - 1
    if m := re.match(r"\s+class (\w+):", line):
        path[depth:] = [m.group(1)]
    elif m := re.match(r'\s+(\w+)\s*=\s*"([^"]+)"', line):
        names[".".join([*path[:depth], m.group(1)])] = m.group(2)
writer = text("gguf-py/gguf/gguf_writer.py")
methods = {}
for m in re.finditer(r"    def (add_\w+)\(self.*?(?=\n    def |\Z)", writer, re.S):
    methods[m.group(1)] = {names[k] for k in re.findall(r"Keys\.([A-Z]\w*(?:\.[A-Z]\w*)+)", m.group(0)) if k in names}

classes = {}
for path in sorted((root / "conversion").glob("*.py")):
    for m in re.finditer(r"^class (\w+)\(([^)]*)\):\n(.*?)(?=^\S|\Z)", path.read_text(encoding="utf-8"), re.S | re.M):
        arch = re.search(r"^    model_arch = gguf\.MODEL_ARCH\.(\w+)", m.group(3), re.M)
        bases = [b.strip() for b in m.group(2).split(",")]
        classes[m.group(1)] = (bases, arch and arch.group(1), m.group(3))


def written(name, seen):
    if name not in classes or name in seen:
        return set()
    seen.add(name)
    bases, _, body = classes[name]
    found = set().union(*(methods.get(f, set()) for f in re.findall(r"gguf_writer\.(add_\w+)\(", body)))
    return found.union(*(written(base, seen) for base in bases))


# LlamaModel writes these for EAGLE3 drafts, under that architecture's name.
ELSEWHERE = {"target_layers", "target_hidden_size", "norm_before_residual", "norm_before_fc"}

# The source of an architecture is called after its constant.
enum = {name: constant for constant, name in re.findall(r'\{\s*LLM_ARCH_(\w+),\s*"([^"]+)"\s*\}', text("src/llama-arch.cpp"))}
models = [path.read_text() for path in sorted((root / "src/models").glob("*.cpp"))]

arch_names = dict(re.findall(r"MODEL_ARCH\.(\w+):\s*\"([^\"]+)\"", constants))
tables = sorted(p.stem for p in (Path(__file__).parent.parent / "mappings/config").glob("[a-z]*.toml"))
for arch in tables:
    loader = rf"llama_model_{enum[arch].lower()}::load_arch_hparams\(.*?\n\}}\n"
    found = [m.group(0) for m in (re.search(loader, text, re.S) for text in models) if m]
    reads = everywhere | asked(found[0])
    writes = set()
    for name, (_, constant, _) in classes.items():
        if constant and arch_names.get(constant) == arch:
            writes |= written(name, set())
    writes = {k.removeprefix("{arch}.").replace("{name}", "*") for k in writes if not k.startswith(("split.", "clip.", "adapter."))}
    for key in sorted((reads | writes) - ELSEWHERE):
        who = ", ".join(w for w, has in (("reads", reads), ("writes", writes)) if key in has)
        print(arch, key, who, sep="\t")
