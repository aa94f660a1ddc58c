//! Whole tiny models, made in code: every tensor of an architecture with blocks from a fixed
//! sequence of numbers, so that the same call gives the same file everywhere.

use crate::common::{self, *};

/// Elements and bytes of a block, and where its f16 scales lie.
pub fn block(ty: u32) -> (u64, usize, &'static [usize]) {
    match ty {
        F32 | I32 => (1, 4, &[]),
        F16 => (1, 2, &[0]),
        BF16 | I16 => (1, 2, &[]),
        I8 => (1, 1, &[]),
        I64 | F64 => (1, 8, &[]),
        Q4_0 => (32, 18, &[0]),
        Q4_1 => (32, 20, &[0, 2]),
        Q5_0 => (32, 22, &[0]),
        Q5_1 => (32, 24, &[0, 2]),
        Q8_0 => (32, 34, &[0]),
        Q2_K => (256, 84, &[80, 82]),
        Q3_K => (256, 110, &[108]),
        Q4_K => (256, 144, &[0, 2]),
        Q5_K => (256, 176, &[0, 2]),
        Q6_K => (256, 210, &[208]),
        IQ4_NL => (32, 18, &[0]),
        IQ4_XS => (256, 136, &[0]),
        TQ1_0 => (256, 54, &[52]),
        TQ2_0 => (256, 66, &[64]),
        MXFP4 => (32, 17, &[]),
        NVFP4 => (64, 36, &[]),
        Q1_0 => (128, 18, &[0]),
        Q2_0 => (64, 18, &[0]),
        _ => panic!("no block of type {ty}"),
    }
}

/// Numbers that depend on `seed` alone (splitmix64).
pub struct Numbers(u64);

impl Numbers {
    /// The sequence of a name.
    pub fn of(name: &str) -> Numbers {
        // FNV-1a.
        Numbers(
            name.bytes().fold(0xcbf2_9ce4_8422_2325, |h, b| (h ^ u64::from(b)).wrapping_mul(0x100_0000_01b3)),
        )
    }
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
    /// Between -1 and 1, exact in 24 bits.
    pub fn unit(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1 << 23) as f32 - 1.0
    }
}

/// Sound, finite blocks of a tensor of that name: the bytes of `elements` elements.
pub fn blocks(name: &str, ty: u32, elements: u64) -> Vec<u8> {
    let mut numbers = Numbers::of(name);
    if ty == F32 && name.contains("indexer.k_norm") {
        // The engine wants f32, the checkpoints hold bf16: values that are both.
        let bf16 = |x: f32| f32::from_bits(x.to_bits() & 0xffff_0000);
        return (0..elements).flat_map(|_| bf16(numbers.unit()).to_le_bytes()).collect();
    }
    if ty == F32 {
        return (0..elements).flat_map(|_| numbers.unit().to_le_bytes()).collect();
    }
    if ty == BF16 {
        return (0..elements).flat_map(|_| ((numbers.unit().to_bits() >> 16) as u16).to_le_bytes()).collect();
    }
    let (size, bytes, scales) = block(ty);
    let mut out = Vec::with_capacity((elements / size) as usize * bytes + 8);
    while out.len() < (elements / size) as usize * bytes {
        out.extend_from_slice(&numbers.next().to_le_bytes());
    }
    out.truncate((elements / size) as usize * bytes);
    for block in out.chunks_exact_mut(bytes) {
        for at in scales {
            // Sign, exponents 2^-8 to 2^-1, any fraction.
            let bits = u16::from_le_bytes([block[*at], block[at + 1]]);
            let bits = bits & 0x83ff | (7 + (bits >> 10) % 8) << 10;
            block[*at..at + 2].copy_from_slice(&bits.to_le_bytes());
        }
        if ty == MXFP4 {
            block[0] = 120 + block[0] % 16;
        }
        if ty == NVFP4 {
            // The scale byte 0x7f is NaN, the sign bit is not used.
            block[..4].iter_mut().for_each(|s| *s %= 0x7e);
        }
    }
    out
}

/// Which type a tensor gets; vectors are f32 unless the rule of the test says otherwise.
pub type Types<'a> = &'a dyn Fn(&str) -> u32;

/// Q4_K for matrices, but Q8_0 for `attn_k_b`, whose rows are no multiple of 256; routers f32.
pub fn q4_k(name: &str) -> u32 {
    match name {
        n if n.contains("ffn_gate_inp.") || n.contains("indexer.proj") => F32,
        n if n.contains("attn_k_b") => Q8_0,
        n if n.contains("attn_v.") || n.contains("ffn_down") || n.starts_with("output.") => Q6_K,
        _ => Q4_K,
    }
}

