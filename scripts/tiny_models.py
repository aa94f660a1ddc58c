#!/usr/bin/env python3
"""Makes the small models of tests/fixtures/arch, and what every tensor of their conversions must be,
with programs that share nothing with preshard.

  tiny_models.py LLAMA_CPP [--only NAME] [--check PRESHARD]

transformers makes a random model of the class, llama.cpp's own converter (convert_hf_to_gguf.py of the
source tree LLAMA_CPP) writes it as bf16 and as q8_0 GGUF, and numpy slices the original for every rank
of vLLM: names and shapes as a worker's state_dict() has them. Writes tests/fixtures/arch/NAME-TYPE.gguf,
tests/fixtures/hf/NAME/config.json and tests/fixtures/expected/NAME-TYPE.json (as make_expected.py does).

For q8_0 the values are gguf-py's, and must lie within half a step of the original (and the rounding of the f16 scale). With --check, PRESHARD
(the program) converts both and transformers loads the result: no key missing or unexpected, logits equal to the original's (bf16) or near them (q8_0).
Needs torch, transformers, gguf, numpy, safetensors and blake3.
"""
import argparse, json, os, shutil, subprocess, sys, tempfile
import numpy as np, torch, transformers
import gguf
from blake3 import blake3
from safetensors.torch import load_file, save_file

ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
ap.add_argument("llama_cpp")
ap.add_argument("--only")
ap.add_argument("--check", metavar="PRESHARD")
a = ap.parse_args()
FIXTURES = os.path.join(os.path.dirname(os.path.abspath(__file__)), "../tests/fixtures")
VOCAB = 512
TOKENS = dict(bos_token_id=505, eos_token_id=504, pad_token_id=504)
SHARED = dict(vocab_size=VOCAB, hidden_size=64, num_attention_heads=4, max_position_embeddings=4096, dtype="bfloat16", **TOKENS)
# Written by transformers, but no fact about the model, or a default of its class.
SILENT = {"transformers_version", "output_router_logits", "router_aux_loss_coef", "router_jitter_noise", "initializer_range",
          "use_cache", "partial_rotary_factor", "attention_dropout"}

# The converter refuses a tokenizer whose hash it does not know, and that of a small random vocabulary is not.
CONVERT = """
import sys
root = sys.argv.pop(1); sys.path[:0] = [root, root + "/gguf-py"]
from conversion import base
base.TextModel.get_vocab_base_pre = lambda self, tokenizer: "llama-bpe"
import convert_hf_to_gguf; convert_hf_to_gguf.main()
"""


def minimax_m2():
    config = transformers.MiniMaxM2Config(**SHARED, intermediate_size=64, num_hidden_layers=2, num_key_value_heads=2, head_dim=32,
        num_local_experts=4, num_experts_per_tok=2, rms_norm_eps=1e-6, rotary_dim=16)
    # What the published config.json has beside what transformers' class knows; vLLM reads both.
    return config, transformers.MiniMaxM2ForCausalLM, dict(scoring_func="sigmoid", use_routing_bias=True, rotary_dim=16)


# name: model, its class in gguf-py, tensors that the original holds as f32, the engine's shards
MODELS = {
    "minimax-m2": (minimax_m2, "MINIMAXM2", ("e_score_correction_bias", "block_sparse_moe.gate.weight")),
}


def make(name, folder):
    """A random model as an ordinary checkpoint."""
    build, _, exact = MODELS[name]
    torch.manual_seed(7)
    config, cls, extra = build()
    cls(config).to(torch.bfloat16).save_pretrained(folder)
    weights = load_file(f"{folder}/model.safetensors")
    for key in sorted(weights):
        shape, dtype = weights[key].shape, torch.float32 if key.endswith(exact) else torch.bfloat16
        norm = "norm.weight" in key
        weights[key] = (torch.randn(shape) * (0.2 if norm else 0.1) + norm).to(dtype).contiguous()
    save_file(weights, f"{folder}/model.safetensors", {"format": "pt"})
    with open(f"{folder}/config.json") as f:
        described = {k: v for k, v in json.load(f).items() if k not in SILENT} | extra
    # As the published models say it, which transformers rewrites.
    if name == "minimax-m2": described["rope_theta"] = described.pop("rope_parameters")["rope_theta"]
    with open(f"{folder}/config.json", "w") as f:
        json.dump(described, f, indent=1, sort_keys=True)
        f.write("\n")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(f"{FIXTURES}/hf/tiny-llama/{file}", folder)
    return described


class Part:
    """A tensor as words of its type: BF16, F32, or blocks of Q8_0 (a row is [blocks, 34])."""
    def __init__(self, kind, words): self.kind, self.words = kind, words
    def __getitem__(self, at): return Part(self.kind, self.words[at])


