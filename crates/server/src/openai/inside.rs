//! What requests may change and see inside a model: steering, phases of their time, counts of experts.

use crate::openai::answer::timings;
use crate::openai::fields::{expected, integer};
use crate::openai::{ApiError, Card, Fields, Kind};
use puna::inside::timings_json;
use puna::steering::Part;
use puna::{ControlVector, Event, Phase, Request, Stats, Steering, Timings};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::ops::RangeInclusive;
use std::sync::{Arc, PoisonError, RwLock};
use std::time::{Duration, Instant};

/// Most control vectors that clients may upload, and that a request may add up.
const MAX_UPLOADS: usize = 64;
const MAX_PARTS: usize = 16;
/// Strengths; useful ones are between -2 and 2.
const STRENGTH: RangeInclusive<f64> = -1000.0..=1000.0;

/// Control vectors by name. Clones are the same list.
#[derive(Clone, Debug, Default)]
pub struct Vectors(Arc<RwLock<BTreeMap<String, Entry>>>);

#[derive(Debug)]
struct Entry {
    vector: Arc<ControlVector>,
    is_uploaded: bool,
}

impl Vectors {
    /// Adds a vector that stays. Returns whether its name was free; otherwise nothing changes.
    pub fn add(&self, name: &str, vector: ControlVector) -> bool {
        let mut map = self.0.write().unwrap_or_else(PoisonError::into_inner);
        let is_free = !map.contains_key(name);
        if is_free {
            map.insert(name.to_owned(), Entry { vector: Arc::new(vector), is_uploaded: false });
        }
        is_free
    }

    /// Adds what a client sends: the bytes of a file.
    ///
    /// # Errors
    /// A name that is taken or has other characters than letters, digits, `.`, `_` and `-`; too many of them; no
    /// control vector.
    pub fn upload(&self, name: &str, bytes: Vec<u8>) -> Result<Value, ApiError> {
        let fits = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'_' | b'-');
        if !(1..=64).contains(&name.len()) || !name.bytes().all(fits) {
            return Err(ApiError::invalid("name", "expected 1 to 64 letters, digits, '.', '_' or '-'"));
        }
        let broken = |e| ApiError::new(Kind::Invalid, format!("no control vector: {e}"));
        let vector = puna_model::Gguf::parse(name, bytes.into()).and_then(|gguf| ControlVector::from_gguf(&gguf));
        let entry = Entry { vector: Arc::new(vector.map_err(broken)?), is_uploaded: true };
        let mut map = self.0.write().unwrap_or_else(PoisonError::into_inner);
        if map.contains_key(name) {
            return Err(ApiError::invalid("name", "there is a control vector of this name already"));
        }
        if map.values().filter(|entry| entry.is_uploaded).count() >= MAX_UPLOADS {
            return Err(ApiError::new(Kind::Invalid, format!("at most {MAX_UPLOADS} uploads are kept: delete others")));
        }
        let value = entry.value(name);
        map.insert(name.to_owned(), entry);
        Ok(value)
    }

    /// Forgets an upload; requests that are steered by it go on.
    ///
    /// # Errors
    /// There is none, or it was not uploaded.
    pub fn remove(&self, name: &str) -> Result<(), ApiError> {
        let mut map = self.0.write().unwrap_or_else(PoisonError::into_inner);
        match map.get(name) {
            None => Err(ApiError::new(Kind::NotFound, "there is no control vector of this name")),
            Some(entry) if !entry.is_uploaded => {
                Err(ApiError::new(Kind::Forbidden, "the server was started with this control vector: it stays"))
            }
            Some(_) => {
                map.remove(name);
                Ok(())
            }
        }
    }

    /// All of them, as the server lists them.
    pub fn listed(&self) -> Vec<Value> {
        let map = self.0.read().unwrap_or_else(PoisonError::into_inner);
        map.iter().map(|(name, entry)| entry.value(name)).collect()
    }

    /// Those of which `f` makes something.
    pub(crate) fn each<T>(&self, f: impl Fn(&str, &ControlVector) -> Option<T>) -> Vec<T> {
        let map = self.0.read().unwrap_or_else(PoisonError::into_inner);
        map.iter().filter_map(|(name, entry)| f(name, &entry.vector)).collect()
    }

    fn get(&self, name: &str) -> Option<Arc<ControlVector>> {
        let map = self.0.read().unwrap_or_else(PoisonError::into_inner);
        map.get(name).map(|entry| entry.vector.clone())
    }
}

