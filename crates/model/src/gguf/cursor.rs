//! Reading fields one after the other, each checked against the bytes that are left.

use super::value::ValueType;

/// The words of a failure: the field, what was expected and what was found. Who calls adds file and place.
pub(super) type What = String;

/// A place in a run of bytes. A read that fails does not move.
#[derive(Clone, Debug)]
pub(super) struct Cursor<'a> {
    bytes: &'a [u8],
    pos: usize,
}

impl<'a> Cursor<'a> {
    pub fn new(bytes: &'a [u8]) -> Cursor<'a> {
        Cursor { bytes, pos: 0 }
    }

    pub fn pos(&self) -> usize {
        self.pos
    }

    pub fn rest(&self) -> &'a [u8] {
        &self.bytes[self.pos..]
    }

    pub fn take(&mut self, n: u64, field: &str) -> Result<&'a [u8], What> {
        let rest = self.rest();
        match usize::try_from(n).ok().and_then(|n| rest.get(..n)) {
            Some(bytes) => {
                self.pos += bytes.len();
                Ok(bytes)
            }
            None => Err(format!("end of file: {field} takes {n} bytes, only {} are left", rest.len())),
        }
    }

    pub fn array<const N: usize>(&mut self, field: &str) -> Result<[u8; N], What> {
        let mut array = [0; N];
        array.copy_from_slice(self.take(N as u64, field)?);
        Ok(array)
    }

    pub fn u32(&mut self, field: &str) -> Result<u32, What> {
        self.array(field).map(u32::from_le_bytes)
    }

    pub fn u64(&mut self, field: &str) -> Result<u64, What> {
        self.array(field).map(u64::from_le_bytes)
    }

    /// A u64 number of items of at least `min_bytes` each that follow.
    pub fn count(&mut self, field: &str, min_bytes: u64) -> Result<usize, What> {
        let mut ahead = self.clone();
        let n = ahead.u64(field)?;
        let left = ahead.rest().len();
        match usize::try_from(n) {
            Ok(count) if n <= left as u64 / min_bytes => {
                *self = ahead;
                Ok(count)
            }
            _ => Err(format!("{field} {n} passes the end of file: only {left} bytes are left")),
        }
    }

    /// A u64 length and as many bytes.
    pub fn string(&mut self, field: &str) -> Result<&'a [u8], What> {
        let mut ahead = self.clone();
        let n = ahead.u64(field)?;
        let rest = ahead.rest();
        match usize::try_from(n).ok().and_then(|n| rest.get(..n)) {
            Some(bytes) => {
                self.pos = ahead.pos + bytes.len();
                Ok(bytes)
            }
            None => {
                Err(format!("{field}: string length {n} passes the end of file: only {} bytes are left", rest.len()))
            }
        }
    }

    pub fn value_type(&mut self, field: &str) -> Result<ValueType, What> {
        let mut ahead = self.clone();
        let id = ahead.u32(field)?;
        let ty = ValueType::from_id(id).ok_or_else(|| format!("{field}: unknown type {id}"))?;
        *self = ahead;
        Ok(ty)
    }
}
