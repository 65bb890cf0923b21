//! Weights that are stored as floats, made smaller while they are loaded or converted.

use crate::checkpoint::Data;
use bytes::Bytes;
use puna_kernels::{Arith, DType, Pool, quantize};

/// Rows that a task reads at once: what is in memory as floats is this much a thread.
const ROWS: usize = 32;

/// The format that rows of `cols` of format `from` get where `wish` is asked for: itself; Q8_0 where they are not whole
/// blocks of it. `None`: they stay as they are, because they are quantized already or fit no block.
pub fn target(from: DType, wish: DType, cols: usize) -> Option<DType> {
    fitting(wish, cols).filter(|_| from.format().arith == Arith::Float)
}

/// The format that rows of `cols` can have where `wish` is asked for: itself, or Q8_0; `None` where both have blocks of
/// another length.
pub fn fitting(wish: DType, cols: usize) -> Option<DType> {
    [wish, DType::Q8_0].into_iter().find(|to| to.row_bytes(cols).is_some())
}

/// The rows of `data`, which are floats of format `from`, in format `to`.
pub fn quantize_rows(pool: &Pool, data: &Data, [rows, cols]: [usize; 2], from: DType, to: DType) -> Bytes {
    let bytes = |dtype: DType| dtype.row_bytes(cols).expect("`target` chose a format of whole blocks");
    let (from_bytes, to_bytes) = (bytes(from), bytes(to));
    let mut out = vec![0; rows * to_bytes];
    pool.for_each_part(&mut out, ROWS * to_bytes, &|task, out| {
        let range = task * ROWS..rows.min((task + 1) * ROWS);
        let mut values = vec![0.0; range.len() * cols];
        (from.format().dequantize)(&data.slice(range, from_bytes).read(), &mut values);
        quantize(to, &values, out);
    });
    out.into()
}
