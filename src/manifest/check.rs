//! What a manifest says, held against the rest of what it says.
//!
//! A directory is not trusted: a loader acts on every number here. Each check returns the first
//! contradiction as the detail of one message. What no other field bears out (the tool's version, the plan's
//! hash, wording) is said in `docs/security.md`; `preshard verify --source` recomputes it.

mod recoded;

use super::{FILE_NAME, Manifest, Member, SCHEMA, Shard, Tensor};
use crate::cut::{self, MAX_PARTS};
use crate::error::shown;
use crate::hash::{self, LEAF};
use crate::policy::{Mtp, SharedExperts, Weights, is_ordinary, spelled};
use crate::quant::{self, GgmlType};
use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::ops::Range;

type Checked = Result<(), String>;

/// The first contradiction, if there is one.
pub(super) fn problem(manifest: &Manifest) -> Option<String> {
    let all = || -> Checked {
        head(manifest)?;
        policy(manifest)?;
        files(manifest)?;
        let dropped = dropped(manifest)?;
        for (place, shard) in manifest.shards.iter().enumerate() {
            self::shard(manifest, place, shard, &dropped)
                .map_err(|detail| format!("{}: {detail}", shown(&shard.file)))?;
        }
        recoded::matrices(manifest)?;
        layers(manifest)?;
        ranks(manifest)
    };
    all().err()
}

/// Fails with `detail` unless `holds`.
fn expect(holds: bool, detail: impl FnOnce() -> String) -> Checked {
    if holds { Ok(()) } else { Err(detail()) }
}

/// Whether a file name stays in the directory and is no hidden or temporary file.
fn plain(name: &str) -> bool {
    !name.is_empty() && !name.starts_with('.') && !name.contains(['/', '\\', ':', '\0'])
}

fn is_hash(text: &str) -> bool {
    hash::from_hex(text).is_ok()
}

/// Schema, tool, plan, sources and model.
fn head(m: &Manifest) -> Checked {
    expect(m.schema == SCHEMA, || {
        format!("schema {}, expected {SCHEMA}: use the preshard that wrote it", m.schema)
    })?;
    expect(m.tool.starts_with("preshard "), || {
        format!("tool {:?}, expected preshard and its version", shown(&m.tool))
    })?;
    expect(is_hash(&m.plan), || format!("plan {:?}, expected 64 hex digits", shown(&m.plan)))?;
    expect(!m.sources.is_empty(), || "names no source".into())?;
    let mut names = HashSet::new();
    for source in &m.sources {
        let file = shown(&source.file);
        expect(plain(&source.file), || format!("source {file:?} is no plain file name"))?;
        expect(names.insert(&source.file), || format!("source {file:?} twice"))?;
        expect(source.bytes > 0, || format!("source {file:?} of 0 bytes"))?;
        expect(is_hash(&source.header_blake3), || {
            format!(
                "source {file:?}: header_blake3 {:?}, expected 64 hex digits",
                shown(&source.header_blake3)
            )
        })?;
    }
    expect(!m.model.architecture.is_empty() && !m.model.layout.is_empty(), || {
        "names no architecture or no layout".into()
    })?;
    let (rows, padded) = (m.model.vocab, m.model.vocab_padded);
    let fits = if is_ordinary(&m.policy.layout) { rows == padded } else { rows <= padded };
    expect(fits, || format!("a vocabulary of {rows} rows padded to {padded}"))
}