/// A model of grouped-query attention: llama, qwen2, qwen3, qwen3moe.
#[derive(Clone)]
pub struct Gqa {
    pub arch: &'static str,
    pub layers: u64,
    pub hidden: u64,
    pub inter: u64,
    pub heads: u64,
    pub kv_heads: u64,
    pub head: u64,
    pub vocab: u64,
    /// 0: dense.
    pub experts: u64,
    pub tied: bool,
    pub biases: bool,
    pub head_norms: bool,
}

/// Llama: 2 layers, 8 heads of 64, 2 key/value heads, 300 rows of vocabulary.
pub const LLAMA: Gqa = Gqa {
    arch: "llama",
    layers: 2,
    hidden: 256,
    inter: 512,
    heads: 8,
    kv_heads: 2,
    head: 64,
    vocab: 300,
    experts: 0,
    tied: false,
    biases: false,
    head_norms: false,
};

/// Qwen2: biases, tied.
pub const QWEN2: Gqa = Gqa { arch: "qwen2", biases: true, tied: true, ..LLAMA };
/// Qwen3Moe: 4 experts, norms of heads.
pub const QWEN3MOE: Gqa = Gqa { arch: "qwen3moe", experts: 4, head_norms: true, ..LLAMA };
/// Qwen3: norms of heads.
pub const QWEN3: Gqa = Gqa { arch: "qwen3", head_norms: true, ..LLAMA };
/// Mixtral.
pub const MIXTRAL: Gqa = Gqa { experts: 4, ..LLAMA };

impl Gqa {
    /// Every tensor: name and shape, fastest dimension first.
    pub fn shapes(&self) -> Vec<(String, Vec<u64>)> {
        let (h, i, q, kv) = (self.hidden, self.inter, self.heads * self.head, self.kv_heads * self.head);
        let mut all = vec![("token_embd.weight".to_owned(), vec![h, self.vocab])];
        if !self.tied {
            all.push(("output.weight".into(), vec![h, self.vocab]));
        }
        all.push(("output_norm.weight".into(), vec![h]));
        for l in 0..self.layers {
            let mut add = |name: &str, ne: &[u64]| all.push((format!("blk.{l}.{name}"), ne.to_vec()));
            add("attn_norm.weight", &[h]);
            add("ffn_norm.weight", &[h]);
            for (x, rows) in [("q", q), ("k", kv), ("v", kv)] {
                add(&format!("attn_{x}.weight"), &[h, rows]);
                if self.biases {
                    add(&format!("attn_{x}.bias"), &[rows]);
                }
            }
            if self.head_norms {
                add("attn_q_norm.weight", &[self.head]);
                add("attn_k_norm.weight", &[self.head]);
            }
            add("attn_output.weight", &[q, h]);
            if self.experts == 0 {
                add("ffn_gate.weight", &[h, i]);
                add("ffn_up.weight", &[h, i]);
                add("ffn_down.weight", &[i, h]);
            } else {
                add("ffn_gate_inp.weight", &[h, self.experts]);
                add("ffn_gate_exps.weight", &[h, i, self.experts]);
                add("ffn_up_exps.weight", &[h, i, self.experts]);
                add("ffn_down_exps.weight", &[i, h, self.experts]);
            }
        }
        all
    }

    /// The metadata alone.
    pub fn metadata(&self) -> Builder {
        let key = |k: &str| format!("{}.{k}", self.arch);
        let mut builder = Builder::new(self.arch)
            .kv(key("block_count"), self.layers as u32)
            .kv(key("embedding_length"), self.hidden as u32)
            .kv(key("feed_forward_length"), self.inter as u32)
            .kv(key("context_length"), 2048u32)
            .kv(key("attention.head_count"), self.heads as u32)
            .kv(key("attention.head_count_kv"), self.kv_heads as u32)
            .kv(key("attention.key_length"), self.head as u32)
            .kv(key("attention.value_length"), self.head as u32)
            .kv(key("attention.layer_norm_rms_epsilon"), 1e-5f32)
            .kv(key("rope.freq_base"), 10000f32)
            .kv(key("vocab_size"), self.vocab as u32);
        if self.experts > 0 {
            builder = builder
                .kv(key("expert_count"), self.experts as u32)
                .kv(key("expert_used_count"), 2u32)
                .kv(key("expert_feed_forward_length"), self.inter as u32);
        }
        builder
    }

