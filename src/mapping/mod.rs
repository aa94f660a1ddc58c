//! The tables under `mappings/`: facts about GGUF architectures and about engines.
//!
//! An architecture file undoes llama.cpp's converter (GGUF tensors to Hugging Face tensors). An
//! engine file says what an engine makes of Hugging Face tensors: which fuse, how each is cut, which
//! are never quantised. `docs/mappings.md` describes every key.

mod arch;
mod engine;
pub(crate) mod tables;

pub use arch::{Arch, DropRule, EngineChoice, Group, Schedule, SymbolSource, TensorRule, Via};
pub use engine::{
    ConstantRule, Cut, Engine, Files, FusedShared, Method, MethodName, Packed, ParamRule, Part, Serve, Stage,
};
pub use tables::Tables;

use serde::Deserialize;

fn one_or_many<'de, D: serde::Deserializer<'de>, T: Deserialize<'de>>(
    d: D,
) -> std::result::Result<Vec<T>, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum OneOrMany<T> {
        One(T),
        Many(Vec<T>),
    }
    Ok(match OneOrMany::deserialize(d)? {
        OneOrMany::One(x) => vec![x],
        OneOrMany::Many(xs) => xs,
    })
}