/// Parallelism, policies and the layout they were written for.
fn policy(m: &Manifest) -> Checked {
    let p = &m.policy;
    for (what, n) in [("tp", p.tp), ("pp", p.pp)] {
        expect((1..=MAX_PARTS).contains(&n), || format!("policy {what} {n}, expected 1 to {MAX_PARTS}"))?;
    }
    let limits = p.max_error.is_some() == p.weights.recodes() && p.max_error.is_none_or(|n| n <= 1_000_000);
    expect(limits, || {
        format!("policy max_error {:?} (millionths), with weights {}", p.max_error, spelled(p.weights))
    })?;
    expect(p.shared_experts != SharedExperts::Auto, || {
        "policy shared_experts \"auto\", expected fused or separate".into()
    })?;
    let fused = p.shared_experts == SharedExperts::Fused;
    expect(!fused || m.model.experts > 0 && !p.ep && !is_ordinary(&p.layout), || {
        "shared experts fused into experts that are placed whole, of an ordinary checkpoint, or not there"
            .into()
    })?;
    let ordinary = is_ordinary(&p.layout);
    // Engines are tables: any name may come. Those of ordinary checkpoints are called hf or hf-NAME.
    let plain = |name: &str| {
        !name.is_empty() && name.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_".contains(&b))
    };
    expect(plain(&p.layout), || {
        format!("policy layout {:?}, expected the name of an engine", shown(&p.layout))
    })?;
    expect(ordinary == is_ordinary(&m.model.layout), || {
        format!("policy layout {:?}, but the model's is {:?}", p.layout, shown(&m.model.layout))
    })?;
    expect(!ordinary || (p.tp, p.pp, p.ep) == (1, 1, false), || {
        format!("an ordinary checkpoint cut for {} stages of {} ranks", p.pp, p.tp)
    })?;
    let rising = p.stages.windows(2).all(|s| s[0] < s[1]);
    let ends = (p.stages.first(), p.stages.last()) == (Some(&0), Some(&m.model.layers));
    expect(p.stages.len() as u64 == p.pp + 1 && rising && ends, || {
        format!(
            "stages {} do not cut {} layers for {} pipeline stages",
            shown(&format!("{:?}", p.stages)),
            m.model.layers,
            p.pp
        )
    })
}

/// The names of all files, and the small files' hashes.
fn files(m: &Manifest) -> Checked {
    let mut names = HashSet::new();
    let small = m.files.iter().map(|f| &f.file);
    for file in m.shards.iter().map(|s| &s.file).chain(small) {
        expect(plain(file), || format!("file name {:?} leaves the directory", shown(file)))?;
        expect(names.insert(file), || format!("file name {:?} twice", shown(file)))?;
    }
    for file in &m.files {
        let name = shown(&file.file);
        expect(file.file != FILE_NAME && !file.file.ends_with(".safetensors"), || {
            format!("file {name:?} is listed among the small files")
        })?;
        expect(is_hash(&file.blake3), || {
            format!("file {name:?}: blake3 {:?}, expected 64 hex digits", shown(&file.blake3))
        })?;
    }
    expect(!m.shards.is_empty(), || "names no shard".into())
}

/// The GGUF tensors that were left out; none twice, none for a reason that the policy contradicts.
fn dropped(m: &Manifest) -> Result<HashSet<&str>, String> {
    let mut names = HashSet::new();
    for d in &m.dropped {
        let name = shown(&d.tensor);
        expect(!d.tensor.is_empty() && !d.reason.is_empty(), || {
            format!("dropped tensor {name:?}: no name or no reason")
        })?;
        expect(names.insert(d.tensor.as_str()), || format!("dropped tensor {name} twice"))?;
        agrees(m, &d.reason).map_err(|detail| format!("dropped tensor {name}: {detail}"))?;
    }
    Ok(names)
}

/// A reason that quotes an option quotes it as the policy has it.
fn agrees(m: &Manifest, reason: &str) -> Checked {
    let p = &m.policy;
    for (option, value) in [
        ("--weights ", spelled(p.weights)),
        ("--indexer ", spelled(p.indexer)),
        ("--mtp ", spelled(p.mtp)),
        ("--shared-experts ", spelled(p.shared_experts)),
        ("--misaligned ", spelled(p.misaligned)),
        ("--mixed ", spelled(p.mixed)),
    ] {
        let quoted = reason
            .split(option)
            .nth(1)
            .map(|rest| rest.split(|c: char| !c.is_ascii_alphanumeric()).next().unwrap_or_default());
        expect(quoted.is_none_or(|quoted| quoted == value), || {
            format!("{:?}, but the policy is {option}{value}", shown(reason))
        })?;
    }
    Ok(())
}

