#!/usr/bin/env python3
"""Makes the small models of tests/fixtures/arch, and what every tensor of their conversions must be,
with programs that share nothing with preshard.

  tiny_models.py LLAMA_CPP [--only NAME] [--check PRESHARD]

transformers makes a random model of the class, llama.cpp's own converter (convert_hf_to_gguf.py of the
source tree LLAMA_CPP) writes it as bf16 and as q8_0 GGUF, and vLLM's own classes load the original on every
rank (vllm_state.py). The values are such that q8_0 holds them exactly: both files must give the original back.
Writes tests/fixtures/arch/NAME-TYPE.gguf.z, tests/fixtures/hf/NAME/config.json and
tests/fixtures/expected/NAME.json.z (the lines of make_expected.py). `.z`: packed by zlib.

With --check, PRESHARD (the program) converts both and transformers loads the result: no key missing or
unexpected but those of the draft layer, logits equal to the original's.
Needs torch, transformers, gguf, safetensors, blake3, and vLLM 0.32 for CPUs.
"""
import argparse, json, os, shutil, subprocess, sys, tempfile, zlib
import torch, transformers
from blake3 import blake3
from safetensors.torch import load_file, save_file

ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
ap.add_argument("llama_cpp")
ap.add_argument("--only")
ap.add_argument("--check", metavar="PRESHARD")
a = ap.parse_args()
HERE = os.path.dirname(os.path.abspath(__file__))
FIXTURES = os.path.join(HERE, "../tests/fixtures")
TOKENS = dict(bos_token_id=505, eos_token_id=504, pad_token_id=504)
SHARED = dict(vocab_size=512, hidden_size=32, num_attention_heads=4, num_hidden_layers=2, max_position_embeddings=4096, dtype="bfloat16", **TOKENS)
GROUPED = dict(SHARED, num_key_value_heads=2, head_dim=32)
# Written by transformers, but no fact about the model, or a default of its class.
SILENT = {"transformers_version", "output_router_logits", "router_aux_loss_coef", "router_jitter_noise", "initializer_range",
          "use_cache", "partial_rotary_factor", "attention_dropout", "pretraining_tp", "mlp_bias", "mlp_layer_types"}

# The converter refuses a tokenizer whose hash it does not know, and that of a small random vocabulary is not.
CONVERT = """
import sys
root = sys.argv.pop(1); sys.path[:0] = [root, root + "/gguf-py"]
from conversion import base, deepseek
base.TextModel.get_vocab_base_pre = lambda self, tokenizer: "llama-bpe"
base.TextModel._set_vocab_glm = lambda self: self._set_vocab_gpt2()
deepseek.DeepseekV32Model.set_vocab = lambda self: self._set_vocab_gpt2()
import convert_hf_to_gguf; convert_hf_to_gguf.main()
"""


# Each gives the class's config, the class, and what its published config.json says otherwise than transformers
# writes it (None: leaves out).
def minimax_m2():
    config = transformers.MiniMaxM2Config(**GROUPED, intermediate_size=64, num_local_experts=4, num_experts_per_tok=2, rms_norm_eps=1e-6, rotary_dim=16)
    return config, transformers.MiniMaxM2ForCausalLM, dict(scoring_func="sigmoid", use_routing_bias=True, rotary_dim=16,
                                                           rope_theta=5000000.0, rope_parameters=None)


def glm4moe():
    config = transformers.Glm4MoeConfig(**GROUPED, intermediate_size=64, n_routed_experts=4, num_experts_per_tok=2, n_shared_experts=1,
        moe_intermediate_size=64, first_k_dense_replace=1, routed_scaling_factor=2.5, n_group=1, topk_group=1, norm_topk_prob=True,
        use_qk_norm=True, attention_bias=True, num_nextn_predict_layers=1, rms_norm_eps=1e-5)
    return config, transformers.Glm4MoeForCausalLM, dict(num_nextn_predict_layers=1, rope_theta=1000000.0, partial_rotary_factor=0.5, rope_parameters=None)


def deepseek32():
    yarn = dict(factor=40.0, beta_fast=32.0, beta_slow=1.0, mscale=1.0, mscale_all_dim=1.0, original_max_position_embeddings=4096)
    config = transformers.DeepseekV32Config(**(SHARED | dict(max_position_embeddings=163840)), num_key_value_heads=4, intermediate_size=64,
        q_lora_rank=64, kv_lora_rank=64, qk_nope_head_dim=32, qk_rope_head_dim=32, v_head_dim=32, n_routed_experts=4, num_experts_per_tok=2,
        n_shared_experts=1, moe_intermediate_size=64, first_k_dense_replace=1, routed_scaling_factor=2.5, n_group=2, topk_group=1,
        norm_topk_prob=True, index_n_heads=4, index_head_dim=64, index_topk=64, rms_norm_eps=1e-6,
        rope_parameters=dict(yarn, rope_theta=10000.0, rope_type="yarn"))
    return config, transformers.DeepseekV32ForCausalLM, dict(num_nextn_predict_layers=1, rope_theta=10000.0, rope_parameters=None,
        rope_scaling=dict(yarn, type="yarn", rope_type="yarn"), scoring_func="sigmoid", topk_method="noaux_tc", moe_layer_freq=1)


