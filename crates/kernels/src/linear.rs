//! Weight matrices and their products with rows of activations.

use crate::act::{Acts, GROUP};
use crate::dtype::{Arith, DType, Group};
use crate::exec::Exec;
use crate::float_panel::{self, FloatJob};
use crate::isa::Isa;
use crate::memory::Memory;
use crate::pack::{Packing, Segment};
use crate::panel::{self, Panel, PanelJob, SIDE, WideGroup};
use crate::pool::SharedMut;
use crate::simd::LANES;
use bytes::Bytes;
use std::alloc::Layout;
use std::sync::OnceLock;

/// How a format is packed and multiplied; a static beside the format.
pub struct PanelFormat {
    block_bytes: usize,
    segments: &'static [Segment],
    packing: OnceLock<Packing>,
    run: unsafe fn(Isa, &PanelJob),
}

impl PanelFormat {
    pub(crate) const fn new<P: Panel>(segments: &'static [Segment]) -> PanelFormat {
        PanelFormat { block_bytes: P::BYTES / LANES, segments, packing: OnceLock::new(), run: panel::run::<P> }
    }

    pub(crate) fn packing(&self) -> &Packing {
        self.packing.get_or_init(|| Packing::new(self.block_bytes, self.segments))
    }
}

/// A weight matrix `[rows, cols]`: as the file stores it, or packed.
pub struct Matrix {
    dtype: DType,
    rows: usize,
    cols: usize,
    data: Data,
}

enum Data {
    /// Row after row of blocks.
    Stored(Bytes),
    /// Panel after panel of 16 rows; the last one is filled up with zero rows.
    Packed(Memory),
}

/// What a [`Matrix`] is made from.
pub struct MatrixSource {
    /// The format of `bytes`.
    pub dtype: DType,
    /// Output features.
    pub rows: usize,
    /// Input features: a whole number of blocks.
    pub cols: usize,
    /// The rows, one after the other.
    pub bytes: Bytes,
    /// Row of the source that becomes row i; `None`: row i.
    pub order: Option<Vec<u32>>,
}

impl Matrix {
    /// Takes a matrix as it is stored, or packs it (in parallel) where `pack` is set and the format has a packing.
    /// Packed or not, products are the same bit for bit.
    ///
    /// # Panics
    /// If the bytes do not match the shape, or the order is not one of its rows.
    pub fn new(exec: &Exec, source: MatrixSource, pack: bool) -> Matrix {
        let MatrixSource { dtype, rows, cols, bytes, order } = source;
        let row_bytes = dtype.row_bytes(cols).expect("columns are whole blocks");
        assert_eq!(bytes.len(), rows * row_bytes, "{dtype:?} matrix of {rows} x {cols}");
        if let Some(order) = &order {
            assert!(order.len() == rows && order.iter().all(|&r| (r as usize) < rows), "an order of {rows} rows");
        }
        let row = |i: usize| &bytes[order.as_ref().map_or(i, |o| o[i] as usize) * row_bytes..][..row_bytes];
        let data = if pack && can_pack(dtype) {
            let panel_bytes = row_bytes * LANES;
            let bytes = rows.div_ceil(LANES) * panel_bytes;
            let mut packed = exec.arena.zeroed(bytes).unwrap_or_else(|| no_memory(bytes));
            let parts = SharedMut::new(&mut packed);
            exec.pool.for_each(rows.div_ceil(LANES), &|p| {
                // SAFETY: each panel is one task's.
                let panel = unsafe { parts.slice(p * panel_bytes, panel_bytes) };
                let n = LANES.min(rows - p * LANES);
                let mut some = [&[][..]; LANES];
                some[..n].iter_mut().zip(p * LANES..).for_each(|(some, i)| *some = row(i));
                pack_panel(dtype, &some[..n], panel);
            });
            Data::Packed(packed)
        } else if order.is_some() {
            Data::Stored((0..rows).flat_map(|i| row(i).iter().copied()).collect::<Vec<u8>>().into())
        } else {
            Data::Stored(bytes)
        };
        Matrix { dtype, rows, cols, data }
    }

    /// Takes a matrix in memory of its own, which [`Matrix::into_bytes`] gives back. `is_packed`: it was by
    /// [`pack_in_place`]; otherwise it is used as it is stored.
    ///
    /// # Panics
    /// If the bytes are not [`packed_bytes`].
    pub fn owned(dtype: DType, [rows, cols]: [usize; 2], bytes: Vec<u8>, is_packed: bool) -> Matrix {
        let row_bytes = dtype.row_bytes(cols).expect("columns are whole blocks");
        assert_eq!(bytes.len(), packed_bytes(rows, row_bytes), "{dtype:?} matrix of {rows} x {cols}");
        let is_packed = is_packed && can_pack(dtype);
        let data = if is_packed { Data::Packed(Memory::Heap(bytes)) } else { Data::Stored(bytes.into()) };
        Matrix { dtype, rows, cols, data }
    }

