//! Runs a plan: leaves in parallel, hashes in the flow, a journal, and nothing visible before the end.

use crate::error::{Error, Result};
use crate::eval::{Decoder, Evaluator, source_order};
use crate::gguf::Gguf;
use crate::hash::LEAF;
use crate::hash::{self, leaf_range};
use crate::journal::{Journal, Record, Records};
use crate::manifest::{self, Manifest};
use crate::plan::Plan;
use crate::plan::shard::ShardPlan;
use crate::source_pages::{Place, SourcePages};
use crate::store::{Output, ShardFile, Work};
use crate::sync;
use crate::workers;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard};
use std::time::{Duration, UNIX_EPOCH};

const INDEX: &str = "model.safetensors.index.json";

/// What a run writes between two syncs unless told otherwise, in bytes: what a kill may cost.
pub const CHECKPOINT_BYTES: u64 = 2 << 30;
/// It syncs at least this often.
const CHECKPOINT_TIME: Duration = Duration::from_secs(10);

/// How to run a plan; none of it changes the bytes.
pub struct Settings<'a> {
    /// Global ranks (`stage * tp + rank`) to write; all when absent.
    pub ranks: Option<Vec<u64>>,
    /// Threads; 0 for one per core.
    pub threads: usize,
    /// Host memory for buffers, in bytes.
    pub memory: u64,
    /// Bytes after which to sync and journal, [`CHECKPOINT_BYTES`] but for tests.
    pub checkpoint: u64,
    /// Replace an earlier conversion.
    pub force: bool,
    /// Go on when decoded values are NaN or infinite.
    pub allow_nonfinite: bool,
    /// What decodes blocks.
    pub decoder: &'a Decoder<'a>,
    /// Files to write beside the shards: name and bytes.
    pub files: Vec<(String, Vec<u8>)>,
    /// The class the engine builds, for the manifest.
    pub class: String,
    /// Told the bytes finished, as they are, and the total once.
    pub progress: &'a (dyn Fn(Progress) + Sync),
    /// Set when the run is to stop at the next leaf.
    pub stop: &'a AtomicBool,
}

/// What a run reports as it goes.
#[derive(Clone, Copy, Debug)]
pub enum Progress {
    /// The run begins: bytes to write in all, of which an earlier run wrote some.
    Start {
        /// All bytes of the shards asked for.
        total: u64,
        /// Bytes already there.
        done: u64,
    },
    /// So many more bytes are written.
    Wrote(u64),
    /// Everything is written; waiting for the disk.
    Syncing,
}

/// What a finished run did.
pub struct Outcome {
    /// The manifest written.
    pub manifest: Manifest,
    /// Bytes written by this run.
    pub written: u64,
    /// Bytes an earlier run of the same plan had written.
    pub resumed: u64,
}

/// One leaf to do.
struct Job {
    /// Where its source begins: file and offset.
    source: Place,
    shard: usize,
    leaf: u64,
}

