//! Small models of two architectures with random shapes, types and values, and what each Hugging Face
//! tensor of them is, worked out element by element with none of the planner's code.

use crate::gguf::{Builder, Kv};
use arbitrary::{Result, Unstructured};
use preshard::quant::{Float, GgmlType, TYPES};
use std::collections::BTreeMap;

/// A model and what it means.
pub struct Model {
    pub gguf: Builder,
    /// By Hugging Face name.
    pub tensors: BTreeMap<String, Hf>,
    pub heads: u64,
    pub kv_heads: u64,
    pub experts: u64,
    pub layers: u64,
    /// Metadata keys it has.
    pub keys: Vec<String>,
    sources: Vec<Source>,
}

/// A GGUF tensor.
struct Source {
    ty: &'static GgmlType,
    ne: Vec<u64>,
    data: Vec<u8>,
}

/// A Hugging Face tensor: its shape, and where its elements come from.
pub struct Hf {
    pub rows: u64,
    pub cols: u64,
    pub vector: bool,
    from: From,
}

enum From {
    /// Matrix `1`, from row `2` on, of tensor `0`.
    Rows(usize, u64, u64),
    /// Rows of heads, interleaved by llama.cpp: tensor and rows of a head.
    Interleaved(usize, u64),
    /// `attn_k_b` and `attn_v_b`, with rows of a head in each.
    KvB(usize, usize, u64, u64),
    /// A bias that the class declares and the file lacks.
    Zeros,
}

impl Model {
    /// The elements of a Hugging Face tensor in `float`, row by row.
    pub fn values(&self, name: &str, float: Float) -> Vec<u8> {
        let hf = &self.tensors[name];
        let size = float.size();
        let decoded = |i: usize| {
            let s = &self.sources[i];
            let mut out = vec![0; s.ne.iter().product::<u64>() as usize * size];
            s.ty.decode(&s.data, float, &mut out);
            out
        };
        let n = (hf.rows * hf.cols) as usize * size;
        let cols = hf.cols as usize;
        match hf.from {
            From::Zeros => vec![0; n],
            From::Rows(i, matrix, first) => {
                let ne = &self.sources[i].ne;
                let all_rows = if hf.vector { ne[0] } else { ne[1] };
                let start = ((matrix * all_rows + first) * hf.cols) as usize * size;
                decoded(i)[start..start + n].to_vec()
            }
            From::Interleaved(i, head) => {
                let stored = decoded(i);
                let mut out = vec![0; n];
                // llama.cpp: reshape(heads, 2, head / 2, …).swapaxes(1, 2), so Hugging Face row
                // (h, half, j) is stored as row (h, j, half).
                for row in 0..hf.rows {
                    let (h, r) = (row / head, row % head);
                    let (half, j) = (r / (head / 2), r % (head / 2));
                    let from = (h * head + j * 2 + half) as usize * cols * size;
                    let to = row as usize * cols * size;
                    out[to..to + cols * size].copy_from_slice(&stored[from..from + cols * size]);
                }
                out
            }
            From::KvB(k, v, nope, vd) => {
                let (sk, sv) = (decoded(k), decoded(v));
                let mut out = Vec::with_capacity(n);
                for row in 0..hf.rows {
                    let (h, r) = (row / (nope + vd), row % (nope + vd));
                    for c in 0..hf.cols {
                        // k_b is [nope, lora, heads] in ggml's order, v_b [lora, v, heads].
                        let (from, at) = match r < nope {
                            true => (&sk, (h * hf.cols + c) * nope + r),
                            false => (&sv, (h * vd + r - nope) * hf.cols + c),
                        };
                        let at = at as usize * size;
                        out.extend_from_slice(&from[at..at + size]);
                    }
                }
                out
            }
        }
    }
    /// The type of the blocks that a Hugging Face tensor is stored in.
    pub fn ty(&self, name: &str) -> &'static GgmlType {
        match self.tensors[name].from {
            From::Zeros => unreachable!("{name}: zeros are never packed"),
            From::Rows(i, ..) | From::Interleaved(i, _) | From::KvB(i, ..) => self.sources[i].ty,
        }
    }
}