    /// The memory of a matrix that [`Matrix::owned`] made.
    pub fn into_bytes(self) -> Vec<u8> {
        match self.data {
            Data::Packed(bytes) => bytes.into_vec(),
            Data::Stored(bytes) => bytes.into(),
        }
    }

    /// Output features.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Input features.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// The weights' format.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Whether the bytes were rearranged into memory of their own.
    pub fn is_packed(&self) -> bool {
        matches!(self.data, Data::Packed(_))
    }

    /// Bytes that a product with it reads.
    pub fn bytes(&self) -> usize {
        match &self.data {
            Data::Stored(b) => b.len(),
            Data::Packed(b) => b.len(),
        }
    }

    /// Row `i` as f32: `out.len() == cols`.
    pub fn row(&self, i: usize, out: &mut [f32]) {
        let format = self.dtype.format();
        let row_bytes = self.row_bytes();
        match &self.data {
            Data::Stored(bytes) => (format.dequantize)(&bytes[i * row_bytes..][..row_bytes], out),
            Data::Packed(bytes) => {
                let panel = &bytes[i / LANES * row_bytes * LANES..][..row_bytes * LANES];
                let mut block = [0u8; 256];
                let block = &mut block[..format.block_bytes];
                let panels = panel.chunks_exact(format.block_bytes * LANES);
                for (panel, out) in panels.zip(out.chunks_exact_mut(format.block_len)) {
                    unpack_row(self.dtype, panel, i % LANES, block);
                    (format.dequantize)(block, out);
                }
            }
        }
    }

    fn row_bytes(&self) -> usize {
        self.dtype.row_bytes(self.cols).expect("checked when the matrix was made")
    }
}

/// What a vector does when memory ends.
fn no_memory(bytes: usize) -> ! {
    std::alloc::handle_alloc_error(Layout::array::<u8>(bytes).expect("matrices fit the address space"))
}

fn can_pack(dtype: DType) -> bool {
    let format = dtype.format();
    format.arith == Arith::Float || format.panel.is_some()
}

/// Makes a panel of up to 16 stored rows; lanes without a row stay as they are.
fn pack_panel(dtype: DType, rows: &[&[u8]], panel: &mut [u8]) {
    let format = dtype.format();
    match format.panel {
        Some(p) => p.packing().pack_panel(rows, panel),
        None => {
            let size = format.block_bytes;
            for (i, out) in panel.chunks_exact_mut(size * LANES).enumerate() {
                for (out, row) in out.chunks_exact_mut(size).zip(rows) {
                    out.copy_from_slice(&row[i * size..(i + 1) * size]);
                }
            }
        }
    }
}

/// Bytes of a matrix of `rows` rows of `row_bytes` each with room to be packed in place.
pub fn packed_bytes(rows: usize, row_bytes: usize) -> usize {
    rows.next_multiple_of(LANES) * row_bytes
}

/// Packs a matrix where it is, on this thread alone. `bytes`: its rows, one after the other, and room behind them:
/// [`packed_bytes`]. `scratch` is work memory. Does nothing for formats without a packing.
///
/// # Panics
/// If there is no such room.
pub fn pack_in_place(dtype: DType, rows: usize, bytes: &mut [u8], scratch: &mut Vec<u8>) {
    if !can_pack(dtype) || rows == 0 {
        return;
    }
    let row_bytes = bytes.len() / rows.next_multiple_of(LANES);
    assert_eq!(bytes.len(), packed_bytes(rows, row_bytes), "room for {rows} rows in whole panels");
    for (p, panel) in bytes.chunks_exact_mut(row_bytes * LANES).enumerate() {
        let n = LANES.min(rows - p * LANES);
        scratch.clear();
        scratch.extend_from_slice(&panel[..n * row_bytes]);
        if n < LANES {
            panel.fill(0);
        }
        let mut some = [&[][..]; LANES];
        some.iter_mut().zip(scratch.chunks_exact(row_bytes)).for_each(|(some, row)| *some = row);
        pack_panel(dtype, &some[..n], panel);
    }
}

/// One block of lane `lane`, as stored.
fn unpack_row(dtype: DType, panel: &[u8], lane: usize, block: &mut [u8]) {
    match dtype.format().panel {
        Some(p) => p.packing().unpack_row(panel, lane, block),
        None => block.copy_from_slice(&panel[lane * block.len()..][..block.len()]),
    }
}