# Gated delta nets: value heads twice as many as key heads, 2 key heads, and a head of full attention 32 wide, of which 8
# are rotated.
DELTA = dict(GROUPED, num_hidden_layers=4, linear_num_key_heads=4, linear_num_value_heads=8, linear_key_head_dim=16, linear_value_head_dim=32,
             linear_conv_kernel_dim=4, rms_norm_eps=1e-6)
MIXTURE = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64, shared_expert_intermediate_size=64)
INTERVAL = dict(full_attention_interval=4, layer_types=["linear_attention"] * 3 + ["full_attention"])


def qwen3next():
    config = transformers.Qwen3NextConfig(**DELTA, **MIXTURE, intermediate_size=64)
    return config, transformers.Qwen3NextForCausalLM, dict(INTERVAL, rope_theta=10000.0, partial_rotary_factor=0.25, rope_parameters=None)


def rope35(): return dict(rope_type="default", rope_theta=10000000.0, partial_rotary_factor=0.25, mrope_interleaved=True, mrope_section=[2, 1, 1])


def qwen35():
    config = transformers.Qwen3_5TextConfig(**DELTA, intermediate_size=64, rope_parameters=rope35())
    return config, transformers.Qwen3_5ForCausalLM, dict(INTERVAL, mtp_num_hidden_layers=1, rope_parameters=rope35())


def qwen35moe():
    config = transformers.Qwen3_5MoeTextConfig(**DELTA, **MIXTURE, rope_parameters=rope35())
    return config, transformers.Qwen3_5MoeForCausalLM, dict(INTERVAL, mtp_num_hidden_layers=1, rope_parameters=rope35())


MODELS = {"minimax-m2": minimax_m2, "glm4moe": glm4moe, "deepseek32": deepseek32, "qwen3next": qwen3next, "qwen35": qwen35, "qwen35moe": qwen35moe}
# Tensors that the original holds as f32.
EXACT = ("A_log", "e_score_correction_bias", "block_sparse_moe.gate.weight")
# Norms whose classes add 1 to what is stored.
ABOUT_ZERO = ("qwen3next", "qwen35", "qwen35moe")


def value(name, key, shape):
    """Random values of a tensor. Those of matrices are whole multiples of 2^-10 up to 127, and so many of them
    are 127 that every block of q8_0 has one: its scale is 2^-10, and nothing is lost."""
    if key.endswith("A_log"):
        # In f32 its exponential gives it back from 2 on.
        return torch.rand(shape) + 2
    if key.endswith(EXACT):
        return torch.randn(shape)
    if len(shape) == 1:
        return torch.randint(-7, 8, shape) / 32 + ("norm" in key and key.endswith("weight") and (name not in ABOUT_ZERO or "linear_attn" in key))
    small = torch.randint(-3, 4, shape) * 21
    return torch.where(torch.rand(shape) < 0.5, small, torch.randint(0, 2, shape) * 254 - 127) / 1024


def make(name, folder):
    """A random model as an ordinary checkpoint, with a draft layer where config.json has one."""
    torch.manual_seed(7)
    config, cls, changes = MODELS[name]()
    cls(config).to(torch.bfloat16).save_pretrained(folder)
    weights = load_file(f"{folder}/model.safetensors")
    layers = config.num_hidden_layers
    if changes.get("num_nextn_predict_layers"):
        # transformers has no draft: the last layer over again, and what joins it to the trunk.
        for n in [n for n in weights if f"layers.{layers - 1}." in n]:
            weights[n.replace(f".{layers - 1}.", f".{layers}.", 1)] = weights[n].clone()
        hidden = config.hidden_size
        for part, shape in {"eh_proj": (hidden, 2 * hidden), "enorm": (hidden,), "hnorm": (hidden,), "shared_head.norm": (hidden,)}.items():
            weights[f"model.layers.{layers}.{part}.weight"] = torch.empty(shape)
    if name in ABOUT_ZERO[:3]:
        # The same by other names.
        for n in [n for n in weights if f"layers.{layers - 1}." in n]:
            weights[n.replace(f"model.layers.{layers - 1}.", "mtp.layers.0.", 1)] = weights[n].clone()
        hidden = config.hidden_size
        for part, shape in {"fc": (hidden, 2 * hidden), "pre_fc_norm_embedding": (hidden,), "pre_fc_norm_hidden": (hidden,), "norm": (hidden,)}.items():
            weights[f"mtp.{part}.weight"] = torch.empty(shape)
    for key in sorted(weights):
        dtype = torch.float32 if key.endswith(EXACT) else torch.bfloat16
        weights[key] = value(name, key, weights[key].shape).to(dtype).contiguous()
    save_file(weights, f"{folder}/model.safetensors", {"format": "pt"})
    with open(f"{folder}/config.json") as f:
        described = {k: v for k, v in json.load(f).items() if k not in SILENT} | changes
    described = {k: v for k, v in described.items() if v is not None}
    with open(f"{folder}/config.json", "w") as f:
        json.dump(described, f, indent=1, sort_keys=True)
        f.write("\n")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(f"{FIXTURES}/hf/tiny-llama/{file}", folder)
    return described