def bf16(values):
    """f32 to bf16, to the nearest and to even."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def decoded(part):
    if part.kind != "Q8_0":
        return part
    flat = np.ascontiguousarray(part.words).reshape(part.words.shape[:-2] + (-1,))
    return Part("BF16", bf16(gguf.quants.dequantize(flat, gguf.GGMLQuantizationType.Q8_0)))


def as_f32(part):
    return part if part.kind == "F32" else Part("F32", part.words.astype(np.uint32) << 16)


def original(folder):
    weights = {}
    for name, t in load_file(f"{folder}/model.safetensors").items():
        words = t.view(torch.int16).numpy().view(np.uint16) if t.dtype == torch.bfloat16 else t.numpy().view(np.uint32)
        weights[name] = Part("BF16" if t.dtype == torch.bfloat16 else "F32", words)
    return weights


def from_gguf(path, arch, weights):
    """The tensors of a GGUF under their Hugging Face names, which gguf-py's own table of names gives."""
    tensors = {t.name: t for t in gguf.GGUFReader(path).tensors}
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[arch], 16)
    found = {}
    for name, was in weights.items():
        words, expert = name.split("."), None
        if "experts" in words:
            at = words.index("experts") + 1
            expert = int(words.pop(at))
        asked = ".".join(words).replace("e_score_correction_bias", "e_score_correction.bias")
        t = tensors[names.get_name(asked, (".weight", ".bias"))]
        data = t.data if expert is None else t.data[expert]
        values = gguf.quants.dequantize(data, t.tensor_type).reshape(was.words.shape)
        exact = as_f32(was).words.view(np.float32)
        if t.tensor_type != gguf.GGMLQuantizationType.Q8_0:
            assert np.array_equal(values, exact), f"{path}: {name} is not the original"
            found[name] = was
            continue
        step = np.abs(exact.reshape(-1, 32)).max(1, keepdims=True) / 127
        assert (np.abs(values - exact).reshape(-1, 32) <= step * 0.57 + 1e-9).all(), f"{path}: {name} is not within the type's error"
        found[name] = Part("Q8_0", data.reshape(was.words.shape[0], -1, 34))
    return found


class Rank:
    """What one rank of vLLM holds."""
    def __init__(self, config, weights, tp, rank, ep, pack):
        self.c, self.w, self.tp, self.r, self.ep, self.pack, self.out = config, weights, tp, rank, ep, pack, {}

    def rows(self, name): w = self.w[name]; n = w.words.shape[0] // self.tp; return w[self.r * n:(self.r + 1) * n]
    def cols(self, name): w = self.w[name]; n = w.words.shape[1] // self.tp; return w[:, self.r * n:(self.r + 1) * n]
    def kv(self, name):
        heads = self.c["num_key_value_heads"]
        if heads >= self.tp: return self.rows(name)
        n, head = self.w[name].words.shape[0] // heads, self.r * heads // self.tp
        return self.w[name][head * n:(head + 1) * n]

    def put(self, name, parts, f32=False):
        """Members joined by rows; packed when all are blocks and the engine computes with them."""
        parts = parts if isinstance(parts, list) else [parts]
        if self.pack and not f32 and all(p.kind == "Q8_0" for p in parts):
            data = np.concatenate([p.words for p in parts])
            self.out[name.replace(".weight", ".qweight")] = Part("U8", data.reshape(data.shape[0], -1))
            self.out[name.replace(".weight", ".qweight_type")] = Part("U8", np.full(len(parts), 8, np.uint8))
            return
        parts = [decoded(p) for p in parts]
        joined = Part(parts[0].kind, np.concatenate([p.words for p in parts]))
        self.out[name] = as_f32(joined) if f32 else joined

    def whole(self, to, name, **how): self.put(to, self.w[name], **how)

    def scales(self, prefix):
        for n in ("_q_scale", "_k_scale", "_v_scale", "_prob_scale"):
            self.out[prefix + n] = Part("F32", np.array(np.float32(1.0)).view(np.uint32))

    def experts(self, to, names, count):
        """`names`: gate, up and down of expert {} of this layer."""
        gate, up, down = names
        held = range(count)
        if self.ep: n = count // self.tp; held = range(self.r * n, (self.r + 1) * n)
        rows = (lambda n: self.w[n]) if self.ep else self.rows
        cols = (lambda n: self.w[n]) if self.ep else self.cols
        for weight, one in (("w13", lambda e: [rows(gate.format(e)), rows(up.format(e))]), ("w2", lambda e: [cols(down.format(e))])):
            stacks = [one(e) for e in held]
            packed = self.pack and stacks[0][0].kind == "Q8_0"
            data = np.stack([np.concatenate([(p if packed else decoded(p)).words for p in s]) for s in stacks])
            if packed:
                self.out[f"{to}.{weight}_qweight"] = Part("U8", data.reshape(data.shape[:2] + (-1,)))
                self.out[f"{to}.{weight}_qweight_type"] = Part("U8", np.array([8], np.uint8))
            else:
                self.out[f"{to}.{weight}_weight"] = Part("BF16", data)

    def ends(self):
        self.put("model.embed_tokens.weight", self.rows("model.embed_tokens.weight"))
        self.put("lm_head.weight", self.rows("lm_head.weight"))
        self.whole("model.norm.weight", "model.norm.weight")

    def attention(self, to, of):
        for n in ("input_layernorm", "post_attention_layernorm"): self.whole(f"{to}.{n}.weight", f"{of}.{n}.weight")
        for n in ("weight", "bias"):
            if f"{of}.self_attn.q_proj.{n}" in self.w:
                q, k, v = (f"{of}.self_attn.{m}_proj.{n}" for m in "qkv")
                self.put(f"{to}.self_attn.qkv_proj.{n}", [self.rows(q), self.kv(k), self.kv(v)])
        self.put(f"{to}.self_attn.o_proj.weight", self.cols(f"{of}.self_attn.o_proj.weight"))
        self.scales(f"{to}.self_attn.attn.")

    def minimax_m2(self):
        self.ends()
        for i in range(self.c["num_hidden_layers"]):
            p = f"model.layers.{i}"
            self.attention(p, p)
            # The norms run over all heads at once, so that a rank holds its heads' part of them.
            self.put(f"{p}.self_attn.q_norm.weight", self.rows(f"{p}.self_attn.q_norm.weight"))
            self.put(f"{p}.self_attn.k_norm.weight", self.kv(f"{p}.self_attn.k_norm.weight"))
            m = f"{p}.block_sparse_moe"
            for n in ("gate.weight", "e_score_correction_bias"): self.whole(f"{m}.{n}", f"{m}.{n}", f32=True)
            self.experts(f"{m}.experts.routed_experts", [m + ".experts.{}.w" + n + ".weight" for n in "132"], self.c["num_local_experts"])
        return {"model": self.out}