/// One shard: its name and place, its hashes, what it holds.
fn shard(m: &Manifest, place: usize, s: &Shard, dropped: &HashSet<&str>) -> Checked {
    let p = &m.policy;
    expect(matches!(s.part.as_str(), "model" | "mtp"), || {
        format!("part {:?}, expected model or mtp", shown(&s.part))
    })?;
    expect(s.pp < p.pp && s.tp < p.tp, || {
        format!("stage {}, rank {} of {} stages of {} ranks", s.pp, s.tp, p.pp, p.tp)
    })?;
    let last = s.pp + 1 == p.pp;
    let draft = s.part == "mtp";
    expect(!draft || last, || format!("the draft on stage {}, expected the last of {}", s.pp, p.pp))?;
    let ordinary = is_ordinary(&p.layout);
    expect(!draft || !ordinary && p.mtp != Mtp::Drop, || {
        "a draft, which neither an ordinary checkpoint nor --mtp drop has".into()
    })?;
    expect(draft || p.mtp != Mtp::Only, || "part model, though --mtp only has the draft alone".into())?;
    let (files, number) = (m.shards.len(), place + 1);
    let name = match (ordinary, draft, p.pp) {
        (true, ..) if files == 1 => "model.safetensors".into(),
        (true, ..) => format!("model-{number:05}-of-{files:05}.safetensors"),
        // The names of another engine's files stand in its table, which a loader does not have.
        _ if p.layout != "vllm" => s.file.clone(),
        (false, true, _) if p.mtp == Mtp::Keep => format!("mtp-rank-{}-part-0.safetensors", s.tp),
        (false, true, _) | (false, false, 1) => format!("model-rank-{}-part-0.safetensors", s.tp),
        (false, false, _) => format!("model-pp-{}-tp-{}-part-0.safetensors", s.pp, s.tp),
    };
    expect(s.file == name, || {
        format!("part {} of stage {}, rank {}, whose file is called {name}", s.part, s.pp, s.tp)
    })?;
    hashes(s)?;
    let experts = match (ordinary, p.ep) {
        (true, _) => 0..0,
        (false, false) => 0..m.model.experts,
        (false, true) => cut::experts(m.model.experts, p.tp, s.tp),
    };
    expect(s.experts.iter().copied().eq(experts.clone()), || {
        format!("its experts are not {}..{}, those of rank {}", experts.start, experts.end, s.tp)
    })?;
    let vocab = match ordinary || !(s.pp == 0 || last) {
        true => None,
        false => cut::vocab_rows(m.model.vocab, m.model.vocab_padded, p.tp, s.tp)
            .map(|(rows, _)| [rows.start, rows.end]),
    };
    expect(s.vocab_rows == vocab, || {
        let text = |rows: Option<[u64; 2]>| rows.map_or_else(|| "none".into(), |rows| format!("{rows:?}"));
        format!("vocab_rows {}, expected {} for rank {} of {}", text(s.vocab_rows), text(vocab), s.tp, p.tp)
    })?;
    let mut names = BTreeSet::new();
    for t in &s.tensors {
        expect(!t.name.is_empty() && names.insert(&t.name), || {
            format!("a tensor twice or without a name: {:?}", shown(&t.name))
        })?;
    }
    let mut end = s.data_start;
    for t in &s.tensors {
        let named = |detail: String| format!("tensor {}: {detail}", shown(&t.name));
        expect(t.offset == end, || named(format!("starts at {}, expected {end}", t.offset)))?;
        end = match end.checked_add(t.bytes) {
            Some(end) if end <= s.bytes => end,
            _ => return Err(named("ends past the file".into())),
        };
        tensor(m, s, t, experts.end - experts.start, dropped).map_err(named)?;
        for alias in &t.aliases {
            expect(!alias.is_empty() && names.insert(alias), || {
                named(format!("alias {:?} is the name of another", shown(alias)))
            })?;
        }
    }
    expect(end == s.bytes, || format!("tensors end at {end}, the file at {}", s.bytes))?;
    let data = s.bytes - s.data_start;
    expect(!ordinary || s.tensors.len() < 2 || data <= p.max_file_size, || {
        format!("{data} bytes of tensors, but max_file_size is {}", p.max_file_size)
    })
}