    /// The whole model.
    pub fn build(&self, types: Types) -> Builder {
        fill(self.metadata(), &self.shapes(), types)
    }

    /// config.json, as far as an independent converter needs it.
    pub fn config(&self) -> serde_json::Value {
        serde_json::json!({
            "model_type": self.arch, "num_hidden_layers": self.layers, "vocab_size": self.vocab,
            "num_attention_heads": self.heads, "num_key_value_heads": self.kv_heads, "num_experts": self.experts,
            "tie_word_embeddings": self.tied,
        })
    }
}

/// A model of multi-head latent attention with experts: deepseek2 and glm-dsa.
#[derive(Clone)]
pub struct Mla {
    pub arch: &'static str,
    /// Trunk layers; the first is dense.
    pub layers: u64,
    /// MTP blocks after them.
    pub mtp: u64,
    pub hidden: u64,
    pub inter: u64,
    pub moe_inter: u64,
    pub heads: u64,
    pub nope: u64,
    pub rope: u64,
    pub v: u64,
    /// 0: queries without a low rank.
    pub q_lora: u64,
    pub kv_lora: u64,
    pub experts: u64,
    pub vocab: u64,
    /// Heads of the indexer, each of `index_dim`; 0: none.
    pub index_heads: u64,
    pub index_dim: u64,
    /// `attn_kv_b` whole instead of its two halves.
    pub legacy: bool,
}

/// GLM-5's shape, small: 1 dense layer, 2 of experts, the MTP block; every cut over 2 ranks falls
/// on blocks of 256.
pub const GLM: Mla = Mla {
    arch: "glm-dsa",
    layers: 3,
    mtp: 1,
    hidden: 256,
    inter: 512,
    moe_inter: 512,
    heads: 4,
    nope: 64,
    rope: 32,
    v: 128,
    q_lora: 256,
    kv_lora: 256,
    experts: 4,
    vocab: 300,
    index_heads: 2,
    index_dim: 64,
    legacy: false,
};

/// DeepSeek-V3's.
pub const DEEPSEEK: Mla = Mla { arch: "deepseek2", mtp: 0, index_heads: 0, ..GLM };

impl Mla {
    /// Every tensor: name and shape, fastest dimension first.
    pub fn shapes(&self) -> Vec<(String, Vec<u64>)> {
        let (h, n, kl, e) = (self.hidden, self.heads, self.kv_lora, self.experts);
        let mut all = vec![
            ("token_embd.weight".to_owned(), vec![h, self.vocab]),
            ("output.weight".into(), vec![h, self.vocab]),
            ("output_norm.weight".into(), vec![h]),
        ];
        for l in 0..self.layers + self.mtp {
            let mut add = |name: &str, ne: &[u64]| all.push((format!("blk.{l}.{name}"), ne.to_vec()));
            add("attn_norm.weight", &[h]);
            add("ffn_norm.weight", &[h]);
            let q = n * (self.nope + self.rope);
            if self.q_lora > 0 {
                add("attn_q_a.weight", &[h, self.q_lora]);
                add("attn_q_a_norm.weight", &[self.q_lora]);
                add("attn_q_b.weight", &[self.q_lora, q]);
            } else {
                add("attn_q.weight", &[h, q]);
            }
            add("attn_kv_a_mqa.weight", &[h, kl + self.rope]);
            add("attn_kv_a_norm.weight", &[kl]);
            if self.legacy {
                add("attn_kv_b.weight", &[kl, n * (self.nope + self.v)]);
            } else {
                add("attn_k_b.weight", &[self.nope, kl, n]);
                add("attn_v_b.weight", &[kl, self.v, n]);
            }
            add("attn_output.weight", &[n * self.v, h]);
            if self.index_heads > 0 {
                add("indexer.attn_q_b.weight", &[self.q_lora, self.index_heads * self.index_dim]);
                add("indexer.attn_k.weight", &[h, self.index_dim]);
                add("indexer.k_norm.weight", &[self.index_dim]);
                add("indexer.k_norm.bias", &[self.index_dim]);
                add("indexer.proj.weight", &[h, self.index_heads]);
            }
            if l == 0 {
                add("ffn_gate.weight", &[h, self.inter]);
                add("ffn_up.weight", &[h, self.inter]);
                add("ffn_down.weight", &[self.inter, h]);
            } else {
                let i = self.moe_inter;
                add("ffn_gate_inp.weight", &[h, e]);
                add("exp_probs_b.bias", &[e]);
                add("ffn_gate_exps.weight", &[h, i, e]);
                add("ffn_up_exps.weight", &[h, i, e]);
                add("ffn_down_exps.weight", &[i, h, e]);
                add("ffn_gate_shexp.weight", &[h, i]);
                add("ffn_up_shexp.weight", &[h, i]);
                add("ffn_down_shexp.weight", &[i, h]);
            }
            if l >= self.layers {
                add("nextn.eh_proj.weight", &[2 * h, h]);
                add("nextn.enorm.weight", &[h]);
                add("nextn.hnorm.weight", &[h]);
                add("nextn.shared_head_norm.weight", &[h]);
            }
        }
        all
    }

