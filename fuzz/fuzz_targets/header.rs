//! Any bytes as a safetensors file: what the loader's parser takes, the format's library takes too.
#![no_main]

use libfuzzer_sys::fuzz_target;
use preshard::load::header;
use safetensors::SafeTensors;

fuzz_target!(|file: &[u8]| {
    let Some((first, rest)) = file.split_first_chunk::<8>() else { return };
    let Ok(length) = header::json_bytes(*first, file.len() as u64) else { return };
    let (json, data) = rest.split_at(length as usize);
    let Ok(tensors) = header::parse(json, data.len() as u64) else { return };
    let theirs = SafeTensors::deserialize(file).expect("the library takes what we take");
    assert_eq!(theirs.len(), tensors.len());
    for (name, ours) in &tensors {
        let tensor = theirs.tensor(name).expect("the same names");
        assert_eq!(tensor.dtype(), ours.dtype);
        assert!(tensor.shape().iter().map(|n| *n as u64).eq(ours.shape.iter().copied()));
        let [begin, end] = ours.data_offsets;
        assert_eq!(tensor.data(), &data[begin as usize..end as usize]);
    }
});
