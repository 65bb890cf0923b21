//! Weights rearranged for the kernels: 16 rows side by side, so that a lane is an output row.
//!
//! Packing a format is a permutation of the bits of 16 blocks (one of each row) in units of 8, 4, 2 or 1 bits,
//! possibly with some bits flipped: a packed matrix is exactly as large as the stored one, and a row can be read back.

use crate::simd::LANES;
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
        Packing { block_bytes, moves }
    }

    fn moves_of_row(&self, row: usize) -> &[Move] {
        let per_row = self.moves.len() / LANES;
        &self.moves[row * per_row..][..per_row]
    }

    /// Adds row `row` (of 16) to a panel whose units of that row are still zero.
    /// `stored`: the row's blocks; `panel`: as many blocks of 16 rows.
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
    /// 0..4), of the minima (4..8), the high 2 bits of the scales of groups 4i..4i + 4 (8..10), of the minima (10..12).
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
            2 => (8 + 2 * is_min + group / 4, group % 4),
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