/// Converts.
pub fn run(plan: &Plan, gguf: &Gguf, out: &Path, settings: &Settings) -> Result<Outcome> {
    let shards = select(plan, settings.ranks.as_deref())?;
    let names: Vec<(String, u64)> = shards.iter().map(|s| (s.name.clone(), s.bytes)).collect();
    let total: u64 = shards.iter().map(|s| s.bytes).sum();
    let fresh = !out.join(crate::store::PARTIAL).exists();
    let small = small_files(plan, settings.files.clone());
    let whole = plan.with_files(&small);
    let work = Work { plan: &whole, key: &key(&whole, gguf), shards: &names };
    if !settings.force
        && let Some(manifest) = Output::whole(out, &work)?
    {
        return Ok(Outcome { manifest, written: 0, resumed: total });
    }
    let (output, journal, records) = Output::open(out, &work, settings.force)?;
    let done: u64 = shards
        .iter()
        .flat_map(|s| (0..hash::leaves(s.bytes)).map(move |l| (s, l)))
        .filter(|(s, l)| records.contains_key(&(s.name.clone(), *l)))
        .map(|(s, l)| leaf_range(l, s.bytes))
        .map(|r| r.end - r.start)
        .sum();
    let result = output.check_space(total - done).and_then(|()| {
        (settings.progress)(Progress::Start { total, done });
        let files = shards.iter().map(|s| output.shard(&s.name, s.bytes)).collect::<Result<Vec<_>>>()?;
        output.sync_names()?;
        let run = Run {
            plan,
            gguf,
            settings,
            shards: &shards,
            files,
            written: Mutex::default(),
            due: Condvar::new(),
            pages: SourcePages::new(gguf),
            checkpoint: settings.checkpoint,
        };
        let records = run.all(journal, records);
        run.pages.finish();
        records
    });
    match result {
        Ok(records) => {
            (settings.progress)(Progress::Syncing);
            if let Err(e) = gguf.unchanged() {
                // Some leaves are of the old source, some of the new: nobody may go on from them.
                output.discard();
                return Err(e);
            }
            let manifest = manifest(plan, gguf, settings, &small, &shards, &records, output.earlier.as_ref());
            for (name, bytes) in &small {
                output.small_file(name, bytes)?;
            }
            output.finish(&manifest)?;
            Ok(Outcome { manifest, written: total - done, resumed: done })
        }
        // What the source or the room forbids will fail again: leave nothing behind.
        Err(e @ (Error::Source(..) | Error::Output(..))) if fresh => {
            output.discard();
            Err(e)
        }
        Err(e) => Err(e),
    }
}

/// A run may resume only if the plan and the sources' modification times are unchanged; the plan covers
/// only the headers of the sources.
fn key(plan: &[u8; 32], gguf: &Gguf) -> [u8; 32] {
    let mut hasher = blake3::Hasher::new_derive_key("preshard journal key 1");
    hasher.update(plan);
    for file in gguf.files() {
        let modified = file.modified().and_then(|t| t.duration_since(UNIX_EPOCH).ok());
        hasher.update(&modified.map_or(0, |t| t.as_nanos()).to_le_bytes());
    }
    *hasher.finalize().as_bytes()
}

/// The shards of the ranks asked for.
fn select<'p>(plan: &'p Plan, ranks: Option<&[u64]>) -> Result<Vec<&'p ShardPlan>> {
    let world = plan.policy.tp * plan.policy.pp;
    let Some(ranks) = ranks else { return Ok(plan.shards.iter().collect()) };
    if let Some(rank) = ranks.iter().find(|r| **r >= world) {
        return Err(Error::request("--ranks", format!("rank {rank} of {world}; the last is {}", world - 1)));
    }
    Ok(plan.shards.iter().filter(|s| ranks.contains(&(s.pp * plan.policy.tp + s.tp))).collect())
}

/// Everything the workers share.
struct Run<'a> {
    plan: &'a Plan,
    gguf: &'a Gguf,
    settings: &'a Settings<'a>,
    shards: &'a [&'a ShardPlan],
    files: Vec<ShardFile>,
    written: Mutex<Written>,
    /// Wakes the thread that syncs.
    due: Condvar,
    pages: SourcePages<'a>,
    /// Bytes after which to sync.
    checkpoint: u64,
}

/// Leaves written and not yet synced.
#[derive(Default)]
struct Written {
    leaves: Vec<(usize, u64, Record)>,
    bytes: u64,
    /// No more will come.
    closed: bool,
    /// Syncing failed, and the run is to end. After a failed sync the kernel may drop what it could not
    /// write and call the next sync a success: nothing may be journalled any more.
    failed: bool,
}

/// Tells the syncer that no more leaves will come.
struct Close<'a>(&'a Run<'a>);

impl Drop for Close<'_> {
    fn drop(&mut self) {
        self.0.written().closed = true;
        self.0.due.notify_one();
    }
}