/// Builds a model tensor by tensor.
struct Maker<'u, 'd> {
    u: &'u mut Unstructured<'d>,
    model: Model,
    seed: u64,
}

impl Maker<'_, '_> {
    fn key(&mut self, key: &str, value: impl Into<Kv>) {
        let gguf = std::mem::replace(&mut self.model.gguf, Builder::bare());
        self.model.gguf = gguf.kv(key, value);
        self.model.keys.push(key.to_owned());
    }

    /// A type that a row of `cols` elements can have; mostly the quantised ones.
    fn ty(&mut self, cols: u64) -> Result<&'static GgmlType> {
        let fits: Vec<_> =
            TYPES.iter().filter(|t| (t.is_quantised() || t.is_float()) && cols % t.block == 0).collect();
        Ok(self.u.choose(&fits)?)
    }

    fn float(&mut self) -> Result<&'static GgmlType> {
        let fits: Vec<_> = TYPES.iter().filter(|t| t.is_float()).collect();
        Ok(self.u.choose(&fits)?)
    }

    /// A GGUF tensor of random bytes.
    fn tensor(&mut self, name: &str, ty: &'static GgmlType, ne: &[u64]) -> usize {
        let rows: u64 = ne[1..].iter().product();
        let bytes = (ne[0] / ty.block * ty.bytes * rows) as usize;
        let mut data = Vec::with_capacity(bytes + 8);
        while data.len() < bytes {
            // xorshift64
            self.seed ^= self.seed << 13;
            self.seed ^= self.seed >> 7;
            self.seed ^= self.seed << 17;
            data.extend_from_slice(&self.seed.to_le_bytes());
        }
        data.truncate(bytes);
        let gguf = std::mem::replace(&mut self.model.gguf, Builder::bare());
        self.model.gguf = gguf.tensor(name, ty.id, ne, data.clone());
        self.model.sources.push(Source { ty, ne: ne.to_vec(), data });
        self.model.sources.len() - 1
    }

    fn hf(&mut self, name: String, rows: u64, cols: u64, vector: bool, from: From) {
        self.model.tensors.insert(name, Hf { rows, cols, vector, from });
    }

    fn matrix(&mut self, gguf: &str, hf: String, rows: u64, cols: u64) -> Result<()> {
        let ty = self.ty(cols)?;
        let i = self.tensor(gguf, ty, &[cols, rows]);
        self.hf(hf, rows, cols, false, From::Rows(i, 0, 0));
        Ok(())
    }

    fn vector(&mut self, gguf: &str, hf: String, n: u64) -> Result<()> {
        let ty = self.float()?;
        let i = self.tensor(gguf, ty, &[n]);
        self.hf(hf, n, 1, true, From::Rows(i, 0, 0));
        Ok(())
    }

    fn heads(&mut self, gguf: &str, hf: String, heads: u64, head: u64, cols: u64) -> Result<()> {
        let ty = if cols == 1 { self.float()? } else { self.ty(cols)? };
        let (vector, ne) = match cols {
            1 => (true, vec![heads * head]),
            _ => (false, vec![cols, heads * head]),
        };
        let i = self.tensor(gguf, ty, &ne);
        self.hf(hf, heads * head, cols, vector, From::Interleaved(i, head));
        Ok(())
    }

    /// The experts' matrices of a layer: stacked, fused or one each.
    fn experts(&mut self, l: u64, hf: [&str; 3], hidden: u64, ffn: u64, one_each: bool) -> Result<()> {
        let n = self.model.experts;
        let [gate, up, down] = hf;
        let down_ty = self.ty(ffn)?;
        match self.u.int_in_range(0..=if one_each { 2 } else { 1 })? {
            0 => {
                let (gate_ty, up_ty) = (self.ty(hidden)?, self.ty(hidden)?);
                let g = self.tensor(&format!("blk.{l}.ffn_gate_exps.weight"), gate_ty, &[hidden, ffn, n]);
                let u = self.tensor(&format!("blk.{l}.ffn_up_exps.weight"), up_ty, &[hidden, ffn, n]);
                for e in 0..n {
                    let e_text = e.to_string();
                    self.hf(gate.replace("{E}", &e_text), ffn, hidden, false, From::Rows(g, e, 0));
                    self.hf(up.replace("{E}", &e_text), ffn, hidden, false, From::Rows(u, e, 0));
                }
            }
            1 => {
                let ty = self.ty(hidden)?;
                let i = self.tensor(&format!("blk.{l}.ffn_gate_up_exps.weight"), ty, &[hidden, 2 * ffn, n]);
                for e in 0..n {
                    let e_text = e.to_string();
                    self.hf(gate.replace("{E}", &e_text), ffn, hidden, false, From::Rows(i, e, 0));
                    self.hf(up.replace("{E}", &e_text), ffn, hidden, false, From::Rows(i, e, ffn));
                }
            }
            _ => {
                let (gate_ty, up_ty) = (self.ty(hidden)?, self.ty(hidden)?);
                for e in 0..n {
                    let e_text = e.to_string();
                    let g = self.tensor(&format!("blk.{l}.ffn_gate.{e}.weight"), gate_ty, &[hidden, ffn]);
                    let u = self.tensor(&format!("blk.{l}.ffn_up.{e}.weight"), up_ty, &[hidden, ffn]);
                    let d = self.tensor(&format!("blk.{l}.ffn_down.{e}.weight"), down_ty, &[ffn, hidden]);
                    self.hf(gate.replace("{E}", &e_text), ffn, hidden, false, From::Rows(g, 0, 0));
                    self.hf(up.replace("{E}", &e_text), ffn, hidden, false, From::Rows(u, 0, 0));
                    self.hf(down.replace("{E}", &e_text), hidden, ffn, false, From::Rows(d, 0, 0));
                }
                return Ok(());
            }
        }
        let d = self.tensor(&format!("blk.{l}.ffn_down_exps.weight"), down_ty, &[ffn, hidden, n]);
        for e in 0..n {
            self.hf(down.replace("{E}", &e.to_string()), hidden, ffn, false, From::Rows(d, e, 0));
        }
        Ok(())
    }
}