    /// The metadata alone.
    pub fn metadata(&self) -> Builder {
        let key = |k: &str| format!("{}.{k}", self.arch);
        let mut builder = Builder::new(self.arch)
            .kv(key("block_count"), (self.layers + self.mtp) as u32)
            .kv(key("embedding_length"), self.hidden as u32)
            .kv(key("feed_forward_length"), self.inter as u32)
            .kv(key("context_length"), 2048u32)
            .kv(key("leading_dense_block_count"), 1u32)
            .kv(key("attention.head_count"), self.heads as u32)
            .kv(key("attention.layer_norm_rms_epsilon"), 1e-5f32)
            .kv(key("attention.kv_lora_rank"), self.kv_lora as u32)
            .kv(key("rope.dimension_count"), self.rope as u32)
            .kv(key("rope.freq_base"), 10000f32)
            .kv(key("vocab_size"), self.vocab as u32)
            .kv(key("expert_count"), self.experts as u32)
            .kv(key("expert_used_count"), 2u32)
            .kv(key("expert_shared_count"), 1u32)
            .kv(key("expert_feed_forward_length"), self.moe_inter as u32)
            .kv(key("expert_weights_scale"), 2.5f32)
            .kv(key("expert_weights_norm"), true)
            .kv(key("expert_gating_func"), 2u32);
        if self.q_lora > 0 {
            builder = builder.kv(key("attention.q_lora_rank"), self.q_lora as u32);
        }
        builder = if self.legacy {
            builder
                .kv(key("attention.head_count_kv"), self.heads as u32)
                .kv(key("attention.key_length"), (self.nope + self.rope) as u32)
                .kv(key("attention.value_length"), self.v as u32)
        } else {
            builder
                .kv(key("attention.head_count_kv"), 1u32)
                .kv(key("attention.key_length"), (self.kv_lora + self.rope) as u32)
                .kv(key("attention.value_length"), self.kv_lora as u32)
                .kv(key("attention.key_length_mla"), (self.nope + self.rope) as u32)
                .kv(key("attention.value_length_mla"), self.v as u32)
        };
        if self.mtp > 0 {
            builder = builder.kv(key("nextn_predict_layers"), self.mtp as u32);
        }
        if self.index_heads > 0 {
            builder = builder
                .kv(key("attention.indexer.head_count"), self.index_heads as u32)
                .kv(key("attention.indexer.key_length"), self.index_dim as u32)
                .kv(key("attention.indexer.top_k"), 8u32);
        }
        builder
    }

    /// The whole model.
    pub fn build(&self, types: Types) -> Builder {
        fill(self.metadata(), &self.shapes(), types)
    }

    /// config.json, as far as an independent converter needs it.
    pub fn config(&self) -> serde_json::Value {
        serde_json::json!({
            "model_type": self.arch, "num_hidden_layers": self.layers, "vocab_size": self.vocab,
            "num_attention_heads": self.heads, "num_key_value_heads": self.heads,
            "kv_lora_rank": self.kv_lora, "n_routed_experts": self.experts,
        })
    }
}

/// Adds tensors of these shapes with blocks made from their names.
pub fn fill(mut builder: Builder, shapes: &[(String, Vec<u64>)], types: Types) -> Builder {
    for (name, ne) in shapes {
        builder = add(builder, name, ne, types(name));
    }
    builder
}

/// Adds one tensor; vectors are f32 whatever the type.
pub fn add(builder: Builder, name: &str, ne: &[u64], ty: u32) -> Builder {
    let ty = if ne.len() == 1 { common::F32 } else { ty };
    builder.tensor(name, ty, ne, blocks(name, ty, ne.iter().product()))
}
