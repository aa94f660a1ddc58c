//! The ggml types: one table row each, one decoder each.

/// One ggml tensor type: how its blocks are laid out.
pub struct GgmlType {
    /// The id that GGUF files carry (`enum ggml_type`).
    pub id: u32,
    /// ggml's own name, for example `q4_K`.
    pub name: &'static str,
    /// Elements of one block.
    pub block: u64,
    /// Bytes of one block.
    pub bytes: u64,
}
