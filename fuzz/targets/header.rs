//! The safetensors header of a shard, as the loader parses it: what it accepts, the format's own
//! library accepts too and reads the same.
#![no_main]

use libfuzzer_sys::fuzz_target;
use preshard::load::header;
use safetensors::SafeTensors;

fuzz_target!(|data: &[u8]| {
    let Some((first, rest)) = data.split_first_chunk::<8>() else { return };
    let length = match header::json_bytes(*first, data.len() as u64) {
        Ok(length) => length as usize,
        Err(message) => return check(&message),
    };
    let tensors = match header::parse(&rest[..length], (rest.len() - length) as u64) {
        Ok(tensors) => tensors,
        Err(message) => return check(&message),
    };
    let theirs = SafeTensors::deserialize(data).expect("safetensors refuses what the loader accepts");
    assert_eq!(theirs.len(), tensors.len());
    for (name, t) in &tensors {
        let view = theirs.tensor(name).expect("the same names");
        assert_eq!(view.dtype(), t.dtype);
        assert_eq!(view.shape().iter().map(|n| *n as u64).collect::<Vec<_>>(), t.shape);
        assert_eq!(view.data().len() as u64, t.data_offsets[1] - t.data_offsets[0]);
        let at = view.data().as_ptr() as usize - rest[length..].as_ptr() as usize;
        assert!(view.data().is_empty() || at as u64 == t.data_offsets[0]);
    }
});

fn check(message: &str) {
    assert!(!message.chars().any(char::is_control), "control bytes in {message:?}");
}