impl Run<'_> {
    /// Runs every leaf that is not in `done` yet; returns all of them.
    fn all(&self, mut journal: Journal, mut done: Records) -> Result<Records> {
        let jobs = self.jobs(&done);
        let threads = workers::count(self.settings.threads, self.settings.memory);
        let evaluator = Evaluator {
            plan: self.plan,
            gguf: self.gguf,
            decoder: self.settings.decoder,
            allow_nonfinite: self.settings.allow_nonfinite,
        };
        let stop = self.settings.stop;
        // What is done is kept, also when the run fails: the same command goes on from there.
        let (result, synced) = std::thread::scope(|scope| {
            let syncer = scope.spawn(|| self.sync_as_written(&mut journal, &mut done));
            let result = {
                // Closed also when a worker panics: the scope waits for the syncer.
                let _closed = Close(self);
                workers::each(threads, &jobs, stop, |job, buffer| self.one(&evaluator, job, buffer))
            };
            (result, sync::join(syncer))
        });
        // When syncing failed, the workers ended only because of that.
        synced.and(result)?;
        if stop.load(Ordering::Relaxed) {
            return Err(Error::Interrupted("stopped; the same command goes on where it left off".into()));
        }
        Ok(done)
    }

    fn written(&self) -> MutexGuard<'_, Written> {
        sync::lock(&self.written)
    }

    /// Leaves still to do, in the order of their source.
    fn jobs(&self, done: &Records) -> Vec<Job> {
        let mut jobs = Vec::new();
        for (shard, plan) in self.shards.iter().enumerate() {
            for leaf in 0..hash::leaves(plan.bytes) {
                if !done.contains_key(&(plan.name.clone(), leaf)) {
                    let source = source_order(self.gguf, plan, leaf);
                    jobs.push(Job { source, shard, leaf });
                }
            }
        }
        jobs.sort_by_key(|j| (j.source, j.shard, j.leaf));
        jobs
    }

    fn one(&self, evaluator: &Evaluator, job: &Job, buffer: &mut Vec<u8>) -> Result<()> {
        self.pages.begin(job.source);
        let shard = self.shards[job.shard];
        let findings = evaluator.leaf(shard, job.leaf, buffer)?;
        self.pages.end(job.source);
        let hash = hash::leaf(buffer, job.leaf, shard.bytes);
        self.files[job.shard].write(buffer, job.leaf * LEAF)?;
        let bytes = buffer.len() as u64;
        {
            let mut written = self.written();
            if written.failed {
                return Err(Error::Interrupted("stopped".into()));
            }
            written.leaves.push((job.shard, job.leaf, Record { hash, nonfinite: findings.nonfinite }));
            written.bytes += bytes;
            if written.bytes >= self.checkpoint {
                self.due.notify_one();
            }
        }
        (self.settings.progress)(Progress::Wrote(bytes));
        Ok(())
    }

    /// Syncs what is written, every so often and at the end, then says so in the journal.
    fn sync_as_written(&self, journal: &mut Journal, done: &mut Records) -> Result<()> {
        loop {
            let (leaves, last) = {
                let written = self.written();
                let waiting = |w: &mut Written| w.bytes < self.checkpoint && !w.closed;
                let mut written = sync::wait_while(&self.due, written, CHECKPOINT_TIME, waiting);
                written.bytes = 0;
                (std::mem::take(&mut written.leaves), written.closed)
            };
            let result = self.checkpoint(journal, done, leaves, last);
            if result.is_err() {
                self.written().failed = true;
            }
            if last || result.is_err() {
                return result;
            }
        }
    }

    /// Syncs some written leaves, then records them. The last time, every file is synced.
    fn checkpoint(
        &self,
        journal: &mut Journal,
        done: &mut Records,
        leaves: Vec<(usize, u64, Record)>,
        last: bool,
    ) -> Result<()> {
        let mut touched: Vec<usize> = if last {
            (0..self.files.len()).collect()
        } else {
            leaves.iter().map(|(shard, ..)| *shard).collect()
        };
        touched.sort_unstable();
        touched.dedup();
        if touched.is_empty() {
            return Ok(());
        }
        for shard in touched {
            self.files[shard].sync()?;
        }
        let named: Vec<_> = leaves
            .into_iter()
            .map(|(shard, leaf, record)| (self.shards[shard].name.clone(), leaf, record))
            .collect();
        journal.append(&named)?;
        done.extend(named.into_iter().map(|(name, leaf, record)| ((name, leaf), record)));
        Ok(())
    }
}

