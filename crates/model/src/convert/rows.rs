//! Rows of a tensor on their way from one format to another.

use crate::checkpoint::Data;
use puna_kernels::{DType, Pool, quantize};
use std::ops::Range;
use std::sync::{Mutex, PoisonError};

/// Elements that one thread converts at a time: enough rows for made ones to be worth making, and few megabytes.
const TASK: usize = 1 << 19;

/// The largest number that F16 has.
const F16_MAX: f32 = 65_504.0;

/// A matrix, and what it is to become.
pub struct Rows {
    /// Its rows.
    pub data: Data,
    /// How many.
    pub n: usize,
    /// Length of a row.
    pub cols: usize,
    /// The format they have.
    pub from: DType,
    /// The format they get.
    pub to: DType,
    /// Halves become adjacent pairs: dimensions of a head, and how many of them rotate.
    pub pairs: Option<[usize; 2]>,
}

/// The row of halves `(i, i + half)` that is row `row` of adjacent pairs `(2i, 2i + 1)`, head by head, within the
/// rotary width.
pub fn half_of_pair(row: usize, [head_dim, width]: [usize; 2]) -> usize {
    let (head, i) = (row / head_dim * head_dim, row % head_dim);
    if i >= width { row } else { head + i / 2 + i % 2 * (width / 2) }
}

impl Rows {
    /// Hands the rows, converted, to `write`, some megabytes at a time.
    ///
    /// # Errors
    /// That of `write`, or, through `fault`, what is wrong with a number.
    pub fn convert<E>(
        &self,
        pool: &Pool,
        write: &mut dyn FnMut(&[u8]) -> Result<(), E>,
        fault: impl Fn(String) -> E,
    ) -> Result<(), E> {
        let (Some(from), Some(to)) = (self.from.row_bytes(self.cols), self.to.row_bytes(self.cols)) else {
            return Err(fault(format!("a row length of {} is not a whole number of blocks", self.cols)));
        };
        let step = (TASK / self.cols.max(1)).max(1);
        let some = step * 2 * pool.threads();
        let mut out = vec![0; some.min(self.n) * to];
        for first in (0..self.n).step_by(some) {
            let rows = first..self.n.min(first + some);
            let out = &mut out[..rows.len() * to];
            let problem = Mutex::new(None);
            pool.for_each_part(out, step * to, &|task, out| {
                let first = rows.start + task * step;
                if let Err(what) = self.some(first..first + out.len() / to, from, out) {
                    problem.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(what);
                }
            });
            if let Some(what) = problem.into_inner().unwrap_or_else(PoisonError::into_inner) {
                return Err(fault(what));
            }
            write(out)?;
        }
        Ok(())
    }

    /// Converts some rows, of `row_bytes` each as they are.
    fn some(&self, rows: Range<usize>, row_bytes: usize, out: &mut [u8]) -> Result<(), String> {
        let bytes = match self.pairs {
            None => self.data.slice(rows.clone(), row_bytes).read(),
            Some(pairs) => {
                let place = |row| half_of_pair(row, pairs);
                let row = |row| self.data.slice(place(row)..place(row) + 1, row_bytes).read();
                rows.clone().flat_map(row).collect()
            }
        };
        if self.from == self.to {
            out.copy_from_slice(&bytes);
            return Ok(());
        }
        let mut values = vec![0.0; rows.len() * self.cols];
        (self.from.format().dequantize)(&bytes, &mut values);
        check(&values, self.to)?;
        quantize(self.to, &values, out);
        Ok(())
    }
}

/// Numbers that the format would silently turn into others.
fn check(values: &[f32], to: DType) -> Result<(), String> {
    let bad = match to {
        DType::F32 | DType::BF16 => None,
        DType::F16 => values.iter().find(|x| x.is_finite() && x.abs() > F16_MAX),
        _ => values.iter().find(|x| !x.is_finite()),
    };
    match bad {
        None => Ok(()),
        Some(x) if x.is_finite() => Err(format!("{x} is more than F16 has ({F16_MAX}): choose bf16 or f32")),
        Some(x) => Err(format!("{x} is among its numbers, which {} does not have", to.name())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pairs_are_made_of_halves_within_the_rotary_width() {
        let order = |n, shape| (0..n).map(|row| half_of_pair(row, shape)).collect::<Vec<_>>();
        assert_eq!(order(8, [8, 8]), [0, 4, 1, 5, 2, 6, 3, 7]);
        assert_eq!(order(12, [6, 4]), [0, 2, 1, 3, 4, 5, 6, 8, 7, 9, 10, 11]);
    }
}
