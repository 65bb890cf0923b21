//! What tells a model from others, for saved states.

use crate::bind::is_part;
use crate::checkpoint::{Checkpoint, Data};
use crate::config::Config;
use crate::error::Error;
use crate::experts::read_exact_at;
use crate::map::Opened;
use std::sync::{Arc, OnceLock};

/// A hash of a model's configuration and way of loading and, of every tensor, of name, shape, format, and the 256 bytes in
/// its middle. To read all weights would take as long as loading them does; tensors that were changed only elsewhere count
/// as the same. The bytes are read when the hash is first asked for: where files are not in memory yet, that alone can take
/// as long as reading hundreds of megabytes one after the other.
pub struct Fingerprint {
    /// Of all but the bytes.
    hasher: blake3::Hasher,
    samples: Vec<Sample>,
    hash: OnceLock<[u8; 32]>,
}

/// Where the bytes of a tensor's middle are.
enum Sample {
    Memory(Vec<u8>),
    File { opened: Arc<Opened>, at: u64, len: usize },
}

/// Bytes of a sample.
const SAMPLE: usize = 256;

impl Fingerprint {
    /// That of a model that is loaded in a way, of which keys and values depend too.
    pub fn new(from: &dyn Checkpoint, config: &Config, way: &str) -> Fingerprint {
        let mut hasher = blake3::Hasher::new();
        let mut add = |bytes: &[u8]| {
            hasher.update(&(bytes.len() as u64).to_le_bytes()).update(bytes);
        };
        add(format!("{config:?}").as_bytes());
        add(way.as_bytes());
        let mut names = from.names();
        // Keys and values do not depend on the output, which a model that only embeds need not have.
        names.retain(|name| is_part(name) && !name.starts_with("output"));
        names.sort_unstable();
        let mut samples = Vec::with_capacity(names.len());
        for name in names {
            add(name.as_bytes());
            add(format!("{:?}", from.shape(&name)).as_bytes());
            let Ok(tensor) = from.tensor(&name) else { continue };
            add(tensor.dtype.name().as_bytes());
            let middle = |len: usize| {
                let start = len.saturating_sub(SAMPLE) / 2;
                start..len.min(start + SAMPLE)
            };
            let of_memory = |bytes: &[u8]| Sample::Memory(bytes[middle(bytes.len())].to_vec());
            samples.push(match (&tensor.place, &tensor.data) {
                (Some(place), _) => match place.map.file() {
                    Some(opened) => {
                        let range = middle(place.range.len());
                        let at = (place.range.start + range.start) as u64;
                        Sample::File { opened: opened.clone(), at, len: range.len() }
                    }
                    None => of_memory(place.map.bytes().get(place.range.clone()).unwrap_or_default()),
                },
                (None, Data::Stored(bytes)) => of_memory(bytes),
                (None, Data::Made(rows, _)) => of_memory(rows.stored()),
            });
        }
        Fingerprint { hasher, samples, hash: OnceLock::new() }
    }

    /// The hash.
    ///
    /// # Errors
    /// [`Error::Io`] where a file of the model cannot be read any more.
    pub fn hash(&self) -> Result<[u8; 32], Error> {
        if let Some(hash) = self.hash.get() {
            return Ok(*hash);
        }
        let mut hasher = self.hasher.clone();
        for sample in &self.samples {
            match sample {
                Sample::Memory(bytes) => hasher.update(bytes),
                Sample::File { opened, at, len } => {
                    let mut bytes = vec![0; *len];
                    read_exact_at(&opened.file, &mut bytes, *at).map_err(|e| Error::io(&opened.path, &e))?;
                    hasher.update(&bytes)
                }
            };
        }
        Ok(*self.hash.get_or_init(|| *hasher.finalize().as_bytes()))
    }
}
