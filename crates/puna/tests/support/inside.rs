//! What requests see and change, for tests.

use super::{Answer, check_empty};
use puna::steering::Part;
use puna::{Capture, Captured, ControlVector, Engine, Finish, Positions, Request, RequestId, Steering};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

/// Rows by answer, layer and position.
pub type Rows = BTreeMap<(usize, usize, usize), Vec<f32>>;

/// Residuals of a request, each of which must come once.
#[derive(Clone, Default)]
pub struct Residuals(pub Arc<Mutex<Rows>>);

impl Residuals {
    pub fn capture(&self, layers: impl IntoIterator<Item = usize>, positions: Positions) -> Option<Capture> {
        let rows = self.0.clone();
        let sink = move |row: Captured| {
            let key = (row.sample, row.layer, row.position);
            let before = rows.lock().unwrap().insert(key, row.residual.to_vec());
            assert!(before.is_none(), "{key:?} came twice");
        };
        Some(Capture { layers: layers.into_iter().collect(), positions, sink: Arc::new(sink) })
    }

    pub fn take(&self) -> Rows {
        std::mem::take(&mut *self.0.lock().unwrap())
    }
}

pub fn steering(engine: &Engine, layer: usize, strength: f32) -> Option<Arc<Steering>> {
    let direction = (0..engine.config().dim).map(|i| ((i * 37 % 19) as f32 - 9.0) / 9.0).collect();
    let vector = ControlVector::new("made", BTreeMap::from([(layer, direction)])).unwrap();
    let part = Part { vector: &vector, strength, layers: None };
    Some(Arc::new(Steering::new(engine.config(), &[part]).unwrap()))
}

/// Steps until all requests have ended; what each said, and how it ended.
pub fn together(engine: &mut Engine, requests: &[Request]) -> Vec<(Answer, Finish)> {
    let ids: Vec<RequestId> = requests.iter().map(|r| engine.add(r.clone()).unwrap()).collect();
    finish(engine, &ids)
}

/// The same for requests that the engine has.
pub fn finish(engine: &mut Engine, ids: &[RequestId]) -> Vec<(Answer, Finish)> {
    let mut answers = vec![Answer::default(); ids.len()];
    let mut finishes: Vec<Option<Finish>> = vec![None; ids.len()];
    while !engine.is_idle() {
        for event in engine.step().unwrap() {
            let i = ids.iter().position(|id| *id == event.id).unwrap();
            answers[i].take(event);
            finishes[i] = event.finish.clone().or(finishes[i].take());
        }
        engine.check().unwrap();
    }
    check_empty(engine);
    answers.into_iter().zip(finishes.into_iter().map(Option::unwrap)).collect()
}