/// Length, start of the data, and the leaves' hashes.
fn hashes(s: &Shard) -> Checked {
    expect(s.bytes >= 8 && s.data_start >= 8 && s.data_start.is_multiple_of(4096), || {
        "data starts at no multiple of 4096".into()
    })?;
    expect(s.leaves.len() as u64 == s.bytes.div_ceil(LEAF), || {
        format!("{} leaf hashes for {} bytes", s.leaves.len(), s.bytes)
    })?;
    let leaves = s.leaves.iter().map(|l| hash::from_hex(l)).collect::<crate::Result<Vec<_>>>();
    let leaves = leaves.map_err(|_| "a leaf hash that is none".to_owned())?;
    expect(hash::from_hex(&s.blake3).is_ok_and(|h| h == hash::fold(&leaves, s.bytes)), || {
        "its leaf hashes do not fold to its hash".into()
    })
}

/// One tensor of a shard that holds `experts` experts.
fn tensor(m: &Manifest, s: &Shard, t: &Tensor, experts: u64, dropped: &HashSet<&str>) -> Checked {
    if let Some(recoded) = &t.recoded {
        return recoded::tensor(m, s, t, recoded, dropped);
    }
    let weights = m.policy.weights;
    let element: u64 = match (t.dtype.as_str(), weights) {
        ("F32", _) => 4,
        ("BF16", Weights::Keep | Weights::Bf16 | Weights::Fast) => 2,
        ("F16", Weights::F16 | Weights::FastF16) => 2,
        ("U8", Weights::Keep) => 1,
        _ => return Err(format!("dtype {}, with --weights {}", shown(&t.dtype), spelled(weights))),
    };
    let product = |shape: &[u64]| shape.iter().try_fold(1u64, |n, d| n.checked_mul(*d));
    let bytes = product(&t.shape).and_then(|n| n.checked_mul(element));
    expect(bytes == Some(t.bytes), || format!("{} {:?} in {} bytes", t.dtype, t.shape, t.bytes))?;
    if let Some(logical) = &t.logical {
        let outer = |shape: &[u64]| shape.split_last().map(|(_, rest)| rest.to_vec());
        expect(t.dtype == "U8" && t.shape.len() >= 2 && outer(logical) == outer(&t.shape), || {
            format!("{} {:?} packed for a logical shape {logical:?}", t.dtype, t.shape)
        })?;
    }
    // A draft may count its layers from 0, and an ordinary checkpoint calls those `mtp`.
    let counted = |name: &str| {
        let draft = s.part == "mtp" && name == t.name || name.starts_with("mtp.");
        layer(name).map(|l| if draft && l < m.model.layers { l + m.model.layers } else { l })
    };
    let mut layers = counted(&t.name).into_iter().collect::<Vec<_>>();
    let stacked = t.members.iter().any(|member| member.hf.contains("{E}"));
    let mut end = 0;
    let mut quantised = false;
    let mut smallest: u64 = element;
    let mut widest = 0;
    for member in &t.members {
        let named = |detail: String| format!("member {}: {detail}", shown(&member.hf));
        expect(member.rows[0] == end && member.rows[1] >= end, || {
            named(format!("rows {:?}, expected to start at {end}", member.rows))
        })?;
        end = member.rows[1];
        let types = sources(member, dropped).map_err(named)?;
        quantised |= types.iter().any(|ty| ty.is_quantised());
        expect(member.hf.contains("{E}") == stacked, || {
            named("of a stack and of one tensor, {E} standing for every expert".into())
        })?;
        layers.extend(counted(&member.hf));
        layers.extend(member.from.iter().filter_map(|name| layer(name)));
        let row_bytes =
            t.logical.as_ref().map(|l| packed_row(&types, l[l.len() - 1])).transpose().map_err(named)?;
        expect(member.row_bytes == row_bytes, || {
            let text = |n: Option<u64>| n.map_or_else(|| "none".into(), |n| n.to_string());
            named(format!("row_bytes {}, expected {}", text(member.row_bytes), text(row_bytes)))
        })?;
        widest = widest.max(row_bytes.unwrap_or(0));
        smallest = types.first().filter(|_| t.logical.is_some()).map_or(element, |ty| ty.bytes);
    }
    let rows = t.shape.get(usize::from(stacked)).copied();
    match (&t.logical, t.members.is_empty()) {
        (Some(_), true) => return Err("packed, but without members".into()),
        // Scalars that the engine wants, and the types of packed members.
        (None, true) => expect(t.dtype == "U8" || t.shape.is_empty(), || {
            format!("{} {:?} without members", t.dtype, t.shape)
        })?,
        (packed, false) => {
            expect(rows == Some(end), || format!("shape {:?}, but its members end at row {end}", t.shape))?;
            expect(packed.is_some() == (t.dtype == "U8"), || {
                format!("{}, but {} packed", t.dtype, if packed.is_some() { "it is" } else { "not" })
            })?;
            expect(packed.is_none() || t.shape.last() == Some(&widest), || {
                format!("shape {:?}, but its widest member has {widest} bytes in a row", t.shape)
            })?;
            // A shared expert that is fused comes after them.
            let stack = experts + u64::from(m.policy.shared_experts == SharedExperts::Fused);
            expect(!stacked || t.shape[0] == stack, || {
                format!("shape {:?}, but the shard holds {stack} experts", t.shape)
            })?;
        }
    }
    expect(t.decoded.is_some() == (quantised && t.logical.is_none()), || match &t.decoded {
        Some(why) => format!("decoded ({}), but no packed source is", shown(why)),
        None => "decoded from packed sources without a reason".into(),
    })?;
    expect(t.decoded.as_deref() != Some(""), || "decoded without a reason".into())?;
    t.decoded.as_ref().map_or(Ok(()), |why| agrees(m, why))?;
    let one = t.members.len() == 1 && t.members[0].hf == t.name;
    expect(!is_ordinary(&m.policy.layout) || one, || {
        "in an ordinary checkpoint, but not made of the tensor of its name".into()
    })?;
    expect(t.nonfinite <= t.bytes / smallest.max(1) && (t.nonfinite == 0 || !t.members.is_empty()), || {
        format!("{} NaN or infinities in {} bytes", t.nonfinite, t.bytes)
    })?;
    belongs(m, s, &layers)?;
    vocabulary(m, t)
}

