//! Weights rearranged for the kernels: 16 rows side by side, so that a lane is an output row.
//!
//! Packing a format is a permutation of the bits of 16 blocks (one of each row) in units of 8, 4, 2 or 1 bits,
//! possibly with some bits flipped: a packed matrix is exactly as large as the stored one, and a row can be read back.

use crate::isa::{Isa, Kernel};
use crate::simd::{LANES, Simd};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

/// Part of a block that is permuted in units of one size.
pub(crate) struct Segment {
    /// Bytes of the block.
    pub bytes: Range<usize>,
    /// Bits of a unit: 8, 4, 2 or 1. Unit `u` of a byte range is at bit `u * bits`, lowest first.
    pub bits: usize,
    /// Unit of row `row` of the panel to unit of the panel, counted from the panel's start.
    pub place: fn(row: usize, unit: usize) -> usize,
    /// Exclusive or on each unit.
    pub flip: u8,
}

/// The permutation of a format, as a table: for each unit of the stored blocks, its place in the panel.
pub(crate) struct Packing {
    block_bytes: usize,
    /// Per row, segment and unit: source byte and shift, panel byte and shift.
    moves: Vec<Move>,
    /// The same, four neighbouring bytes of every row at a time where they move alike, for packing whole panels.
    gathers: Vec<Gather>,
    shifts: Vec<Shift>,
    /// Where in a block the words begin that shifts take.
    words: Vec<usize>,
}

/// Words of a block at most.
const MAX_WORDS: usize = 64;

/// A byte of a panel for each row, or four of them, and what of the row's block becomes it.
struct Gather {
    /// Its place for row 0.
    to: usize,
    /// From there to the next row's.
    stride: usize,
    /// Whether it is four bytes, which lie side by side.
    is_word: bool,
    flip: u32,
    shifts: Range<usize>,
}

/// Bits that move together: byte or four bytes `from` of the block, shifted, under a mask.
#[derive(Clone, Copy)]
struct Piece {
    from: usize,
    /// Bits to the left, or to the right where it is below 0.
    left: i32,
    mask: u32,
}

/// A piece as part of a word that is taken.
struct Shift {
    /// The word's number.
    word: usize,
    left: i32,
    mask: u32,
}

#[derive(Clone, Copy)]
struct Move {
    from: u16,
    to: u16,
    from_shift: u8,
    to_shift: u8,
    mask: u8,
    flip: u8,
}

impl Packing {
    pub(crate) fn new(block_bytes: usize, segments: &[Segment]) -> Packing {
        let mut moves = Vec::new();
        for row in 0..LANES {
            for segment in segments {
                let per_byte = 8 / segment.bits;
                for unit in 0..segment.bytes.len() * per_byte {
                    let to = (segment.place)(row, unit);
                    moves.push(Move {
                        from: (segment.bytes.start + unit / per_byte) as u16,
                        to: (to / per_byte) as u16,
                        from_shift: (unit % per_byte * segment.bits) as u8,
                        to_shift: (to % per_byte * segment.bits) as u8,
                        mask: ((1u16 << segment.bits) - 1) as u8,
                        flip: segment.flip,
                    });
                }
            }
        }
        let mut packing = Packing { block_bytes, moves, gathers: Vec::new(), shifts: Vec::new(), words: Vec::new() };
        let pieces = packing.gather();
        packing.take(&pieces);
        packing
    }