def listing(tensors):
    lines = {}
    for name in sorted(tensors):
        words = np.ascontiguousarray(tensors[name].words)
        shape = "x".join(map(str, tensors[name].words.shape))
        lines[name] = f"{tensors[name].kind} [{shape}] {blake3(words.tobytes()).hexdigest()[:20]}"
    return lines


def check(program, name, folder, source, near):
    """What PRESHARD makes of the GGUF loads in transformers and computes what the original does."""
    with tempfile.TemporaryDirectory() as work:
        subprocess.run([program, "convert", source, "--out", work + "/out", "--layout", "hf", "--weights", "bf16"], check=True, stdout=subprocess.DEVNULL)
        ids = torch.arange(1, 33).unsqueeze(0) * 7 % 500
        logits = []
        for d in (folder, work + "/out"):
            model, info = transformers.AutoModelForCausalLM.from_pretrained(d, dtype=torch.float32, output_loading_info=True)
            assert not any(info.values()), f"{d}: {info}"
            with torch.no_grad(): logits.append(model.eval()(ids).logits)
        far, scale = (logits[0] - logits[1]).abs().max().item(), logits[0].abs().max().item()
        assert far <= near * scale, f"{name}: logits differ by {far} of {scale}"
        print(f"  {os.path.basename(source)}: loads in {type(model).__name__}, logits differ by {far:.2g} of {scale:.2g}")


for name, (_, arch, _) in MODELS.items():
    if a.only not in (None, name):
        continue
    with tempfile.TemporaryDirectory() as work:
        folder = f"{work}/tiny-{name}"
        config = make(name, folder)
        for kind in ("bf16", "q8_0"):
            path = f"{FIXTURES}/arch/{name}-{kind}.gguf"
            os.makedirs(os.path.dirname(path), exist_ok=True)
            subprocess.run([sys.executable, "-c", CONVERT, a.llama_cpp, folder, "--outfile", path, "--outtype", kind],
                           check=True, stderr=subprocess.DEVNULL)
            blocks = from_gguf(path, arch, original(folder))
            values = {k: decoded(p) for k, p in blocks.items()}
            cases = {"--layout hf --weights bf16": {"model.safetensors": listing(values)}}
            runs = [(tp, ep, False) for tp, ep in ((1, False), (2, False), (4, False), (2, True))]
            runs += [(1, False, True), (2, False, True)] if kind == "q8_0" else []
            for tp, ep, pack in runs:
                case = f"--tp {tp}" + (" --ep" if ep else "") + ("" if pack else " --weights bf16")
                cases[case] = {}
                for r in range(tp):
                    parts = getattr(Rank(config, blocks if pack else values, tp, r, ep, pack), name.replace("-", "_"))()
                    for part, tensors in parts.items():
                        cases[case][f"{part}-rank-{r}-part-0.safetensors"] = listing(tensors)
            with open(path, "rb") as f:
                files = {os.path.basename(path): blake3(f.read()).hexdigest()}
            with open(f"{FIXTURES}/expected/{name}-{kind}.json", "w") as f:
                json.dump({"source": f"arch/{name}-{kind}.gguf", "files": files, "cases": cases}, f, indent=0, separators=(",", ":"))
                f.write("\n")
            print(f"{name} {kind}: {len(cases)} cases, {os.path.getsize(path)} bytes")
            if a.check:
                check(a.check, name, folder, path, 1e-6 if kind == "bf16" else 0.05)
        os.makedirs(f"{FIXTURES}/hf/{name}", exist_ok=True)
        shutil.copy(f"{folder}/config.json", f"{FIXTURES}/hf/{name}/config.json")
