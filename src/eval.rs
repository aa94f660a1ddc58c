//! The bytes of one leaf of one rank's file: a pure function of plan and source.
//!
//! Any thread, any machine, any order gives the same bytes. Everything else rests on this: resume by
//! leaf, verification against the source, output that does not depend on the thread count.

use crate::error::{Error, Result};
use crate::forms::{Form, Piece};
use crate::gguf::{Gguf, Tensor};
use crate::hash::leaf_range;
use crate::plan::Plan;
use crate::plan::shard::{Band, Fill, ShardPlan};
use crate::plan::tensors::{Order, Swap, Values, View};
use crate::quant::{Float, GgmlType, TYPES};
use std::ops::Range;

/// What decodes blocks: the CPU, or a GPU behind the same call.
pub struct Decoder<'a> {
    /// Decodes whole blocks: `(type, blocks, to, out)`, with `out` of exactly their elements.
    pub run: &'a DecodeFn<'a>,
    /// Bytes of output worth one call: rows that are cut are gathered into calls of about this size.
    pub batch: usize,
}

/// A function that decodes whole blocks.
pub type DecodeFn<'a> = dyn Fn(&GgmlType, &[u8], Float, &mut [u8]) -> Result<()> + Sync + 'a;

impl Decoder<'static> {
    /// The CPU. Small batches stay in its cache.
    pub const CPU: Decoder<'static> = Decoder { run: &decode_cpu, batch: 128 << 10 };
}

fn decode_cpu(ty: &GgmlType, blocks: &[u8], to: Float, out: &mut [u8]) -> Result<()> {
    ty.decode(blocks, to, out);
    Ok(())
}

/// Evaluates leaves of a plan.
pub struct Evaluator<'a> {
    /// The plan.
    pub plan: &'a Plan,
    /// The source it was made for.
    pub gguf: &'a Gguf,
    /// What decodes blocks.
    pub decoder: &'a Decoder<'a>,
    /// Go on when a decoded value is NaN or infinite.
    pub allow_nonfinite: bool,
}

/// What [`Evaluator::leaf`] found besides the bytes.
#[derive(Debug, Default, PartialEq)]
pub struct Findings {
    /// Index of a tensor in the shard, and its non-finite blocks that start in this leaf.
    pub nonfinite: Vec<(usize, u64)>,
}

/// Where in the source a leaf's first sourced byte lies: file and offset. Leaves in this order read
/// each stretch of the source once, whatever the number of ranks.
pub fn source_order(gguf: &Gguf, shard: &ShardPlan, leaf: u64) -> (usize, u64) {
    let range = leaf_range(leaf, shard.bytes);
    let first = shard.tensors.partition_point(|t| t.offset + t.bytes <= range.start);
    for tensor in shard.tensors[first..].iter().take_while(|t| t.offset < range.end) {
        let from = range.start.saturating_sub(tensor.offset);
        let first = tensor.bands.partition_point(|b| b.start + b.bytes() <= from);
        for band in &tensor.bands[first..] {
            if let Fill::Packed(view) | Fill::Recoded(view, ..) | Fill::Float(view, _) = &band.fill {
                let t = &gguf.tensors()[view.tensor];
                let row = from.saturating_sub(band.start) / band.width.max(1);
                let stored = match view.order {
                    Order::Transposed => 0,
                    _ => view.rows.start + row,
                };
                let matrix = view.matrix * rows_of(t) + stored;
                return (t.file, t.offset + matrix * t.ty.row_bytes(t.ne[0]).unwrap_or(0));
            }
        }
    }
    (0, 0)
}

/// Rows of one matrix of a tensor.
fn rows_of(t: &Tensor) -> u64 {
    // A vector's elements are rows of one column.
    if t.ne.len() == 1 { t.ne[0] } else { t.ne[1] }
}

/// Columns of one matrix of a tensor.
fn cols_of(t: &Tensor) -> u64 {
    if t.ne.len() == 1 { 1 } else { t.ne[0] }
}