    /// Finds what moves together. Places of a format are those of row 0 and a fixed distance a row.
    fn gather(&mut self) -> Vec<Piece> {
        let mut all: Vec<Piece> = Vec::new();
        let mut bytes: BTreeMap<usize, (usize, u32, Vec<Piece>)> = BTreeMap::new();
        for (m, next) in self.moves_of_row(0).iter().zip(self.moves_of_row(1)) {
            let stride = usize::from(next.to - m.to);
            let (_, flip, pieces) = bytes.entry(usize::from(m.to)).or_insert((stride, 0, Vec::new()));
            *flip |= u32::from(m.flip) << m.to_shift;
            let (from, mask) = (usize::from(m.from), u32::from(m.mask) << m.to_shift);
            let left = i32::from(m.to_shift) - i32::from(m.from_shift);
            match pieces.iter_mut().find(|p| (p.from, p.left) == (from, left)) {
                Some(piece) => piece.mask |= mask,
                None => pieces.push(Piece { from, left, mask }),
            }
        }
        while let Some((to, (stride, flip, pieces))) = bytes.pop_first() {
            let next: Vec<_> = (1..4).map_while(|i| bytes.get(&(to + i)).filter(|b| b.0 == 4)).collect();
            let follows = |i: usize, p: &Piece, q: &Piece| q.from == p.from + i && q.left == p.left;
            let alike = next
                .iter()
                .enumerate()
                .all(|(i, b)| b.2.len() == pieces.len() && pieces.iter().zip(&b.2).all(|(p, q)| follows(i + 1, p, q)));
            let is_word = stride == 4 && next.len() == 3 && alike;
            let start = all.len();
            let mut word = flip;
            all.extend(&pieces);
            for (i, (_, flip, more)) in next.iter().enumerate().filter(|_| is_word) {
                word |= flip << (8 * (i + 1));
                all[start..].iter_mut().zip(more).for_each(|(p, q)| p.mask |= q.mask << (8 * (i + 1)));
            }
            self.gathers.push(Gather { to, stride, is_word, flip: word, shifts: start..all.len() });
            if is_word {
                (1..4).for_each(|i| drop(bytes.remove(&(to + i))));
            }
        }
        all
    }

    /// Finds the words that pieces are taken from. Single bytes are part of those that are taken anyway, or of more.
    fn take(&mut self, pieces: &[Piece]) {
        let last = self.block_bytes - 4;
        let of_words = self.gathers.iter().filter(|gather| gather.is_word).flat_map(|gather| gather.shifts.clone());
        self.words = of_words.map(|i| pieces[i].from).collect::<BTreeSet<_>>().into_iter().collect();
        for gather in &self.gathers {
            for &Piece { from, left, mask } in &pieces[gather.shifts.clone()] {
                let holds = |&start: &usize| start == from || !gather.is_word && (start..start + 4).contains(&from);
                let word = self.words.iter().position(holds).unwrap_or_else(|| {
                    self.words.push(from.min(last));
                    self.words.len() - 1
                });
                let bits = 8 * (from - self.words[word]) as i32;
                self.shifts.push(Shift { word, left: left - bits, mask });
            }
        }
        assert!(self.words.len() <= MAX_WORDS && self.words.iter().all(|&start| start <= last), "words of a block");
    }

    /// Reads what shifts take of a row's block. A function of its own, since vector instructions for it are slower.
    #[inline(never)]
    fn take_words(&self, block: &[u8], lane: usize, words: &mut [[i32; LANES]; MAX_WORDS]) {
        assert!(block.len() == self.block_bytes && lane < LANES);
        for (word, &start) in words.iter_mut().zip(&self.words) {
            // SAFETY: words end before the block does.
            word[lane] = unsafe { block.as_ptr().add(start).cast::<i32>().read_unaligned() };
        }
    }

    /// Makes a panel of up to 16 stored rows; lanes without a row stay as they are.
    pub(crate) fn pack_panel(&self, rows: &[&[u8]], panel: &mut [u8]) {
        Isa::detect().run(PackPanel { packing: self, rows, panel });
    }

    fn moves_of_row(&self, row: usize) -> &[Move] {
        let per_row = self.moves.len() / LANES;
        &self.moves[row * per_row..][..per_row]
    }

    /// The slow way to make a panel, unit by unit: adds row `row` (of 16) to a panel whose units of that row are still zero.
    /// `stored`: the row's blocks; `panel`: as many blocks of 16 rows.
    #[cfg(test)]
    pub(crate) fn pack_row(&self, stored: &[u8], row: usize, panel: &mut [u8]) {
        let blocks = stored.chunks_exact(self.block_bytes);
        for (block, out) in blocks.zip(panel.chunks_exact_mut(self.block_bytes * LANES)) {
            for m in self.moves_of_row(row) {
                let unit = (block[usize::from(m.from)] >> m.from_shift) & m.mask ^ m.flip;
                out[usize::from(m.to)] |= unit << m.to_shift;
            }
        }
    }