/// `out = acts * weight^T + bias`, for all activation rows or the gathered ones.
pub struct Product<'a> {
    /// `[n, cols]`.
    pub weight: &'a Matrix,
    /// `[n]`.
    pub bias: Option<&'a [f32]>,
    /// `[act rows, cols]`, quantized if the weight's format is.
    pub acts: &'a Acts,
    /// Activation row of each output row; `None`: all of them in order.
    pub gather: Option<&'a [u32]>,
    /// `[rows, n]`.
    pub out: &'a mut [f32],
}

/// Computes products that do not depend on one another, in one parallel step.
///
/// # Panics
/// If shapes do not match, or a format needs quantized activations that are not there.
pub fn matmul(exec: &Exec, products: &mut [Product]) {
    let tasks: usize = products.iter().map(Product::tasks).sum();
    for p in products.iter() {
        p.check();
    }
    let parts: &[Product] = products;
    exec.pool.for_each(tasks, &|mut task| {
        for p in parts {
            if task < p.tasks() {
                // SAFETY: each task writes columns of its own; the outputs are borrowed mutably by `products`.
                return unsafe { p.run(exec.isa, task) };
            }
            task -= p.tasks();
        }
    });
}

/// Activation rows that stay in the cache while the panels of a task pass over them.
const ROW_CHUNK: usize = 60;

impl Product<'_> {
    fn rows(&self) -> usize {
        self.gather.map_or(self.acts.rows(), <[u32]>::len)
    }

    /// Tasks are groups of [`SIDE`] panels.
    fn tasks(&self) -> usize {
        self.weight.rows.div_ceil(LANES * SIDE)
    }

    fn check(&self) {
        let w = self.weight;
        assert_eq!(self.acts.cols(), w.cols, "activations are as wide as the weight");
        assert_eq!(self.out.len(), self.rows() * w.rows, "outputs of {} rows by {}", self.rows(), w.rows);
        assert!(self.bias.is_none_or(|b| b.len() == w.rows), "one bias an output");
        if w.dtype.format().arith.is_integer() {
            assert!(!self.acts.blocks().is_empty() || self.rows() == 0, "{:?} takes quantized activations", w.dtype);
        }
    }

    /// # Safety
    /// No other task with this number runs, and nothing else uses the outputs.
    unsafe fn run(&self, isa: Isa, task: usize) {
        let first = task * SIDE;
        let n_panels = SIDE.min(self.weight.rows.div_ceil(LANES) - first);
        let width = (n_panels * LANES).min(self.weight.rows - first * LANES);
        let rows = self.rows();
        for row in (0..rows).step_by(ROW_CHUNK) {
            let part = Part { product: self, isa, row, rows: ROW_CHUNK.min(rows - row) };
            // SAFETY: as this function.
            unsafe {
                match &self.weight.data {
                    Data::Packed(bytes) => part.packed(bytes, first, n_panels, width),
                    Data::Stored(bytes) => (0..n_panels).for_each(|p| part.stored(bytes, first + p)),
                }
                if let Some(bias) = self.bias {
                    part.add_bias(bias, first * LANES, width);
                }
            }
        }
    }
}

/// Some rows of a product.
struct Part<'a> {
    product: &'a Product<'a>,
    isa: Isa,
    row: usize,
    rows: usize,
}