impl Evaluator<'_> {
    /// Fills `out` with the bytes of a leaf.
    pub fn leaf(&self, shard: &ShardPlan, leaf: u64, out: &mut Vec<u8>) -> Result<Findings> {
        self.bytes(shard, leaf_range(leaf, shard.bytes), out)
    }

    /// Fills `out` with a range of a file's bytes. Its ends are multiples of 4, or the file's end: no
    /// element is cut.
    pub fn bytes(&self, shard: &ShardPlan, range: Range<u64>, out: &mut Vec<u8>) -> Result<Findings> {
        out.resize((range.end - range.start) as usize, 0);
        let mut findings = Findings::default();
        let header = shard.header.len() as u64;
        if range.start < header {
            let end = header.min(range.end);
            out[..(end - range.start) as usize]
                .copy_from_slice(&shard.header[range.start as usize..end as usize]);
        }
        let first = shard.tensors.partition_point(|t| t.offset + t.bytes <= range.start);
        for (i, tensor) in
            shard.tensors.iter().enumerate().skip(first).take_while(|(_, t)| t.offset < range.end)
        {
            let wanted = range.start.max(tensor.offset) - tensor.offset
                ..range.end.min(tensor.offset + tensor.bytes) - tensor.offset;
            let first = tensor.bands.partition_point(|b| b.start + b.bytes() <= wanted.start);
            let mut nonfinite = 0;
            for band in tensor.bands[first..].iter().take_while(|b| b.start < wanted.end) {
                let (a, b) = (wanted.start.max(band.start), wanted.end.min(band.start + band.bytes()));
                let at = (tensor.offset + a - range.start) as usize;
                let out = &mut out[at..at + (b - a) as usize];
                nonfinite += self.band(band, a - band.start..b - band.start, out)?;
            }
            if nonfinite > 0 {
                findings.nonfinite.push((i, nonfinite));
            }
        }
        Ok(findings)
    }

    /// The elements of a view in `to`, row by row, whatever they are.
    pub fn values(&self, view: &View, to: Float) -> Result<Vec<u8>> {
        let bytes = (view.rows.end - view.rows.start) * (view.cols.end - view.cols.start) * to.size() as u64;
        let mut out = vec![0; bytes as usize];
        self.float(view, to, 0..bytes, &mut out)?;
        Ok(out)
    }

    /// Bytes `range` of a band; returns the non-finite blocks that start there.
    fn band(&self, band: &Band, range: Range<u64>, out: &mut [u8]) -> Result<u64> {
        match &band.fill {
            Fill::Zero => {
                out.fill(0);
                Ok(0)
            }
            Fill::Bytes(bytes) => {
                out.copy_from_slice(&bytes[range.start as usize..range.end as usize]);
                Ok(0)
            }
            Fill::Packed(view) => Ok(self.packed(view, band.width, range, out)),
            Fill::Recoded(view, form, piece, to) => self.recoded(view, form, *piece, *to, range, out),
            Fill::Float(view, to) => self.float(view, *to, range, out),
        }
    }

    /// Blocks as they are. Rows narrower than the band's width are padded with zeros.
    fn packed(&self, view: &View, width: u64, range: Range<u64>, out: &mut [u8]) -> u64 {
        let tensor = &self.gguf.tensors()[view.tensor];
        let data = self.gguf.data(tensor);
        let (block, bytes) = (tensor.ty.block, tensor.ty.bytes);
        let stride = cols_of(tensor) / block * bytes;
        let skip = view.cols.start / block * bytes;
        let held = (view.cols.end - view.cols.start) / block * bytes;
        let base = view.matrix * rows_of(tensor) * stride + skip;
        if held == width && held == stride && view.order == Order::Rows && view.columns.is_none() {
            let start = base + view.rows.start * stride + range.start;
            out.copy_from_slice(&data[start as usize..start as usize + out.len()]);
            // Blocks are counted in the leaf where they start.
            let first = range.start.next_multiple_of(bytes);
            let end = range.end.next_multiple_of(bytes);
            let from = (base + view.rows.start * stride) as usize;
            return tensor.ty.count_nonfinite(&data[from + first as usize..from + end as usize]);
        }
        let mut nonfinite = 0;
        let mut at = range.start;
        while at < range.end {
            let (row, from) = (at / width, at % width);
            let to = width.min(from + range.end - at);
            let start = base + stored_row(view, row) * stride;
            let dst = &mut out[(at - range.start) as usize..(at - range.start + to - from) as usize];
            if let Some(swap) = &view.columns {
                nonfinite += swapped_blocks(
                    tensor.ty,
                    data,
                    (base - skip + stored_row(view, row) * stride, view.cols.start),
                    swap,
                    from..to,
                    held,
                    dst,
                );
                at += to - from;
                continue;
            }
            let real = held.clamp(from, to) - from;
            // A leaf may begin in the padding, past what the row holds and perhaps past the tensor.
            let src = (start + from.min(held)) as usize;
            dst[..real as usize].copy_from_slice(&data[src..src + real as usize]);
            dst[real as usize..].fill(0);
            let (a, b) = (from.next_multiple_of(bytes).min(held), to.next_multiple_of(bytes).min(held));
            nonfinite += tensor.ty.count_nonfinite(&data[(start + a) as usize..(start + b) as usize]);
            at += to - from;
        }
        nonfinite
    }

    /// Blocks in another form; returns the non-finite blocks that start there, which are counted with the codes.
    fn recoded(
        &self,
        view: &View,
        form: &Form,
        piece: Piece,
        to: Float,
        range: Range<u64>,
        out: &mut [u8],
    ) -> Result<u64> {
        let tensor = &self.gguf.tensors()[view.tensor];
        let (data, ty) = (self.gguf.data(tensor), tensor.ty);
        let blocks = (view.cols.end - view.cols.start) / ty.block;
        let (stride, skip) = (cols_of(tensor) / ty.block, view.cols.start / ty.block);
        let size = form.block_bytes(piece, ty);
        let mut cut = vec![0; size as usize];
        let mut nonfinite = 0;
        // Blocks of the band, counted over its rows. The leaf may cut the first and the last.
        for i in range.start / size..range.end.div_ceil(size) {
            let row = view.matrix * rows_of(tensor) + stored_row(view, i / blocks);
            let number = row * stride + skip + i % blocks;
            let block = &data[(number * ty.bytes) as usize..][..ty.bytes as usize];
            let (a, b) = (range.start.max(i * size), range.end.min((i + 1) * size));
            let dst = &mut out[(a - range.start) as usize..(b - range.start) as usize];
            let whole = b - a == size;
            form.encode(piece, ty, block, to, if whole { &mut *dst } else { &mut cut });
            if !whole {
                dst.copy_from_slice(&cut[(a - i * size) as usize..(b - i * size) as usize]);
            }
            if piece == Piece::Codes {
                nonfinite += if a == i * size { ty.count_nonfinite(block) } else { 0 };
            } else if !self.allow_nonfinite && count_nonfinite(to, dst) > 0 {
                let what = match ty.count_nonfinite(block) {
                    0 => "has a scale of more than the 65504 of f16; convert with --weights fast",
                    _ => {
                        "decodes to NaN or infinity (its scale is damaged); get a sound file, or pass \
                          --allow-nonfinite to convert it as it is"
                    }
                };
                return Err(Error::source(&tensor.name, format!("{} block {number} {what}", ty.name)));
            }
        }
        Ok(nonfinite)
    }

    /// Decoded or cast elements.
    fn float(&self, view: &View, to: Float, range: Range<u64>, out: &mut [u8]) -> Result<u64> {
        let tensor = &self.gguf.tensors()[view.tensor];
        let size = to.size() as u64;
        let elements = range.start / size..range.end / size;
        let width = view.cols.end - view.cols.start;
        let cols = cols_of(tensor);
        let base = view.matrix * rows_of(tensor) * cols;
        if view.values.is_some() {
            return self.changed(view, to, range, out);
        }
        match view.order {
            _ if view.columns.is_some() => self.swapped(tensor, view, to, &elements, out)?,
            Order::Rows if width == cols => {
                self.run(tensor, base + view.rows.start * cols + elements.start, to, out)?;
            }
            Order::Transposed => self.transposed(tensor, view, to, &elements, out)?,
            Order::Rows | Order::Interleaved(_) => {
                // The first and the last row may be cut by the leaf; those between are whole.
                let mut at = elements.start;
                while at < elements.end {
                    let (row, from) = (at / width, at % width);
                    let whole = if from == 0 { (elements.end - at) / width } else { 0 };
                    let (rows, n) =
                        if whole > 0 { (whole, width) } else { (1, (width - from).min(elements.end - at)) };
                    let first = view.cols.start + from;
                    let stored =
                        (row..row + rows).map(|r| view.matrix * rows_of(tensor) + stored_row(view, r));
                    let dst =
                        &mut out[((at - elements.start) * size) as usize..][..(rows * n * size) as usize];
                    let line = (n * size) as usize;
                    self.rows(tensor, stored, first..first + n, to, |i, values| {
                        dst[i * line..(i + 1) * line].copy_from_slice(values);
                    })?;
                    at += rows * n;
                }
            }
        }
        self.check_finite(tensor, view, to, elements.start, out)
    }

    /// Consecutive elements of a tensor, from element `first` on, as many as `out` holds.
    fn run(&self, tensor: &Tensor, first: u64, to: Float, out: &mut [u8]) -> Result<()> {
        let ty = tensor.ty;
        let data = self.gguf.data(tensor);
        let size = to.size();
        let blocks = |b: Range<u64>| &data[(b.start * ty.bytes) as usize..(b.end * ty.bytes) as usize];
        let end = first + (out.len() / size) as u64;
        // Whole blocks go straight to their place, cut ones through a buffer.
        let (inner, last) = (first.div_ceil(ty.block), end / ty.block);
        if inner > last {
            return self.part(ty, blocks(last..last + 1), (first - last * ty.block) as usize, to, out);
        }
        let head = ((inner * ty.block - first) as usize) * size;
        let tail = ((last * ty.block - first) as usize) * size;
        if head > 0 {
            let skip = ty.block as usize - head / size;
            self.part(ty, blocks(inner - 1..inner), skip, to, &mut out[..head])?;
        }
        if inner < last {
            (self.decoder.run)(ty, blocks(inner..last), to, &mut out[head..tail])?;
        }
        if tail < out.len() {
            self.part(ty, blocks(last..last + 1), 0, to, &mut out[tail..])?;
        }
        Ok(())
    }

    /// Some elements of one block.
    fn part(&self, ty: &GgmlType, block: &[u8], skip: usize, to: Float, out: &mut [u8]) -> Result<()> {
        let mut buffer = vec![0; ty.block as usize * to.size()];
        (self.decoder.run)(ty, block, to, &mut buffer)?;
        let start = skip * to.size();
        out.copy_from_slice(&buffer[start..start + out.len()]);
        Ok(())
    }

    /// Columns `cols` of stored rows (counted over all matrices of the tensor): `sink` gets each row's
    /// number in the list and its decoded values.
    fn rows(
        &self,
        tensor: &Tensor,
        rows: impl Iterator<Item = u64>,
        cols: Range<u64>,
        to: Float,
        mut sink: impl FnMut(usize, &[u8]),
    ) -> Result<()> {
        let (ty, data, size) = (tensor.ty, self.gguf.data(tensor), to.size());
        let stride = (cols_of(tensor) / ty.block * ty.bytes) as usize;
        // The blocks that hold these columns, and where in their elements the columns begin.
        let (first, last) = (cols.start / ty.block, cols.end.div_ceil(ty.block));
        let packed_row = ((last - first) * ty.bytes) as usize;
        let row = ((last - first) * ty.block) as usize * size;
        let held =
            (cols.start - first * ty.block) as usize * size..(cols.end - first * ty.block) as usize * size;
        let batch = (self.decoder.batch / row).max(1);
        let mut packed = Vec::new();
        let mut values = Vec::new();
        let mut rows = rows.enumerate().peekable();
        while let Some((number, _)) = rows.peek().copied() {
            packed.clear();
            for (_, stored) in rows.by_ref().take(batch) {
                let start = stored as usize * stride + (first * ty.bytes) as usize;
                packed.extend_from_slice(&data[start..start + packed_row]);
            }
            values.resize(packed.len() / packed_row * row, 0);
            (self.decoder.run)(ty, &packed, to, &mut values)?;
            for (i, row) in values.chunks_exact(row).enumerate() {
                sink(number + i, &row[held.clone()]);
            }
        }
        Ok(())
    }

    /// Logical rows that are stored columns.
    fn transposed(
        &self,
        tensor: &Tensor,
        view: &View,
        to: Float,
        elements: &Range<u64>,
        out: &mut [u8],
    ) -> Result<()> {
        let size = to.size();
        let width = view.cols.end - view.cols.start;
        let rows = elements.start / width..elements.end.div_ceil(width);
        // Within one logical row, only the columns wanted; the first and last of several may be cut,
        // and what lies outside is decoded for nothing.
        let one = rows.end - rows.start == 1;
        let cols = if one { elements.start % width..(elements.end - 1) % width + 1 } else { 0..width };
        let skip = if one { 0 } else { (elements.start - rows.start * width) as usize };
        let span = (cols.end - cols.start) as usize;
        let stored = cols.map(|col| view.matrix * rows_of(tensor) + view.cols.start + col);
        let columns = view.rows.start + rows.start..view.rows.start + rows.end;
        self.rows(tensor, stored, columns, to, |col, values| {
            for (row, value) in values.chunks_exact(size).enumerate() {
                if let Some(at) = (row * span + col).checked_sub(skip)
                    && let Some(dst) = out.get_mut(at * size..(at + 1) * size)
                {
                    dst.copy_from_slice(value);
                }
            }
        })
    }

    /// Columns that are swapped in blocks: whole rows are decoded, and what is wanted of them taken.
    fn swapped(
        &self,
        tensor: &Tensor,
        view: &View,
        to: Float,
        elements: &Range<u64>,
        out: &mut [u8],
    ) -> Result<()> {
        let Some(swap) = &view.columns else { return Ok(()) };
        let size = to.size();
        let width = view.cols.end - view.cols.start;
        let rows = elements.start / width..elements.end.div_ceil(width);
        let first = view.matrix * rows_of(tensor);
        let stored = rows.clone().map(|row| first + stored_row(view, row));
        self.rows(tensor, stored, 0..cols_of(tensor), to, |i, values| {
            let row = (rows.start + i as u64) * width;
            for at in row.max(elements.start)..(row + width).min(elements.end) {
                let from = swap.stored(view.cols.start + at - row) as usize * size;
                let dst = (at - elements.start) as usize * size;
                out[dst..dst + size].copy_from_slice(&values[from..from + size]);
            }
        })
    }

    /// Elements whose values are changed, in f32, and rounded once.
    fn changed(&self, view: &View, to: Float, range: Range<u64>, out: &mut [u8]) -> Result<u64> {
        let Some(values) = view.values else { return Ok(0) };
        let tensor = &self.gguf.tensors()[view.tensor];
        let size = to.size() as u64;
        let single = Float::F32.size() as u64;
        let mut words = vec![0; out.len() / size as usize * single as usize];
        let stored = View { values: None, ..view.clone() };
        let wide = range.start / size * single..range.end / size * single;
        self.float(&stored, Float::F32, wide, &mut words)?;
        let mut bad = None;
        for (at, word) in words.as_chunks_mut::<4>().0.iter_mut().enumerate() {
            let value = f32::from_le_bytes(*word);
            let changed = match values {
                Values::Add(constant) => value + constant,
                // In f64, so that it is rounded to f32 once.
                Values::LogNegative => (-f64::from(value)).ln() as f32,
            };
            if !changed.is_finite() {
                bad.get_or_insert((at as u64 + range.start / size, value));
            }
            *word = changed.to_le_bytes();
        }
        if let Some((at, value)) = bad.filter(|_| !self.allow_nonfinite) {
            return Err(Error::source(
                &tensor.name,
                format!(
                    "value {at} is {value}, of which the original ({values:?} of it) is no number; get a sound file, \
                     or pass --allow-nonfinite to convert it as it is"
                ),
            ));
        }
        TYPES[0].decode(&words, to, out);
        Ok(count_nonfinite(to, out))
    }

    /// Refuses NaN and infinity among decoded values, unless allowed; counts them otherwise. A tensor
    /// that keeps its dtype is copied whatever it holds.
    fn check_finite(&self, tensor: &Tensor, view: &View, to: Float, first: u64, out: &[u8]) -> Result<u64> {
        let found = count_nonfinite(to, out);
        if found == 0 || self.allow_nonfinite || tensor.ty.same_float() == Some(to) {
            return Ok(found);
        }
        let at =
            out.chunks_exact(to.size()).position(|e| count_nonfinite(to, e) > 0).unwrap_or(0) as u64 + first;
        let width = view.cols.end - view.cols.start;
        let (row, col) = (at / width, view.cols.start + at % width);
        let (row, col) = match view.order {
            Order::Transposed => (col, view.rows.start + row),
            _ => (stored_row(view, row), view.columns.map_or(col, |swap| swap.stored(col))),
        };
        let element = (view.matrix * rows_of(tensor) + row) * cols_of(tensor) + col;
        if to == Float::F16
            && let Some(value) = self.finite(tensor, element)
        {
            return Err(Error::source(
                &tensor.name,
                format!("holds {value}, more than the 65504 of f16; convert with --weights bf16"),
            ));
        }
        let what = if tensor.ty.is_float() {
            "is NaN or infinite"
        } else {
            "decodes to NaN or infinity (its scale is damaged)"
        };
        Err(Error::source(
            &tensor.name,
            format!(
                "{} block {} {what}; get a sound file, or pass --allow-nonfinite to convert it as it is",
                tensor.ty.name,
                element / tensor.ty.block
            ),
        ))
    }

    /// An element of a tensor as f32, if it is finite.
    fn finite(&self, tensor: &Tensor, element: u64) -> Option<f32> {
        let (block, bytes) = (tensor.ty.block, tensor.ty.bytes);
        let start = (element / block * bytes) as usize;
        let mut values = vec![0; block as usize * 4];
        let source = &self.gguf.data(tensor)[start..start + bytes as usize];
        tensor.ty.decode(source, Float::F32, &mut values);
        let value = values.chunks_exact(4).nth((element % block) as usize)?;
        Some(f32::from_le_bytes(value.try_into().ok()?)).filter(|v| v.is_finite())
    }
}

