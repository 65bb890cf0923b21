//! Reference values of a model: what transformers computed in single precision.

use super::Fixture;
use super::prompt::Prompt;
use puna_model::Row;
use safetensors::{Dtype, SafeTensors};

/// Reference values of a prompt and of what follows it.
pub struct Golden {
    pub prompt: Prompt,
    /// `[rows, vocab_size]`
    pub logits: Vec<f32>,
    /// `[n_layers + 1, rows, dim]`: the embeddings, what each layer leaves, the last one after the final norm.
    pub hidden_states: Option<Vec<f32>>,
    /// `[dim]`: the mean of the last hidden states.
    pub mean_pooled: Option<Vec<f32>>,
    /// What follows when each token is the most likely one.
    pub greedy: Vec<u32>,
}

impl Golden {
    pub fn read(fixture: &Fixture) -> Golden {
        let bytes = std::fs::read(fixture.folder.join("golden.safetensors")).unwrap();
        let file = File(SafeTensors::deserialize(&bytes).unwrap());
        let ids: Vec<u32> = file.i64s("input_ids").unwrap().iter().map(|&id| id.try_into().unwrap()).collect();
        let mut prompt = Prompt::tokens(&ids);
        let mask = file.bytes("image_mask", Dtype::U8).unwrap_or_default();
        let images = prompt.rows.iter_mut().zip(mask).filter(|(_, mask)| **mask != 0);
        images.enumerate().for_each(|(i, (row, _))| *row = Row::Embed(i as u32));
        prompt.embeds = file.f32s("image_embeds").unwrap_or_default();
        prompt.deepstack = file.f32s("deepstack_embeds").unwrap_or_default();
        if let Some(axes) = file.i64s("position_ids") {
            let position = |i: usize| [0, 1, 2].map(|axis| axes[axis * ids.len() + i].try_into().unwrap());
            prompt.positions = (0..ids.len()).map(position).collect();
        }
        prompt.rope_delta = file.i64s("rope_delta").map_or(0, |delta| delta[0]);
        Golden {
            prompt,
            logits: file.f32s("logits").unwrap(),
            hidden_states: file.f32s("hidden_states"),
            mean_pooled: file.f32s("mean_pooled"),
            greedy: file.i64s("greedy").unwrap().iter().map(|&id| id.try_into().unwrap()).collect(),
        }
    }
}

struct File<'a>(SafeTensors<'a>);

impl<'a> File<'a> {
    /// `None` where there is no such tensor.
    fn bytes(&self, name: &str, dtype: Dtype) -> Option<&'a [u8]> {
        let tensor = self.0.tensor(name).ok()?;
        assert_eq!(tensor.dtype(), dtype, "{name}");
        Some(tensor.data())
    }

    fn f32s(&self, name: &str) -> Option<Vec<f32>> {
        Some(self.bytes(name, Dtype::F32)?.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect())
    }

    fn i64s(&self, name: &str) -> Option<Vec<i64>> {
        Some(self.bytes(name, Dtype::I64)?.as_chunks().0.iter().map(|b| i64::from_le_bytes(*b)).collect())
    }
}