impl Entry {
    fn value(&self, name: &str) -> Value {
        let layers: Vec<&usize> = self.vector.directions().keys().collect();
        json!({
            "id": name,
            "object": "control_vector",
            "dim": self.vector.dim(),
            "layers": layers,
            "uploaded": self.is_uploaded,
        })
    }
}

/// A control vector that a request names.
#[derive(Clone, Debug, PartialEq)]
struct Wish {
    vector: String,
    strength: f32,
    layers: Option<RangeInclusive<usize>>,
}

impl Wish {
    fn read(value: &Value, path: &str) -> Result<Wish, ApiError> {
        let fields = Fields::new(value, path)?;
        fields.require("vector")?;
        Ok(Wish {
            vector: fields.string("vector")?.unwrap_or_default().to_owned(),
            strength: fields.number("strength", STRENGTH)?.unwrap_or(1.0),
            layers: layers(&fields)?,
        })
    }
}

/// `[first, last]`.
fn layers(fields: &Fields) -> Result<Option<RangeInclusive<usize>>, ApiError> {
    let Some(list) = fields.list("layers")? else { return Ok(None) };
    let number = |(i, value): (usize, &Value)| {
        let layer = integer(value).and_then(|n| usize::try_from(n).ok()).filter(|&layer| layer > 0);
        layer.ok_or_else(|| expected(fields.name(&format!("layers[{i}]")), "a layer, from 1 on", value))
    };
    match list.iter().enumerate().map(number).collect::<Result<Vec<usize>, _>>()?[..] {
        [first, last] if first <= last => Ok(Some(first..=last)),
        _ => Err(fields.expected("layers", "the first and the last layer, as [first, last]")),
    }
}

/// What a request adds to the residual, by the names of vectors.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Wishes(Vec<Wish>);

impl Wishes {
    /// Reads the field.
    ///
    /// # Errors
    /// The part that is wrong.
    pub fn read(fields: &Fields) -> Result<Wishes, ApiError> {
        let list = fields.list("steering")?.map_or(&[][..], Vec::as_slice);
        if list.len() > MAX_PARTS {
            return Err(ApiError::invalid(
                "steering",
                format!("{} vectors, at most {MAX_PARTS} are taken", list.len()),
            ));
        }
        let wishes = list.iter().enumerate().map(|(i, value)| Wish::read(value, &format!("steering[{i}]")));
        Ok(Wishes(wishes.collect::<Result<_, _>>()?))
    }

    /// What they come to.
    ///
    /// # Errors
    /// A vector that nobody knows, or that does not fit the model; layers that one of them does not have.
    pub fn steering(&self, card: &Card) -> Result<Option<Arc<Steering>>, ApiError> {
        let vectors = self.0.iter().enumerate().map(|(i, wish)| {
            let unknown = || ApiError::invalid(format!("steering[{i}].vector"), "no control vector has this name");
            card.vectors.get(&wish.vector).ok_or_else(unknown)
        });
        let vectors = vectors.collect::<Result<Vec<_>, _>>()?;
        let part = |(wish, vector): (&Wish, _)| Part { vector, strength: wish.strength, layers: wish.layers.clone() };
        let parts: Vec<Part> = self.0.iter().zip(vectors.iter().map(Arc::as_ref)).map(part).collect();
        for (i, part) in parts.iter().enumerate() {
            let fault = |field: &str, e| Err(ApiError::invalid(format!("steering[{i}].{field}"), e));
            if let Err(e) = part.vector.check(&card.config) {
                return fault("vector", e);
            }
            if let Err(e) = Steering::new(&card.config, std::slice::from_ref(part)) {
                return fault(if part.layers.is_some() { "layers" } else { "strength" }, e);
            }
        }
        let sum = Steering::new(&card.config, &parts).map_err(|e| ApiError::invalid("steering", e))?;
        Ok((!sum.is_empty()).then(|| Arc::new(sum)))
    }
}