impl Part<'_> {
    fn gather(&self) -> Option<&[u32]> {
        self.product.gather.map(|g| &g[self.row..self.row + self.rows])
    }

    /// First activation row, where rows are not gathered.
    fn first_act(&self) -> usize {
        if self.product.gather.is_some() { 0 } else { self.row }
    }

    /// Where output `col` of the part's first row goes.
    ///
    /// # Safety
    /// Nothing else may use the outputs that the caller writes through it.
    unsafe fn out(&self, col: usize) -> *mut f32 {
        // SAFETY: within the outputs, whose size `check` compared. They are reached through a shared reference to
        // the product, but `matmul` holds them mutably and tasks write disjoint columns.
        unsafe { self.product.out.as_ptr().cast_mut().add(self.row * self.product.weight.rows + col) }
    }

    /// # Safety
    /// As [`Product::run`].
    unsafe fn packed(&self, bytes: &[u8], first: usize, n_panels: usize, width: usize) {
        let w = self.product.weight;
        let panel_bytes = w.row_bytes() * LANES;
        let panels = &bytes[first * panel_bytes..][..n_panels * panel_bytes];
        let Some(format) = w.dtype.format().panel else {
            // SAFETY: these columns are this task's.
            return unsafe { self.float(w.dtype, panels, first * LANES, width, 0) };
        };
        // SAFETY: the outputs exist and these columns are this task's.
        unsafe { (format.run)(self.isa, &PanelJob { panels, n_panels, width, ..self.panel_job(first * LANES, 0) }) };
    }

    /// A job for outputs from `col` on, over columns from group `group` on; panels and width are to be filled in.
    ///
    /// # Safety
    /// As [`Part::out`].
    unsafe fn panel_job(&self, col: usize, group: usize) -> PanelJob<'_> {
        let act_stride = self.product.acts.cols() / GROUP;
        PanelJob {
            panels: &[],
            n_panels: 1,
            acts: &self.product.acts.blocks()[self.first_act() * act_stride..],
            act_stride,
            act_start: group,
            gather: self.gather(),
            rows: self.rows,
            // SAFETY: as this function.
            out: unsafe { self.out(col) },
            out_stride: self.product.weight.rows,
            width: 0,
            resume: group > 0,
        }
    }

    /// # Safety
    /// As [`Product::run`].
    unsafe fn float(&self, dtype: DType, panels: &[u8], col: usize, width: usize, start: usize) {
        let act_stride = self.product.acts.cols();
        let job = FloatJob {
            panels,
            n_panels: width.div_ceil(LANES),
            acts: &self.product.acts.values()[self.first_act() * act_stride..],
            act_stride,
            act_start: start,
            gather: self.gather(),
            rows: self.rows,
            // SAFETY: as this function.
            out: unsafe { self.out(col) },
            out_stride: self.product.weight.rows,
            width,
            resume: start > 0,
        };
        // SAFETY: the outputs exist and these columns are this task's.
        unsafe {
            match dtype {
                DType::F16 => float_panel::run::<float_panel::F16>(self.isa, &job),
                DType::BF16 => float_panel::run::<float_panel::BF16>(self.isa, &job),
                _ => float_panel::run::<float_panel::F32>(self.isa, &job),
            }
        }
    }

    /// Unpacks panel `p` piece by piece and multiplies each piece.
    ///
    /// # Safety
    /// As [`Product::run`].
    unsafe fn stored(&self, bytes: &[u8], p: usize) {
        const GROUPS: usize = 8;
        let w = self.product.weight;
        let (format, row_bytes) = (w.dtype.format(), w.row_bytes());
        let lanes = LANES.min(w.rows - p * LANES);
        let row = |lane: usize| &bytes[(p * LANES + lane) * row_bytes..][..row_bytes];
        let blocks_of = |cols: usize| cols / format.block_len * format.block_bytes;
        let mut start = 0;
        while start < w.cols {
            let cols = (GROUPS * GROUP).min(w.cols - start);
            let source = |lane| &row(lane)[blocks_of(start)..][..blocks_of(cols)];
            match format.unpack {
                Some(unpack) => {
                    let mut wide = [WideGroup::ZERO; GROUPS];
                    let mut groups = [Group::ZERO; GROUPS];
                    for lane in 0..lanes {
                        unpack(source(lane), &mut groups[..cols / GROUP]);
                        for (w, g) in wide.iter_mut().zip(&groups[..cols / GROUP]) {
                            w.set_row(lane, g);
                        }
                    }
                    // SAFETY: these columns are this task's.
                    unsafe {
                        let job = PanelJob {
                            panels: WideGroup::bytes(&wide[..cols / GROUP]),
                            width: lanes,
                            ..self.panel_job(p * LANES, start / GROUP)
                        };
                        panel::wide_kernel(format.arith)(self.isa, &job);
                    }
                }
                None => {
                    let mut wide = [[0f32; LANES]; GROUPS * GROUP];
                    let mut values = [0f32; GROUPS * GROUP];
                    for lane in 0..lanes {
                        (format.dequantize)(source(lane), &mut values[..cols]);
                        for (w, &v) in wide.iter_mut().zip(&values[..cols]) {
                            w[lane] = v;
                        }
                    }
                    // SAFETY: f32 are plain bytes; these columns are this task's.
                    unsafe {
                        let panel = std::slice::from_raw_parts(wide.as_ptr().cast::<u8>(), cols * LANES * 4);
                        self.float(DType::F32, panel, p * LANES, lanes, start);
                    }
                }
            }
            start += cols;
        }
    }

    /// # Safety
    /// As [`Product::run`].
    unsafe fn add_bias(&self, bias: &[f32], col: usize, width: usize) {
        for row in 0..self.rows {
            // SAFETY: as this function.
            let out = unsafe { self.out(col).add(row * self.product.weight.rows) };
            // SAFETY: `width` outputs of each row, this task's.
            let out = unsafe { std::slice::from_raw_parts_mut(out, width) };
            for (o, b) in out.iter_mut().zip(&bias[col..]) {
                *o += b;
            }
        }
    }
}
