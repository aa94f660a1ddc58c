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

/// The decoder chosen for a plan.
pub enum Chosen {
    /// The CPU.
    Cpu,
    /// A GPU for some types, the CPU for the others.
    #[cfg(feature = "cuda")]
    Gpu {
        /// What decodes on it.
        batch: Box<crate::gpu::batch::Batch>,
        /// Ids of the types it decodes.
        types: Vec<u32>,
        /// Calls with less output than this stay on the CPU.
        least: usize,
    },
}

impl Chosen {
    /// Chooses the decoder for a plan; a GPU takes at most `memory` bytes of its own. `note` is told why a
    /// GPU that was there is not used.
    ///
    /// # Errors
    /// When a GPU was asked for and there is none.
    #[cfg(not(feature = "cuda"))]
    pub fn new(
        choice: Choice,
        _memory: u64,
        _plan: &Plan,
        _gguf: &Gguf,
        _note: &dyn Fn(&str),
    ) -> Result<Chosen> {
        match choice {
            Choice::Auto | Choice::Cpu => Ok(Chosen::Cpu),
            Choice::Cuda(_) => {
                Err(crate::Error::device("device", "this preshard was built without CUDA; use the CPU"))
            }
        }
    }

    /// Chooses the decoder for a plan; a GPU takes at most `memory` bytes of its own. `note` is told why a
    /// GPU that was there is not used.
    ///
    /// # Errors
    /// When a GPU was asked for and there is none.
    #[cfg(feature = "cuda")]
    pub fn new(choice: Choice, memory: u64, plan: &Plan, gguf: &Gguf, note: &dyn Fn(&str)) -> Result<Chosen> {
        use crate::gpu;

        /// Less than this to decode is done before a GPU is warm.
        const WORTH_A_LOOK: u64 = 2 << 30;
        /// A launch costs more than so few bytes of output.
        const SMALL: usize = 256 << 10;

        let batch = |ordinal| -> Result<gpu::batch::Batch> {
            let device = gpu::Device::open(ordinal)?;
            let memory = usize::try_from(memory).unwrap_or(usize::MAX);
            Ok(gpu::batch::Batch::new(gpu::decode::Decoder::new(&device), memory))
        };
        let decoded = decoded_types(plan, gguf);
        let total: u64 = decoded.iter().map(|(_, bytes)| bytes).sum();
        let types: Vec<_> = decoded.into_iter().map(|(ty, _)| ty).collect();
        match choice {
            Choice::Cpu => Ok(Chosen::Cpu),
            Choice::Cuda(ordinal) => Ok(Chosen::Gpu {
                batch: Box::new(batch(ordinal)?),
                types: types.iter().map(|t| t.id).collect(),
                least: 0,
            }),
            Choice::Auto if total < WORTH_A_LOOK || gpu::count().unwrap_or(0) == 0 => Ok(Chosen::Cpu),
            Choice::Auto => {
                let threads = std::thread::available_parallelism().map_or(1, |n| n.get());
                let measured =
                    batch(0).and_then(|b| Ok((b.benefit(&types, crate::quant::Float::Bf16, threads)?, b)));
                let (benefits, batch) = match measured {
                    Ok(measured) => measured,
                    Err(error) => {
                        note(&format!("{error}; decoding on the CPU"));
                        return Ok(Chosen::Cpu);
                    }
                };
                let types: Vec<u32> = benefits.iter().filter(|b| b.gpu_wins()).map(|b| b.ty.id).collect();
                if types.is_empty() {
                    return Ok(Chosen::Cpu);
                }
                Ok(Chosen::Gpu { batch: Box::new(batch), types, least: SMALL })
            }
        }
    }

    /// Runs `work` with the decoder.
    pub fn run<T>(&self, work: impl FnOnce(&Decoder) -> Result<T>) -> Result<T> {
        match self {
            Chosen::Cpu => work(&Decoder::CPU),
            #[cfg(feature = "cuda")]
            Chosen::Gpu { batch, types, least } => {
                let run =
                    |ty: &crate::quant::GgmlType, blocks: &[u8], to: crate::quant::Float, out: &mut [u8]| {
                        if types.contains(&ty.id) && out.len() >= *least {
                            batch.decode_host(ty, blocks, to, out)
                        } else {
                            (Decoder::CPU.run)(ty, blocks, to, out)
                        }
                    };
                work(&Decoder { run: &run, batch: 4 << 20 })
            }
        }
    }
}

/// Quantised types the plan decodes and a kernel can, with the bytes they decode to.
#[cfg(feature = "cuda")]
fn decoded_types(plan: &Plan, gguf: &Gguf) -> Vec<(&'static crate::quant::GgmlType, u64)> {
    use crate::plan::shard::Fill;
    let mut types: Vec<(&'static crate::quant::GgmlType, u64)> = Vec::new();
    for band in plan.shards.iter().flat_map(|s| &s.tensors).flat_map(|t| &t.bands) {
        let Fill::Float(view, _) = &band.fill else { continue };
        let ty = gguf.tensors()[view.tensor].ty;
        match types.iter_mut().find(|(t, _)| t.id == ty.id) {
            _ if !ty.is_quantised() || !crate::gpu::decode::has_kernel(ty) => {}
            Some((_, bytes)) => *bytes += band.bytes(),
            None => types.push((ty, band.bytes())),
        }
    }
    types
}