/// What a request for answers asks for.
#[derive(Clone, Debug)]
pub struct Inside {
    /// What is added to the residual.
    pub steering: Wishes,
    /// Whether the answer tells where its time went.
    pub timings: bool,
    /// Whether it tells how often each expert was chosen.
    pub count_experts: bool,
    /// When it was read.
    start: Instant,
}

impl Inside {
    /// Reads the fields.
    ///
    /// # Errors
    /// The field that is wrong.
    pub fn read(fields: &Fields) -> Result<Inside, ApiError> {
        Ok(Inside {
            steering: Wishes::read(fields)?,
            timings: fields.boolean("timings")?.unwrap_or(false),
            count_experts: fields.boolean("count_experts")?.unwrap_or(false),
            start: Instant::now(),
        })
    }

    /// Asks the engine for what is to be told.
    ///
    /// # Errors
    /// Experts where there are none.
    pub(crate) fn ask(&self, card: &Card, request: &mut Request) -> Result<(), ApiError> {
        if self.count_experts && card.config.moe.is_none() {
            return Err(ApiError::invalid("count_experts", "the model has no experts"));
        }
        (request.timings, request.count_experts) = (self.timings, self.count_experts);
        Ok(())
    }

    /// What is told, from now on. `grammar`: the part of the time so far that went into grammars; the rest made ids of
    /// the prompt.
    pub(crate) fn account(&self, card: &Card, grammar: Duration) -> Account {
        Account {
            start: self.start,
            tokenize: self.start.elapsed().saturating_sub(grammar),
            grammar,
            bandwidth: card.bandwidth,
            stats: None,
            phases: None,
            experts: Vec::new(),
        }
    }
}

/// What is told of how answers came about.
#[derive(Clone, Debug)]
pub(crate) struct Account {
    start: Instant,
    tokenize: Duration,
    grammar: Duration,
    bandwidth: Option<f64>,
    /// Of the answer that ended first, as are phases.
    stats: Option<Stats>,
    phases: Option<Value>,
    /// Of all answers, by layer.
    experts: Vec<Vec<u64>>,
}

impl Account {
    /// Takes note of an event.
    pub fn take(&mut self, event: &Event) {
        let Some(finish) = &event.finish else { return };
        if self.stats.is_none() {
            self.stats = Some(finish.stats);
            self.phases = finish.timings.as_deref().map(|timings| self.close(timings.clone()));
        }
        let Some(counts) = &finish.experts else { return };
        self.experts.resize(counts.layers().len(), vec![0; counts.n_experts()]);
        for (sums, counts) in self.experts.iter_mut().zip(counts.layers()) {
            sums.iter_mut().zip(counts).for_each(|(sum, count)| *sum += count);
        }
    }

    /// With what was done outside of the engine: phases add up to the time since the request was read.
    fn close(&self, mut timings: Timings) -> Value {
        timings.add(Phase::Tokenize, self.tokenize, 0);
        timings.add(Phase::Grammar, self.grammar, 0);
        let rest = self.start.elapsed().saturating_sub(timings.total());
        timings.add(Phase::Write, rest, 0);
        timings_json(&timings, self.bandwidth)
    }

    /// Adds it to the object that the client gets last.
    pub fn put(&self, object: &mut Value) {
        if let Some(stats) = &self.stats {
            object["timings"] = timings(stats);
        }
        if let (Some(phases), Some(told)) = (&self.phases, object["timings"].as_object_mut()) {
            told.extend(phases.as_object().cloned().unwrap_or_default());
        }
        if !self.experts.is_empty() {
            object["experts"] = json!(self.experts);
        }
    }
}