/// The ggml types of a member's sources, none of which was dropped. Zeros have no source.
fn sources(member: &Member, dropped: &HashSet<&str>) -> Result<Vec<&'static GgmlType>, String> {
    let (from, types) = (&member.from, &member.types);
    expect(from.len() == types.len() && !member.hf.is_empty(), || {
        format!("{} sources of {} types", from.len(), types.len())
    })?;
    if let Some(name) = from.iter().find(|name| name.is_empty() || dropped.contains(name.as_str())) {
        return Err(format!("source {:?} is dropped or has no name", shown(name)));
    }
    let known = |name: &String| {
        let found = quant::TYPES.iter().find(|ty| ty.name == name && !ty.is_integer() && !ty.is_activation());
        found.ok_or_else(|| format!("type {:?}, expected a float or quantised ggml type", shown(name)))
    };
    types.iter().map(known).collect()
}

/// Bytes of one packed row of `cols` elements.
fn packed_row(types: &[&'static GgmlType], cols: u64) -> Result<u64, String> {
    let Some(ty) = types.first() else { return Err("packed, but without a source".into()) };
    let same = types.iter().all(|other| other.id == ty.id && other.is_quantised());
    expect(same && cols.is_multiple_of(ty.block), || {
        let names: BTreeSet<_> = types.iter().map(|ty| ty.name).collect();
        format!("rows of {cols} elements packed as {}", names.into_iter().collect::<Vec<_>>().join(", "))
    })?;
    (cols / ty.block).checked_mul(ty.bytes).ok_or_else(|| format!("rows of {cols} elements"))
}

/// The layer that a tensor's name counts: its first part that is a number.
fn layer(name: &str) -> Option<u64> {
    name.split('.').find(|part| part.bytes().all(|b| b.is_ascii_digit()) && !part.is_empty())?.parse().ok()
}

/// The layers that a shard of the trunk may hold, or the first of a draft.
fn range(m: &Manifest, s: &Shard) -> Range<u64> {
    let stages = &m.policy.stages;
    match (s.part.as_str(), m.policy.layout.as_str()) {
        ("mtp", _) => m.model.layers..u64::MAX,
        // An ordinary checkpoint holds the draft as the layers after the trunk.
        (_, layout) if is_ordinary(layout) && m.policy.mtp == Mtp::Keep => 0..u64::MAX,
        _ => stages[s.pp as usize]..stages[s.pp as usize + 1],
    }
}

/// All names of a tensor speak of one layer, and it is one of the shard's.
fn belongs(m: &Manifest, s: &Shard, layers: &[u64]) -> Checked {
    let Some(&first) = layers.first() else { return Ok(()) };
    expect(layers.iter().all(|layer| *layer == first), || {
        let all: BTreeSet<_> = layers.iter().map(u64::to_string).collect();
        format!("made of layers {}", all.into_iter().collect::<Vec<_>>().join(", "))
    })?;
    let range = range(m, s);
    expect(range.contains(&first), || {
        let end = if range.end == u64::MAX { String::new() } else { (range.end - 1).to_string() };
        format!("of layer {first}, but the shard is for layers {}-{end}", range.start)
    })
}

/// The matrices over the vocabulary have its rows: all of them, or the rank's share of the padded ones.
fn vocabulary(m: &Manifest, t: &Tensor) -> Checked {
    for member in &t.members {
        if !matches!(member.hf.as_str(), "model.embed_tokens.weight" | "lm_head.weight") {
            continue;
        }
        let rows = member.rows[1] - member.rows[0];
        let share =
            m.model.vocab_padded.is_multiple_of(m.policy.tp).then(|| m.model.vocab_padded / m.policy.tp);
        expect(share == Some(rows) || rows == m.model.vocab, || {
            format!(
                "{rows} rows of a vocabulary of {}, padded to {}, over {} ranks",
                m.model.vocab, m.model.vocab_padded, m.policy.tp
            )
        })?;
    }
    Ok(())
}

/// Every layer of a stage is in its shards.
fn layers(m: &Manifest) -> Checked {
    let mut held: BTreeMap<(u64, u64), BTreeSet<u64>> = BTreeMap::new();
    for s in m.shards.iter().filter(|s| s.part == "model") {
        let names = s.tensors.iter().flat_map(|t| t.members.iter().map(|member| &member.hf).chain([&t.name]));
        held.entry((s.pp, s.tp)).or_default().extend(names.filter_map(|name| layer(name)));
    }
    for ((pp, tp), held) in held {
        let wanted = m.policy.stages[pp as usize]..m.policy.stages[pp as usize + 1];
        let found = held.range(wanted.clone()).count() as u64;
        let missing = wanted.end - wanted.start - found;
        expect(missing == 0, || {
            format!(
                "{missing} of layers {} to {} in no file of stage {pp}, rank {tp}",
                wanted.start,
                wanted.end - 1
            )
        })?;
    }
    Ok(())
}

/// All ranks of a stage hold the same tensors, of the same sources, in the same shapes.
fn ranks(m: &Manifest) -> Checked {
    if is_ordinary(&m.policy.layout) {
        return Ok(());
    }
    let mut firsts: BTreeMap<(&str, u64), &Shard> = BTreeMap::new();
    let mut expected: BTreeMap<(&str, u64, &str), &Tensor> = BTreeMap::new();
    for s in &m.shards {
        let mut new = false;
        let first = *firsts.entry((&s.part, s.pp)).or_insert_with(|| {
            new = true;
            s
        });
        if new {
            expected.extend(s.tensors.iter().map(|t| ((s.part.as_str(), s.pp, t.name.as_str()), t)));
            continue;
        }
        let differs = |what: String| format!("{}: {what} as in {}", shown(&s.file), shown(&first.file));
        expect(s.tensors.len() == first.tensors.len(), || {
            differs(format!("{} tensors, expected {}", s.tensors.len(), first.tensors.len()))
        })?;
        for t in &s.tensors {
            let name = shown(&t.name);
            let Some(other) = expected.get(&(&s.part, s.pp, &t.name)) else {
                return Err(differs(format!("tensor {name}: not")));
            };
            // Experts placed whole need not come out even.
            let skip = usize::from(m.policy.ep && t.members.iter().any(|member| member.hf.contains("{E}")));
            let shape = |t: &Tensor| t.shape.get(skip..).map(<[u64]>::to_vec);
            let same = (&t.dtype, shape(t), &t.members, &t.decoded, &t.aliases)
                == (&other.dtype, shape(other), &other.members, &other.decoded, &other.aliases);
            expect(same, || differs(format!("tensor {name}: dtype, shape, members, reason or aliases not")))?;
        }
    }
    Ok(())
}