/// Sizes that meet every block size, and some that meet none.
const WIDTHS: [u64; 10] = [256, 64, 512, 128, 32, 96, 8, 40, 12, 288];

/// A random model.
pub fn random(u: &mut Unstructured) -> Result<Model> {
    match u.arbitrary()? {
        true => llama(u),
        false => deepseek2(u),
    }
}

fn maker<'u, 'd>(u: &'u mut Unstructured<'d>, architecture: &str) -> Result<Maker<'u, 'd>> {
    let seed = u.arbitrary::<u64>()? | 1;
    let model = Model {
        gguf: Builder::new(architecture),
        tensors: BTreeMap::new(),
        heads: 1,
        kv_heads: 1,
        experts: 0,
        layers: 1,
        keys: Vec::new(),
        sources: Vec::new(),
    };
    Ok(Maker { u, model, seed })
}

fn llama(u: &mut Unstructured) -> Result<Model> {
    let mut m = maker(u, "llama")?;
    let hidden = *m.u.choose(&WIDTHS)?;
    let ffn = *m.u.choose(&WIDTHS)?;
    let head = *m.u.choose(&[32u64, 64, 2, 4, 16, 6])?;
    let kv = m.u.int_in_range(1..=3u64)?;
    let heads = kv * *m.u.choose(&[2u64, 1, 3, 4])?;
    let vocab = m.u.int_in_range(1..=70u64)?;
    let layers = m.u.int_in_range(1..=2u64)?;
    let experts = if m.u.arbitrary()? { m.u.int_in_range(1..=6u64)? } else { 0 };
    (m.model.heads, m.model.kv_heads, m.model.experts, m.model.layers) = (heads, kv, experts, layers);
    m.key("llama.block_count", layers as u32);
    m.key("llama.attention.head_count", heads as u32);
    if kv != heads || m.u.arbitrary()? {
        m.key("llama.attention.head_count_kv", kv as u32);
    }
    if experts > 0 {
        m.key("llama.expert_count", experts as u32);
        m.key("llama.expert_used_count", 1u32);
    }
    m.key("llama.embedding_length", hidden as u32);
    m.key("llama.feed_forward_length", ffn as u32);
    m.key("llama.context_length", 128u32);
    m.key("llama.attention.layer_norm_rms_epsilon", 1e-5f32);
    m.key("llama.attention.key_length", head as u32);
    m.matrix("token_embd.weight", "model.embed_tokens.weight".into(), vocab, hidden)?;
    m.vector("output_norm.weight", "model.norm.weight".into(), hidden)?;
    if m.u.arbitrary()? {
        m.matrix("output.weight", "lm_head.weight".into(), vocab, hidden)?;
    }
    for l in 0..layers {
        let (g, h) = (|n: &str| format!("blk.{l}.{n}"), |n: &str| format!("model.layers.{l}.{n}"));
        m.vector(&g("attn_norm.weight"), h("input_layernorm.weight"), hidden)?;
        m.vector(&g("ffn_norm.weight"), h("post_attention_layernorm.weight"), hidden)?;
        m.heads(&g("attn_q.weight"), h("self_attn.q_proj.weight"), heads, head, hidden)?;
        m.heads(&g("attn_k.weight"), h("self_attn.k_proj.weight"), kv, head, hidden)?;
        m.matrix(&g("attn_v.weight"), h("self_attn.v_proj.weight"), kv * head, hidden)?;
        if m.u.ratio(1, 4)? {
            m.heads(&g("attn_q.bias"), h("self_attn.q_proj.bias"), heads, head, 1)?;
            m.heads(&g("attn_k.bias"), h("self_attn.k_proj.bias"), kv, head, 1)?;
            m.vector(&g("attn_v.bias"), h("self_attn.v_proj.bias"), kv * head)?;
        }
        m.matrix(&g("attn_output.weight"), h("self_attn.o_proj.weight"), hidden, heads * head)?;
        if experts == 0 {
            m.matrix(&g("ffn_gate.weight"), h("mlp.gate_proj.weight"), ffn, hidden)?;
            m.matrix(&g("ffn_up.weight"), h("mlp.up_proj.weight"), ffn, hidden)?;
            m.matrix(&g("ffn_down.weight"), h("mlp.down_proj.weight"), hidden, ffn)?;
        } else {
            m.matrix(&g("ffn_gate_inp.weight"), h("block_sparse_moe.gate.weight"), experts, hidden)?;
            let name = |w: &str| h(&format!("block_sparse_moe.experts.{{E}}.{w}.weight"));
            m.experts(l, [&name("w1"), &name("w3"), &name("w2")], hidden, ffn, true)?;
        }
    }
    // The class has all four biases of attention in every layer as soon as one layer has one.
    if m.model.tensors.keys().any(|name| name.ends_with(".bias")) {
        for l in 0..layers {
            for (projection, rows) in
                [("q_proj", heads * head), ("k_proj", kv * head), ("v_proj", kv * head), ("o_proj", hidden)]
            {
                let name = format!("model.layers.{l}.self_attn.{projection}.bias");
                if !m.model.tensors.contains_key(&name) {
                    m.hf(name, rows, 1, true, From::Zeros);
                }
            }
        }
    }
    Ok(m.model)
}

