//! config.json and the tokenizer from metadata of any kind: the first bytes choose an architecture and
//! which keys of a sound model are replaced, the rest is what replaces them.
#![no_main]

use arbitrary::{Result, Unstructured};
use libfuzzer_sys::fuzz_target;
use preshard::gguf::Gguf;
use preshard::hf::{self, Request};
use preshard_fuzz::gguf::Kv;
use preshard_fuzz::{check_message, model, scratch};

fuzz_target!(|data: &[u8]| {
    let _ = run(&mut Unstructured::new(data));
});

fn run(u: &mut Unstructured) -> Result<()> {
    let base = model::with_tokenizer(u)?;
    let keys = base.keys.clone();
    let mut gguf = base.gguf;
    for _ in 0..u.int_in_range(0..=6)? {
        let key = u.choose(&keys)?.clone();
        gguf = if u.ratio(1, 4)? { gguf.unset(&key) } else { gguf.set(&key, value(u, 0)?) };
    }
    let path = scratch().join("hf.gguf");
    gguf.write(&path);
    let gguf = match Gguf::open(&[path]) {
        Ok(gguf) => gguf,
        Err(error) => {
            check_message(&error);
            return Ok(());
        }
    };
    let request = match Request::of(&gguf) {
        Ok(request) => Request { indexer: u.arbitrary()?, mtp: u.arbitrary()?, ..request },
        Err(error) => {
            check_message(&error);
            return Ok(());
        }
    };
    match hf::files(&gguf, &request) {
        Err(error) => check_message(&error),
        Ok(files) => {
            if let Err(error) = hf::checked_files(&gguf, &request) {
                check_message(&error);
            }
            for note in files.notes {
                assert!(!note.chars().any(char::is_control), "{note:?}");
            }
            assert!(files.files.windows(2).all(|w| w[0].0 < w[1].0), "names in order, each once");
            for (name, bytes) in files.files {
                assert!(!name.contains('/') && !name.starts_with('.'), "{name:?}");
                assert!(bytes.len() < 64 << 20, "{name}: {} bytes from a small model", bytes.len());
            }
        }
    }
    Ok(())
}

/// A metadata value of any type.
fn value(u: &mut Unstructured, depth: u32) -> Result<Kv> {
    Ok(match u.int_in_range(0..=if depth < 2 { 10 } else { 8 })? {
        0 => u.arbitrary::<u32>()?.into(),
        1 => u.arbitrary::<u64>()?.into(),
        2 => u.arbitrary::<i32>()?.into(),
        3 => u.arbitrary::<f32>()?.into(),
        4 => u.arbitrary::<f64>()?.into(),
        5 => u.arbitrary::<bool>()?.into(),
        6 => u.int_in_range(0..=300u32)?.into(),
        7 => u.arbitrary::<&str>()?.into(),
        8 => Kv::Text(u.arbitrary::<&[u8]>()?.to_vec()),
        9 => {
            let first = value(u, depth + 1)?;
            let id = match &first {
                Kv::Scalar(id, _) | Kv::Raw(id, _) => *id,
                Kv::Text(_) => 8,
                Kv::Array(..) => return Ok(first),
            };
            let mut elements = vec![first];
            for _ in 0..u.int_in_range(0..=40)? {
                match (id, value(u, 2)?) {
                    (8, Kv::Text(text)) => elements.push(Kv::Text(text)),
                    (_, Kv::Scalar(other, bytes)) if other == id => elements.push(Kv::Scalar(other, bytes)),
                    _ => {}
                }
            }
            Kv::Array(id, elements)
        }
        _ => Kv::Array(*u.choose(&[4, 5, 6, 8])?, Vec::new()),
    })
}
