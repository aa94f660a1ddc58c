//! Where packed weights are decoded: the CPU, or a GPU for the types that it decodes faster.

use crate::error::Result;
use crate::eval::Decoder;
use crate::gguf::Gguf;
use crate::plan::Plan;

/// Where decoding runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Choice {
    /// A GPU for the types that one decodes faster, else the CPU.
    Auto,
    /// The CPU.
    Cpu,
    /// The GPU of this number.
    Cuda(usize),
}

/// `auto`, `cpu`, `cuda` or `cuda:N`.
pub fn parse(text: &str) -> std::result::Result<Choice, String> {
    match text {
        "auto" => Ok(Choice::Auto),
        "cpu" => Ok(Choice::Cpu),
        "cuda" => Ok(Choice::Cuda(0)),
        _ => text
            .strip_prefix("cuda:")
            .and_then(|n| n.parse().ok())
            .map(Choice::Cuda)
            .ok_or_else(|| "expected auto, cpu, cuda or cuda:N".to_owned()),
    }
}

/// Runs `work` with the decoder chosen; `note` is told why a GPU that was there is not used.
#[cfg(not(feature = "cuda"))]
pub fn with<T>(
    choice: Choice,
    _memory: u64,
    _plan: &Plan,
    _gguf: &Gguf,
    _note: &dyn Fn(&str),
    work: impl FnOnce(&Decoder) -> Result<T>,
) -> Result<T> {
    match choice {
        Choice::Auto | Choice::Cpu => work(&Decoder::CPU),
        Choice::Cuda(_) => {
            Err(crate::Error::device("device", "this preshard was built without CUDA; use the CPU"))
        }
    }
}

/// Runs `work` with the decoder chosen; `note` is told why a GPU that was there is not used.
#[cfg(feature = "cuda")]
pub fn with<T>(
    choice: Choice,
    memory: u64,
    plan: &Plan,
    gguf: &Gguf,
    note: &dyn Fn(&str),
    work: impl FnOnce(&Decoder) -> Result<T>,
) -> Result<T> {
    use crate::gpu;
    use crate::quant::Float;

    /// Less than this to decode is done before a GPU is warm.
    const WORTH_A_LOOK: u64 = 2 << 30;

    let types = decoded_types(plan, gguf);
    let total: u64 = types.iter().map(|(_, bytes)| bytes).sum();
    let batch = |ordinal| -> Result<gpu::batch::Batch> {
        let device = gpu::Device::open(ordinal)?;
        Ok(gpu::batch::Batch::new(
            gpu::decode::Decoder::new(&device),
            usize::try_from(memory).unwrap_or(usize::MAX),
        ))
    };
    // Not on the GPU when it is a choice: a launch costs more than so few bytes of output.
    const SMALL: usize = 256 << 10;
    let decode =
        |batch: &gpu::batch::Batch, on: &[u32], small: usize, work: &dyn Fn(&Decoder) -> Result<T>| {
            let run = |ty: &crate::quant::GgmlType, blocks: &[u8], to: Float, out: &mut [u8]| match on
                .contains(&ty.id)
                && out.len() >= small
            {
                true => batch.decode_host(ty, blocks, to, out),
                false => (Decoder::CPU.run)(ty, blocks, to, out),
            };
            work(&Decoder { run: &run, batch: 4 << 20 })
        };
    // A closure that may be called once, behind one that may be called again.
    let work = std::cell::Cell::new(Some(work));
    let once = |decoder: &Decoder| match work.take() {
        Some(work) => work(decoder),
        None => unreachable!("a run has one decoder"),
    };
    let every: Vec<u32> = types.iter().map(|(ty, _)| ty.id).collect();
    match choice {
        Choice::Cpu => once(&Decoder::CPU),
        Choice::Cuda(ordinal) => decode(&batch(ordinal)?, &every, 0, &once),
        Choice::Auto if total < WORTH_A_LOOK || gpu::count().unwrap_or(0) == 0 => once(&Decoder::CPU),
        Choice::Auto => {
            let quantised: Vec<_> = types.iter().map(|(ty, _)| *ty).filter(|t| t.is_quantised()).collect();
            let threads = std::thread::available_parallelism().map_or(1, |n| n.get());
            let measured =
                batch(0).and_then(|b| Ok((b.benefit(&quantised, Float::Bf16, threads, false)?, b)));
            match measured {
                Ok((benefits, batch)) => {
                    let on: Vec<u32> = benefits.iter().filter(|b| b.gpu_wins()).map(|b| b.ty.id).collect();
                    match on.is_empty() {
                        true => once(&Decoder::CPU),
                        false => decode(&batch, &on, SMALL, &once),
                    }
                }
                Err(error) => {
                    note(&format!("{error}; decoding on the CPU"));
                    once(&Decoder::CPU)
                }
            }
        }
    }
}

/// Quantised types the plan decodes, with the bytes they decode to.
#[cfg(feature = "cuda")]
fn decoded_types(plan: &Plan, gguf: &Gguf) -> Vec<(&'static crate::quant::GgmlType, u64)> {
    use crate::plan::shard::Fill;
    let mut types: Vec<(&'static crate::quant::GgmlType, u64)> = Vec::new();
    for band in plan.shards.iter().flat_map(|s| &s.tensors).flat_map(|t| &t.bands) {
        let Fill::Float(view, _) = &band.fill else { continue };
        let ty = gguf.tensors()[view.tensor].ty;
        match types.iter_mut().find(|(t, _)| t.id == ty.id) {
            _ if !ty.is_quantised() => {}
            Some((_, bytes)) => *bytes += band.bytes(),
            None => types.push((ty, band.bytes())),
        }
    }
    types
}