fn deepseek2(u: &mut Unstructured) -> Result<Model> {
    let mut m = maker(u, "deepseek2")?;
    let hidden = *m.u.choose(&WIDTHS)?;
    let (ffn, expert_ffn) = (*m.u.choose(&WIDTHS)?, *m.u.choose(&WIDTHS)?);
    let heads = *m.u.choose(&[4u64, 2, 1, 3, 8])?;
    let (nope, rope, v) =
        (*m.u.choose(&[32u64, 64, 4])?, *m.u.choose(&[32u64, 8])?, *m.u.choose(&[32u64, 64, 5])?);
    let (q_lora, kv_lora) = (*m.u.choose(&WIDTHS)?, *m.u.choose(&WIDTHS)?);
    let vocab = m.u.int_in_range(1..=70u64)?;
    let layers = m.u.int_in_range(1..=3u64)?;
    let dense = m.u.int_in_range(0..=layers)?;
    let experts = m.u.int_in_range(1..=6u64)?;
    (m.model.heads, m.model.kv_heads, m.model.experts, m.model.layers) = (heads, heads, experts, layers);
    for (key, value) in [
        ("block_count", layers),
        ("leading_dense_block_count", dense),
        ("attention.head_count", heads),
        ("attention.head_count_kv", 1),
        ("expert_count", experts),
        ("expert_used_count", 1),
        ("expert_shared_count", 1),
        ("expert_feed_forward_length", expert_ffn),
        ("embedding_length", hidden),
        ("feed_forward_length", ffn),
        ("context_length", 128),
        ("attention.q_lora_rank", q_lora),
        ("attention.kv_lora_rank", kv_lora),
        ("attention.key_length", kv_lora + rope),
        ("attention.value_length", kv_lora),
        ("attention.key_length_mla", nope + rope),
        ("attention.value_length_mla", v),
        ("rope.dimension_count", rope),
    ] {
        m.key(&format!("deepseek2.{key}"), value as u32);
    }
    m.key("deepseek2.attention.layer_norm_rms_epsilon", 1e-6f32);
    m.matrix("token_embd.weight", "model.embed_tokens.weight".into(), vocab, hidden)?;
    m.vector("output_norm.weight", "model.norm.weight".into(), hidden)?;
    if m.u.arbitrary()? {
        m.matrix("output.weight", "lm_head.weight".into(), vocab, hidden)?;
    }
    for l in 0..layers {
        let (g, h) = (|n: &str| format!("blk.{l}.{n}"), |n: &str| format!("model.layers.{l}.{n}"));
        m.vector(&g("attn_norm.weight"), h("input_layernorm.weight"), hidden)?;
        m.vector(&g("ffn_norm.weight"), h("post_attention_layernorm.weight"), hidden)?;
        let q_rows = heads * (nope + rope);
        if m.u.ratio(3, 4)? {
            m.matrix(&g("attn_q_a.weight"), h("self_attn.q_a_proj.weight"), q_lora, hidden)?;
            m.vector(&g("attn_q_a_norm.weight"), h("self_attn.q_a_layernorm.weight"), q_lora)?;
            m.matrix(&g("attn_q_b.weight"), h("self_attn.q_b_proj.weight"), q_rows, q_lora)?;
        } else {
            m.matrix(&g("attn_q.weight"), h("self_attn.q_proj.weight"), q_rows, hidden)?;
        }
        let kv_a = h("self_attn.kv_a_proj_with_mqa.weight");
        m.matrix(&g("attn_kv_a_mqa.weight"), kv_a, kv_lora + rope, hidden)?;
        m.vector(&g("attn_kv_a_norm.weight"), h("self_attn.kv_a_layernorm.weight"), kv_lora)?;
        let kv_b = h("self_attn.kv_b_proj.weight");
        if m.u.ratio(3, 4)? {
            let (k_ty, v_ty) = (m.ty(nope)?, m.ty(kv_lora)?);
            let k = m.tensor(&g("attn_k_b.weight"), k_ty, &[nope, kv_lora, heads]);
            let vb = m.tensor(&g("attn_v_b.weight"), v_ty, &[kv_lora, v, heads]);
            m.hf(kv_b, heads * (nope + v), kv_lora, false, From::KvB(k, vb, nope, v));
        } else {
            m.matrix(&g("attn_kv_b.weight"), kv_b, heads * (nope + v), kv_lora)?;
        }
        m.matrix(&g("attn_output.weight"), h("self_attn.o_proj.weight"), hidden, heads * v)?;
        if l < dense {
            m.matrix(&g("ffn_gate.weight"), h("mlp.gate_proj.weight"), ffn, hidden)?;
            m.matrix(&g("ffn_up.weight"), h("mlp.up_proj.weight"), ffn, hidden)?;
            m.matrix(&g("ffn_down.weight"), h("mlp.down_proj.weight"), hidden, ffn)?;
            continue;
        }
        m.matrix(&g("ffn_gate_inp.weight"), h("mlp.gate.weight"), experts, hidden)?;
        if m.u.arbitrary()? {
            m.vector(&g("exp_probs_b.bias"), h("mlp.gate.e_score_correction_bias"), experts)?;
        }
        let name = |w: &str| h(&format!("mlp.experts.{{E}}.{w}.weight"));
        m.experts(l, [&name("gate_proj"), &name("up_proj"), &name("down_proj")], hidden, expert_ffn, false)?;
        m.matrix(&g("ffn_gate_shexp.weight"), h("mlp.shared_experts.gate_proj.weight"), expert_ffn, hidden)?;
        m.matrix(&g("ffn_up_shexp.weight"), h("mlp.shared_experts.up_proj.weight"), expert_ffn, hidden)?;
        m.matrix(&g("ffn_down_shexp.weight"), h("mlp.shared_experts.down_proj.weight"), hidden, expert_ffn)?;
    }
    Ok(m.model)
}