def listing(path):
    kinds = {torch.bfloat16: "BF16", torch.float32: "F32", torch.uint8: "U8"}
    lines = {}
    for name, t in load_file(path).items():
        words = t.contiguous().flatten().view(torch.uint8).numpy().tobytes()
        lines[name] = f"{kinds[t.dtype]} [{'x'.join(map(str, t.shape))}] {blake3(words).hexdigest()[:20]}"
    return lines


def check(program, name, folder, source):
    """What PRESHARD makes of the GGUF loads in transformers and computes what the original does."""
    with tempfile.TemporaryDirectory() as work:
        subprocess.run([program, "convert", source, "--out", work + "/out", "--layout", "hf", "--weights", "bf16"], check=True, stdout=subprocess.DEVNULL)
        ids = torch.arange(1, 33).unsqueeze(0) * 7 % 500
        logits = []
        for d in (folder, work + "/out"):
            model, info = transformers.AutoModelForCausalLM.from_pretrained(d, dtype=torch.float32, output_loading_info=True)
            layers = model.config.num_hidden_layers
            wrong = {k: [n for n in v if f"layers.{layers}." not in str(n) and not str(n).startswith("mtp.")] for k, v in info.items() if not isinstance(v, str)}
            assert not any(wrong.values()), f"{d}: {wrong}"
            with torch.no_grad(): logits.append(model.eval()(ids).logits)
        far, scale = (logits[0] - logits[1]).abs().max().item(), logits[0].abs().max().item()
        assert torch.isfinite(logits[0]).all() and scale > 0 and far <= 1e-6 * scale, f"{name}: logits differ by {far} of {scale}"
        print(f"  {os.path.basename(source)}: loads in {type(model).__name__}, logits differ by {far:.2g} of {scale:.2g}")


def packed(path, data):
    with open(path, "wb") as f:
        f.write(zlib.compress(data, 9))


for name in MODELS:
    if a.only not in (None, name):
        continue
    with tempfile.TemporaryDirectory() as work:
        folder = f"{work}/tiny-{name}"
        described = make(name, folder)
        for made in ("arch", f"hf/{name}"): os.makedirs(f"{FIXTURES}/{made}", exist_ok=True)
        shutil.copy(f"{folder}/config.json", f"{FIXTURES}/hf/{name}/config.json")
        files = {}
        for kind in ("bf16", "q8_0"):
            path = f"{work}/{name}-{kind}.gguf"
            subprocess.run([sys.executable, "-c", CONVERT, a.llama_cpp, folder, "--outfile", path, "--outtype", kind],
                           check=True, stderr=None if a.check else subprocess.DEVNULL)
            with open(path, "rb") as f:
                data = f.read()
            files[f"{name}-{kind}.gguf"] = blake3(data).hexdigest()
            packed(f"{FIXTURES}/arch/{name}-{kind}.gguf.z", data)
            if a.check:
                check(a.check, name, folder, path)
        draft = ["--draft"] if described.get("num_nextn_predict_layers") or name in ABOUT_ZERO[:3] else []
        runs = [f"--run={r}" for r in ("1", "2", "4", *(["2ep"] if "num_experts_per_tok" in described else []))]
        subprocess.run([sys.executable, f"{HERE}/vllm_state.py", folder, f"{work}/cases", *runs, *draft], check=True)
        with open(f"{work}/cases") as f:
            cases = {"--layout hf --weights bf16": {"model.safetensors": listing(f"{folder}/model.safetensors")}} | json.load(f)
        packed(f"{FIXTURES}/expected/{name}.json.z", json.dumps({"files": files, "cases": cases}).encode())
        print(f"{name}: {len(cases)} cases")