    /// The inverse of [`Packing::pack_row`].
    pub(crate) fn unpack_row(&self, panel: &[u8], row: usize, stored: &mut [u8]) {
        stored.fill(0);
        let panels = panel.chunks_exact(self.block_bytes * LANES);
        for (block, out) in panels.zip(stored.chunks_exact_mut(self.block_bytes)) {
            for m in self.moves_of_row(row) {
                let unit = (block[usize::from(m.to)] >> m.to_shift) & m.mask ^ m.flip;
                out[usize::from(m.from)] |= unit << m.from_shift;
            }
        }
    }
}

/// [`Packing::pack_panel`], which moves bits and computes nothing: levels differ in how many at once.
struct PackPanel<'a> {
    packing: &'a Packing,
    rows: &'a [&'a [u8]],
    panel: &'a mut [u8],
}

impl Kernel for PackPanel<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let PackPanel { packing, rows, panel } = self;
        let size = packing.block_bytes;
        assert!(rows.len() <= LANES && rows.iter().all(|row| row.len() * LANES == panel.len()), "rows of the panel");
        // [MAX_WORDS, LANES]
        let mut words = [[0i32; LANES]; MAX_WORDS];
        for (i, out) in panel.chunks_exact_mut(size * LANES).enumerate() {
            for (lane, row) in rows.iter().enumerate() {
                packing.take_words(&row[i * size..][..size], lane, &mut words);
            }
            for Gather { to, stride, is_word, flip, shifts } in &packing.gathers {
                let mut sum = s.splat_i(*flip as i32);
                for &Shift { word, left, mask } in &packing.shifts[shifts.clone()] {
                    // SAFETY: a word is 16 lanes.
                    let word = unsafe { s.load_i(words[word].as_ptr()) };
                    let moved = if left < 0 { s.shr_i(word, left.unsigned_abs()) } else { s.shl_i(word, left as u32) };
                    sum = s.xor_i(sum, s.and_i(moved, s.splat_i(mask as i32)));
                }
                let out = &mut out[*to..];
                if *is_word && rows.len() == LANES {
                    // SAFETY: it has four bytes for each lane.
                    unsafe { s.store_i(out[..4 * LANES].as_mut_ptr().cast(), sum) };
                    continue;
                }
                let mut lanes = [0i32; LANES];
                // SAFETY: there are 16 lanes.
                unsafe { s.store_i(lanes.as_mut_ptr(), sum) };
                let lanes = lanes.iter().take(rows.len());
                if *is_word {
                    out.as_chunks_mut().0.iter_mut().zip(lanes).for_each(|(out, lane)| *out = lane.to_le_bytes());
                } else {
                    out.iter_mut().step_by(*stride).zip(lanes).for_each(|(out, lane)| *out = *lane as u8);
                }
            }
        }
    }
}

/// Places of the common parts of a block. A column's quad is `col / 4`; in a panel the 64 bytes of a quad are
/// `row * 4 + col % 4`, which is what a byte dot product of 16 lanes takes.
pub(crate) mod place {
    use super::LANES;
    use crate::act::GROUP;

    /// A byte code: quads one after the other.
    pub(crate) fn code8(row: usize, col: usize) -> usize {
        col / 4 * 64 + row * 4 + col % 4
    }

    /// A nibble code: quads 2i and 2i + 1 share 64 bytes, the even one in the low nibbles.
    pub(crate) fn code4(row: usize, col: usize) -> usize {
        let quad = col / 4;
        (quad / 2 * 64 + row * 4 + col % 4) * 2 + quad % 2
    }

    /// A two-bit code: four quads share 64 bytes.
    pub(crate) fn code2(row: usize, col: usize) -> usize {
        let quad = col / 4;
        (quad / 4 * 64 + row * 4 + col % 4) * 4 + quad % 4
    }