/// One model, always the same: a small Llama.
pub fn fixed() -> Model {
    let bytes: Vec<u8> = (0..4096u32).map(|i| (i * 37 + (i >> 3)) as u8).collect();
    (0..)
        .filter_map(|skip| llama(&mut Unstructured::new(&bytes[skip..])).ok())
        .find(|m| m.experts == 0 && m.heads % 2 == 0)
        .expect("one of them is dense")
}

/// A random model with a tokenizer.
pub fn with_tokenizer(u: &mut Unstructured) -> Result<Model> {
    let mut model = random(u)?;
    let mut gguf = model.gguf;
    let byte_level: bool = u.arbitrary()?;
    let mut tokens: Vec<String> = match byte_level {
        true => (33..=126u8).map(|b| char::from(b).to_string()).collect(),
        false => (0..=255u8).map(|b| format!("<0x{b:02X}>")).collect(),
    };
    tokens.extend(["<s>", "</s>", "ab", "abc", "\u{120}a"].map(str::to_owned));
    let n = tokens.len();
    for (key, value) in [
        ("tokenizer.ggml.model", Kv::from(if byte_level { "gpt2" } else { "llama" })),
        (
            "tokenizer.ggml.pre",
            Kv::from(*u.choose(&["llama-bpe", "gpt-2", "default", "glm4", "deepseek-v3"])?),
        ),
        ("tokenizer.ggml.tokens", Kv::from(tokens)),
        ("tokenizer.ggml.token_type", Kv::from(vec![1i32; n])),
        ("tokenizer.ggml.scores", Kv::from(vec![-1f32; n])),
        ("tokenizer.ggml.merges", Kv::from(vec!["a b", "ab c"])),
        ("tokenizer.ggml.bos_token_id", Kv::from((n - 5) as u32)),
        ("tokenizer.ggml.eos_token_id", Kv::from((n - 4) as u32)),
        ("tokenizer.ggml.add_bos_token", Kv::from(true)),
        ("tokenizer.ggml.add_space_prefix", Kv::from(false)),
        ("tokenizer.chat_template", Kv::from("{{ messages }}")),
    ] {
        gguf = gguf.kv(key, value);
        model.keys.push(key.to_owned());
    }
    model.gguf = gguf;
    Ok(model)
}
