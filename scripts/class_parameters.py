#!/usr/bin/env python3
"""Writes tests/fixtures/parameters/CLASS.json: the parameters that transformers' classes save, per flag of the config.

    python scripts/class_parameters.py [CLASS…]

Builds each class with small sizes and random weights, saves it with save_pretrained and lists the names in the file:
those of checkpoints, whatever the class calls its own. Needs torch and transformers (5.19).
"""

import json
import sys
import tempfile
from pathlib import Path

import torch
import transformers
from safetensors import safe_open

OUT = Path(__file__).parent.parent / "tests/fixtures/parameters"
DENSE = dict(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=64,
    pad_token_id=None,
    bos_token_id=None,
    eos_token_id=None,
)
EXPERTS = dict(num_experts_per_tok=2, moe_intermediate_size=16)
LATENT = dict(
    DENSE,
    **EXPERTS,
    num_hidden_layers=4,
    num_key_value_heads=4,
    head_dim=8,
    first_k_dense_replace=1,
    n_routed_experts=4,
    n_shared_experts=1,
    n_group=1,
    topk_group=1,
    q_lora_rank=16,
    kv_lora_rank=16,
    qk_nope_head_dim=8,
    qk_rope_head_dim=8,
    v_head_dim=8,
)
INDEXER = dict(index_n_heads=2, index_head_dim=16, index_topk=8)
# Class: its sizes, and the flags to try, each on top of them.
CLASSES = {
    "LlamaForCausalLM": (
        DENSE,
        [{}, dict(tie_word_embeddings=True), dict(attention_bias=True), dict(mlp_bias=True)],
    ),
    "MistralForCausalLM": (DENSE, [{}, dict(tie_word_embeddings=True), dict(sliding_window=16)]),
    "MixtralForCausalLM": (
        dict(DENSE, num_local_experts=4, num_experts_per_tok=2),
        [{}, dict(tie_word_embeddings=True), dict(num_local_experts=2)],
    ),
    "Qwen2ForCausalLM": (DENSE, [{}, dict(tie_word_embeddings=True)]),
    "Qwen3ForCausalLM": (DENSE, [{}, dict(tie_word_embeddings=True), dict(attention_bias=True)]),
    "Qwen3MoeForCausalLM": (
        dict(DENSE, **EXPERTS, num_experts=4, decoder_sparse_step=1, mlp_only_layers=[]),
        [{}, dict(tie_word_embeddings=True), dict(attention_bias=True), dict(num_experts=3)],
    ),
    "DeepseekV2ForCausalLM": (
        LATENT,
        [{}, dict(q_lora_rank=None), dict(tie_word_embeddings=True), dict(n_shared_experts=2), dict(first_k_dense_replace=4)],
    ),
    "DeepseekV3ForCausalLM": (
        LATENT,
        [{}, dict(q_lora_rank=None), dict(tie_word_embeddings=True), dict(first_k_dense_replace=3), dict(attention_bias=True)],
    ),
    "Glm4MoeLiteForCausalLM": (
        dict(LATENT, mlp_layer_types=None),
        [{}, dict(q_lora_rank=None), dict(tie_word_embeddings=True)],
    ),
    "GlmMoeDsaForCausalLM": (
        dict(LATENT, **INDEXER, mlp_layer_types=None),
        [
            {},
            dict(tie_word_embeddings=True),
            dict(indexer_types=["full", "shared", "full", "shared"]),
        ],
    ),
    "DeepseekV32ForCausalLM": (dict(LATENT, **INDEXER), [{}, dict(tie_word_embeddings=True), dict(first_k_dense_replace=3)]),
    "Glm4MoeForCausalLM": (
        dict(DENSE, **EXPERTS, num_hidden_layers=3, first_k_dense_replace=1, n_routed_experts=4, n_shared_experts=1, n_group=1, topk_group=1),
        [{}, dict(use_qk_norm=True), dict(attention_bias=True), dict(tie_word_embeddings=True), dict(first_k_dense_replace=0)],
    ),
    "MiniMaxM2ForCausalLM": (
        dict(DENSE, num_local_experts=4, num_experts_per_tok=2),
        [{}, dict(tie_word_embeddings=True), dict(num_local_experts=2)],
    ),
}
DELTA = dict(
    DENSE,
    num_hidden_layers=4,
    layer_types=["linear_attention", "full_attention"] * 2,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=8,
    linear_value_head_dim=8,
)
SHARED = dict(EXPERTS, num_experts=4, shared_expert_intermediate_size=16)
TURNS = [{}, dict(tie_word_embeddings=True), dict(layer_types=["linear_attention"] * 3 + ["full_attention"])]
CLASSES |= {
    "Qwen3NextForCausalLM": (dict(DELTA, **SHARED), [*TURNS, dict(num_experts=3)]),
    "Qwen3_5ForCausalLM": (DELTA, TURNS),
    "Qwen3_5MoeForCausalLM": ({k: v for k, v in (DELTA | SHARED).items() if k != "intermediate_size"}, [*TURNS, dict(num_experts=3)]),
}


def names(model_class: str, sizes: dict) -> tuple[dict, list[str]]:
    """config.json and the tensors of a checkpoint of so many layers."""
    model_class = getattr(transformers, model_class)
    torch.manual_seed(0)
    model = model_class(model_class.config_class(**sizes))
    with tempfile.TemporaryDirectory() as directory:
        model.save_pretrained(directory)
        config = json.loads((Path(directory) / "config.json").read_text())
        with safe_open(Path(directory) / "model.safetensors", "pt") as file:
            return config, sorted(file.keys())


def main() -> None:
    OUT.mkdir(exist_ok=True)
    for name in sys.argv[1:] or CLASSES:
        sizes, flags = CLASSES[name]
        cases = []
        for flag in flags:
            config, tensors = names(name, {**sizes, **flag})
            # Only what was asked for: that a class's defaults are meant where config.json is silent is part of it.
            given = {key: config.get(key, value) for key, value in {**sizes, **flag}.items() if value is not None}
            cases.append({"config": given, "tensors": tensors})
            print(name, flag, len(tensors))
        text = json.dumps({"transformers": transformers.__version__, "cases": cases}, indent=1)
        (OUT / f"{name}.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
