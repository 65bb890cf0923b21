//! Control vectors from pairs of prompts: the mean difference of their residuals.

use crate::engine::Engine;
use crate::error::Error;
use crate::inside::{Capture, Captured, Positions};
use crate::request::{Finish, FinishReason, Request};
use crate::sampler::PartialSampling;
use puna_model::ControlVector;
use std::collections::BTreeMap;
use std::ops::RangeInclusive;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

/// Pairs that are computed together.
const GROUP: usize = 16;

/// Residuals of a text's last token, by layer.
type Residuals = Arc<Mutex<BTreeMap<usize, Vec<f32>>>>;

impl Engine {
    /// The control vector of pairs of texts, each a positive and a negative one, given as token ids: after each of the
    /// layers, from 1 on, the mean over pairs of the positive text's residual at its last token less the negative one's.
    /// Differences are added in double precision in the order of pairs. `progress` gets pairs done.
    ///
    /// # Errors
    /// [`Error::NoPairs`]; [`Error::DirectionLayer`];
    /// as [`Engine::add`] and [`Engine::step`]; and [`ControlVector::new`] where residuals are not finite.
    pub fn train_control_vector(
        &mut self,
        pairs: &[(Vec<u32>, Vec<u32>)],
        layers: RangeInclusive<usize>,
        mut progress: impl FnMut(usize),
    ) -> Result<ControlVector, Error> {
        let (n_layers, dim) = (self.config().n_layers, self.config().dim);
        if layers.is_empty() || *layers.start() == 0 || *layers.end() >= n_layers {
            let layer = if *layers.start() == 0 { 0 } else { *layers.end() };
            return Err(Error::DirectionLayer { layer, n_layers });
        }
        if pairs.is_empty() {
            return Err(Error::NoPairs);
        }
        let mut sums: BTreeMap<usize, Vec<f64>> = layers.clone().map(|layer| (layer, vec![0.0; dim])).collect();
        for (group, pairs) in pairs.chunks(GROUP).enumerate() {
            let texts = pairs.iter().flat_map(|(positive, negative)| [positive, negative]);
            let residuals = texts.map(|ids| self.add_text(ids, &layers)).collect::<Result<Vec<_>, _>>();
            // Those before one that is refused end too.
            let computed = self.finish_texts();
            for pair in computed.and(residuals)?.chunks(2) {
                let [positive, negative] =
                    [&pair[0], &pair[1]].map(|r| r.lock().unwrap_or_else(PoisonError::into_inner));
                for (layer, sum) in &mut sums {
                    let both = positive[layer].iter().zip(&negative[layer]);
                    sum.iter_mut().zip(both).for_each(|(sum, (p, n))| *sum += f64::from(*p) - f64::from(*n));
                }
            }
            progress(group * GROUP + pairs.len());
        }
        let mean = |sum: Vec<f64>| sum.into_iter().map(|sum| (sum / pairs.len() as f64) as f32).collect();
        let directions = sums.into_iter().map(|(layer, sum)| (layer, mean(sum))).collect();
        Ok(ControlVector::new(Path::new("the vector of these prompts"), directions)?)
    }

    /// Steps until all texts have ended.
    fn finish_texts(&mut self) -> Result<(), Error> {
        let mut result = Ok(());
        while !self.is_idle() {
            for event in self.step()? {
                if let Some(Finish { reason: FinishReason::Error(e), .. }) = &event.finish {
                    result = Err(e.clone());
                }
            }
        }
        result
    }

    /// Adds a text of which only residuals are wanted.
    fn add_text(&mut self, ids: &[u32], layers: &RangeInclusive<usize>) -> Result<Residuals, Error> {
        let residuals = Residuals::default();
        let rows = residuals.clone();
        let sink = move |row: Captured| {
            let mut rows = rows.lock().unwrap_or_else(PoisonError::into_inner);
            rows.insert(row.layer, row.residual.to_vec());
        };
        let mut request = Request::new(ids.to_vec(), self.sampling(&PartialSampling::default()));
        request.max_tokens = Some(0);
        request.capture =
            Some(Capture { layers: layers.clone().collect(), positions: Positions::Last, sink: Arc::new(sink) });
        self.add(request)?;
        Ok(residuals)
    }
}