    /// A one-bit code: eight quads share 64 bytes.
    pub(crate) fn code1(row: usize, col: usize) -> usize {
        let quad = col / 4;
        (quad / 8 * 64 + row * 4 + col % 4) * 8 + quad % 8
    }

    /// The column of nibble `unit` where low nibbles are columns 0..16 and high ones 16..32.
    pub(crate) fn halves(unit: usize) -> usize {
        unit / 2 + unit % 2 * 16
    }

    /// Where the two bits `unit` of the 12 bytes of 6-bit scales and minima go (Q4_K, Q5_K: see
    /// `quant::scale_min`): planes of 16 bytes hold the low 4 bits of the scales of groups 2i and 2i + 1 (planes
    /// 0..4), of the minima (4..8), and the high 2 bits of both, scales first, as `[2, 2]` (8..12).
    pub(crate) fn scale_min(row: usize, unit: usize) -> usize {
        let (byte, pair) = (unit / 4, unit % 4);
        let (is_min, group, part) = match byte {
            0..4 if pair < 3 => (0, byte, pair),
            0..4 => (0, byte + 4, 2),
            4..8 if pair < 3 => (1, byte - 4, pair),
            4..8 => (1, byte, 2),
            _ => (pair / 2, byte - 4, pair % 2),
        };
        let (plane, at) = match part {
            2 => (8 + group / 2, 2 * is_min + group % 2),
            low => (4 * is_min + group / 2, group % 2 * 2 + low),
        };
        (plane * LANES + row) * 4 + at
    }

    /// Nibble `unit` of K-formats: groups 2k and 2k + 1 are the low and the high nibbles of the bytes 32k..32k + 32.
    pub(crate) fn code4_pairs(row: usize, unit: usize) -> usize {
        let (byte, high) = (unit / 2, unit % 2);
        (byte / 32 * 2 + high) * LANES * GROUP + code4(row, byte % 32)
    }

    /// Two bits `unit` of K-formats: groups 4k..4k + 4 are bits 0, 2, 4, 6 of the bytes 32k..32k + 32.
    pub(crate) fn code2_quarters(row: usize, unit: usize) -> usize {
        let (byte, quarter) = (unit / 4, unit % 4);
        (byte / 32 * 4 + quarter) * LANES * GROUP + code2(row, byte % 32)
    }

    /// Units that lie in runs of `run` a group, where groups begin every `stride`: what a group needs lies together, so
    /// that memory is read in order.
    pub(crate) fn grouped(place: usize, run: usize, stride: usize) -> usize {
        place / run * stride + place % run
    }

    /// Byte `byte` of a 16-bit number per row.
    pub(crate) fn half(row: usize, byte: usize) -> usize {
        byte / 2 * 2 * LANES + row * 2 + byte % 2
    }

    /// Byte `byte` of a run of bytes per row: the rows' first bytes, then their second ones.
    pub(crate) fn byte(row: usize, byte: usize) -> usize {
        byte * LANES + row
    }
}

#[cfg(test)]
mod tests {
    use super::LANES;
    use crate::dtype::FORMATS;

    #[test]
    fn a_panel_is_what_its_rows_are() {
        let mut state = 1u32;
        let mut byte = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 24) as u8
        };
        for format in FORMATS {
            let Some(panel_format) = format.panel else { continue };
            let packing = panel_format.packing();
            let rows: Vec<Vec<u8>> =
                (0..LANES).map(|_| (0..3 * format.block_bytes).map(|_| byte()).collect()).collect();
            for n in [1, 7, LANES] {
                let mut expected = vec![0; 3 * format.block_bytes * LANES];
                (0..n).for_each(|lane| packing.pack_row(&rows[lane], lane, &mut expected));
                let mut got = vec![0; expected.len()];
                let some: Vec<&[u8]> = rows[..n].iter().map(|row| &row[..]).collect();
                packing.pack_panel(&some, &mut got);
                assert!(got == expected, "{} with {n} rows", format.dtype.name());
            }
        }
    }
}
