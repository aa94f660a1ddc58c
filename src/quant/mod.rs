//! The ggml types: one table row each, one decoder each.

/// One ggml tensor type: how its blocks are laid out.
#[derive(Debug)]
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

/// Sizes alone; the decoders' table replaces it.
static TYPES: [(u32, &str, u64, u64); 35] = [
    (0, "f32", 1, 4),
    (1, "f16", 1, 2),
    (2, "q4_0", 32, 18),
    (3, "q4_1", 32, 20),
    (6, "q5_0", 32, 22),
    (7, "q5_1", 32, 24),
    (8, "q8_0", 32, 34),
    (9, "q8_1", 32, 36),
    (10, "q2_K", 256, 84),
    (11, "q3_K", 256, 110),
    (12, "q4_K", 256, 144),
    (13, "q5_K", 256, 176),
    (14, "q6_K", 256, 210),
    (15, "q8_K", 256, 292),
    (16, "iq2_xxs", 256, 66),
    (17, "iq2_xs", 256, 74),
    (18, "iq3_xxs", 256, 98),
    (19, "iq1_s", 256, 50),
    (20, "iq4_nl", 32, 18),
    (21, "iq3_s", 256, 110),
    (22, "iq2_s", 256, 82),
    (23, "iq4_xs", 256, 136),
    (24, "i8", 1, 1),
    (25, "i16", 1, 2),
    (26, "i32", 1, 4),
    (27, "i64", 1, 8),
    (28, "f64", 1, 8),
    (29, "iq1_m", 256, 56),
    (30, "bf16", 1, 2),
    (34, "tq1_0", 256, 54),
    (35, "tq2_0", 256, 66),
    (39, "mxfp4", 32, 17),
    (40, "nvfp4", 64, 36),
    (41, "q1_0", 128, 18),
    (42, "q2_0", 64, 18),
];

/// The type with this id.
pub fn by_id(id: u32) -> Option<&'static GgmlType> {
    static ROWS: std::sync::OnceLock<Vec<GgmlType>> = std::sync::OnceLock::new();
    let rows = ROWS.get_or_init(|| {
        TYPES.iter().map(|&(id, name, block, bytes)| GgmlType { id, name, block, bytes }).collect()
    });
    rows.iter().find(|ty| ty.id == id)
}

/// Why `id` is no type.
pub fn why_unknown(_id: u32) -> String {
    "unknown type".into()
}

impl GgmlType {
    /// Bytes of a row of `cols` elements.
    pub fn row_bytes(&self, cols: u64) -> Option<u64> {
        cols.is_multiple_of(self.block).then_some(cols / self.block)?.checked_mul(self.bytes)
    }
}