/// Bytes `range` of a packed row of `held` bytes whose columns are swapped in blocks of whole ggml blocks; returns the
/// non-finite blocks that start there. `row`: where the stored row begins, and the first logical column.
fn swapped_blocks(
    ty: &GgmlType,
    data: &[u8],
    row: (u64, u64),
    swap: &Swap,
    range: Range<u64>,
    held: u64,
    out: &mut [u8],
) -> u64 {
    out.fill(0);
    let mut nonfinite = 0;
    let mut at = range.start;
    while at < range.end.min(held) {
        let (block, from) = (at / ty.bytes, at % ty.bytes);
        let to = ty.bytes.min(from + range.end - at);
        let stored = row.0 + swap.stored(row.1 + block * ty.block) / ty.block * ty.bytes;
        let src = &data[stored as usize..(stored + ty.bytes) as usize];
        let dst = (at - range.start) as usize;
        out[dst..dst + (to - from) as usize].copy_from_slice(&src[from as usize..to as usize]);
        if from == 0 {
            nonfinite += ty.count_nonfinite(src);
        }
        at += to - from;
    }
    nonfinite
}

/// The stored row of a view's logical row `row`, counted from the view's first.
fn stored_row(view: &View, row: u64) -> u64 {
    let row = view.rows.start + row;
    match view.order {
        // llama.cpp's `LlamaModel.permute` turns each head's rows [2][half] into [half][2].
        Order::Interleaved(head) => {
            let (h, j) = (row / head, row % head);
            h * head + 2 * (j % (head / 2)) + j / (head / 2)
        }
        Order::Rows | Order::Transposed => row,
    }
}

/// Elements of little-endian `bytes` whose exponent bits are all set.
fn count_nonfinite(float: Float, bytes: &[u8]) -> u64 {
    let count16 = |mask: u16| {
        bytes.chunks_exact(2).map(|b| u64::from(u16::from_le_bytes([b[0], b[1]]) & mask == mask)).sum()
    };
    match float {
        Float::Bf16 => count16(0x7f80),
        Float::F16 => count16(0x7c00),
        Float::F32 => bytes
            .chunks_exact(4)
            .map(|b| u64::from(u32::from_le_bytes([b[0], b[1], b[2], b[3]]) & 0x7f80_0000 == 0x7f80_0000))
            .sum(),
    }
}