/// The files beside the shards: those given, and the index of an ordinary checkpoint; sorted by name.
pub(crate) fn small_files(plan: &Plan, mut files: Vec<(String, Vec<u8>)>) -> Vec<(String, Vec<u8>)> {
    if !plan.engine.sharded() && plan.shards.len() > 1 {
        let mut map = serde_json::Map::new();
        let mut tensors: Vec<_> =
            plan.shards.iter().flat_map(|s| s.tensors.iter().map(move |t| (&t.name, &s.name))).collect();
        tensors.sort();
        for (tensor, file) in tensors {
            map.insert(tensor.clone(), file.clone().into());
        }
        let total: u64 = plan.shards.iter().flat_map(|s| &s.tensors).map(|t| t.bytes).sum();
        let index = serde_json::json!({ "metadata": { "total_size": total }, "weight_map": map });
        files.push((INDEX.into(), format!("{index:#}\n").into_bytes()));
    }
    files.sort();
    files
}

/// The manifest of a finished run, together with ranks written before.
fn manifest(
    plan: &Plan,
    gguf: &Gguf,
    settings: &Settings,
    small: &[(String, Vec<u8>)],
    shards: &[&ShardPlan],
    records: &Records,
    earlier: Option<&Manifest>,
) -> Manifest {
    let mut all: Vec<_> = shards.iter().map(|s| shard_record(s, records)).collect();
    all.extend(earlier.into_iter().flat_map(|m| m.shards.clone()));
    let place = |file: &str| plan.shards.iter().position(|s| s.name == file);
    all.sort_by_key(|s| place(&s.file));
    let files = small.iter().map(|(file, bytes)| manifest::SmallFile {
        file: file.clone(),
        bytes: bytes.len() as u64,
        blake3: blake3::hash(bytes).to_hex().to_string(),
    });
    let name = |path: &Path| path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    Manifest {
        schema: manifest::SCHEMA,
        tool: format!("preshard {}", env!("CARGO_PKG_VERSION")),
        plan: hash::to_hex(&plan.with_files(small)),
        sources: gguf
            .files()
            .iter()
            .map(|f| manifest::Source {
                file: name(&f.path),
                bytes: f.size,
                header_blake3: hash::to_hex(&f.header_hash),
            })
            .collect(),
        model: manifest::Model {
            architecture: plan.architecture.clone(),
            class: settings.class.clone(),
            layout: plan.layout.clone(),
            layers: plan.model.symbols.trunk,
            vocab: plan.vocab[0],
            vocab_padded: plan.vocab[1],
            experts: plan.model.symbols.experts,
        },
        policy: plan.policy.clone(),
        shards: all,
        files: files.collect(),
        dropped: plan
            .dropped()
            .into_iter()
            .map(|d| manifest::Dropped {
                tensor: gguf.tensors()[d.tensor].name.clone(),
                reason: d.reason.clone(),
            })
            .collect(),
    }
}

fn shard_record(shard: &ShardPlan, records: &Records) -> manifest::Shard {
    let records: Vec<&Record> =
        (0..hash::leaves(shard.bytes)).filter_map(|l| records.get(&(shard.name.clone(), l))).collect();
    let leaves: Vec<[u8; 32]> = records.iter().map(|r| r.hash).collect();
    let mut entry = shard.entry();
    entry.blake3 = hash::to_hex(&hash::fold(&leaves, shard.bytes));
    entry.leaves = leaves.iter().map(hash::to_hex).collect();
    for (tensor, n) in records.iter().flat_map(|r| &r.nonfinite) {
        if let Some(tensor) = entry.tensors.get_mut(*tensor) {
            tensor.nonfinite += n;
        }
    }
    entry
}
