//! The tables under `mappings/`: facts about GGUF architectures and about engines.
//!
//! An architecture file undoes llama.cpp's converter (GGUF tensors to Hugging Face tensors). An
//! engine file says what an engine makes of Hugging Face tensors: which fuse, how each is cut, which
//! are never quantised. `docs/mappings.md` describes every key.

mod arch;
mod engine;
pub(crate) mod expr;
pub(crate) mod tables;

pub use arch::{Arch, DropRule, EngineChoice, Group, Run, Schedule, SymbolSource, TensorRule, Values, Via};
pub use engine::{
    ConstantRule, Cut, Engine, Files, FusedShared, Method, MethodName, Packed, ParamRule, Part, Serve, Stage,
};
pub use tables::Tables;

use serde::Deserialize;
use serde::de::value::{SeqAccessDeserializer, StrDeserializer};
use serde::de::{Deserializer, Error, SeqAccess, Visitor};
use std::fmt;
use std::marker::PhantomData;

/// One word, or a list of them; an error is that of the word.
fn one_or_many<'de, D: Deserializer<'de>, T: Deserialize<'de>>(d: D) -> Result<Vec<T>, D::Error> {
    struct OneOrMany<T>(PhantomData<T>);
    impl<'de, T: Deserialize<'de>> Visitor<'de> for OneOrMany<T> {
        type Value = Vec<T>;
        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("a text or a list of texts")
        }
        fn visit_str<E: Error>(self, word: &str) -> Result<Vec<T>, E> {
            T::deserialize(StrDeserializer::new(word)).map(|one| vec![one])
        }
        fn visit_seq<A: SeqAccess<'de>>(self, words: A) -> Result<Vec<T>, A::Error> {
            Vec::deserialize(SeqAccessDeserializer::new(words))
        }
    }
    d.deserialize_any(OneOrMany(PhantomData))
}
