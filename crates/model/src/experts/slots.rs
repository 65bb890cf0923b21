//! Which experts are in memory: a fixed number of slots, each for one expert of one layer. Knows nothing of files.
//!
//! An expert that a step wants, or that is being read, keeps its slot. Of the others, the one goes first that is
//! expected to be of no use for longest: a layer comes again after all others, and an expert that few rows chose
//! lately may be passed over many times.

/// No expert, no slot.
const NONE: u32 = u32::MAX;

/// How much the last row weighs in an expert's share: about the last twenty count.
const NEWS: f32 = 0.05;

/// What a slot holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Empty,
    /// Its expert is being read.
    Loading,
    Ready,
}

#[derive(Clone, Debug)]
struct Slot {
    /// [`Slots::key`] of its expert.
    key: u32,
    state: State,
    /// Whether the step that runs wants it.
    is_held: bool,
}

/// An expert that is to be read into a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Load {
    /// The expert.
    pub key: u32,
    /// The slot, which is its own until it is given up.
    pub slot: u32,
    /// The expert that had to make room.
    pub evicted: Option<u32>,
}

/// The slots, and how often experts are chosen.
pub struct Slots {
    n_layers: usize,
    n_experts: usize,
    slots: Vec<Slot>,
    /// Slot of each expert.
    home: Vec<u32>,
    /// Of each expert, the share of its layer's rows that chose it lately.
    shares: Vec<f32>,
    /// The layer that is computed, and the rows of the batch.
    layer: usize,
    rows: usize,
    /// Experts that the layer wants and that no wave has had, in rising order.
    wanted: Vec<u32>,
}

impl Slots {
    /// Empty slots for a model whose rows choose `used` of `n_experts` experts in each layer.
    pub fn new(n_layers: usize, n_experts: usize, used: usize, n_slots: usize) -> Slots {
        let n = n_layers * n_experts;
        Slots {
            n_layers,
            n_experts,
            slots: vec![Slot { key: NONE, state: State::Empty, is_held: false }; n_slots],
            home: vec![NONE; n],
            shares: vec![used as f32 / n_experts.max(1) as f32; n],
            layer: 0,
            rows: 0,
            wanted: Vec::with_capacity(n_experts),
        }
    }

    /// The number of an expert among those of all layers.
    pub fn key(&self, layer: usize, expert: usize) -> u32 {
        (layer * self.n_experts + expert) as u32
    }

    /// Layer, and number there, of an expert.
    pub fn place(&self, key: u32) -> (usize, usize) {
        (key as usize / self.n_experts, key as usize % self.n_experts)
    }

    /// How many slots there are.
    pub fn len(&self) -> usize {
        self.slots.len()
    }

    /// The expert in a slot, or on its way there.
    pub fn expert_in(&self, slot: u32) -> u32 {
        self.slots[slot as usize].key
    }

    /// The slot of an expert that is in memory.
    pub fn ready(&self, key: u32) -> Option<u32> {
        let slot = self.home[key as usize];
        (slot != NONE && self.slots[slot as usize].state == State::Ready).then_some(slot)
    }

    /// A layer of `rows` rows begins; expert e is wanted by `starts[e + 1] - starts[e]` of them. Gives how many of the
    /// wanted experts are in memory, and how many are not.
    pub fn want(&mut self, layer: usize, rows: usize, starts: &[usize]) -> (u64, u64) {
        debug_assert!(self.wanted.is_empty(), "the layer before is done");
        (self.layer, self.rows) = (layer, rows);
        let news = (NEWS * rows as f32).min(0.5);
        let (mut hits, mut misses) = (0, 0);
        for (expert, range) in starts.windows(2).enumerate() {
            let (key, n) = (self.key(layer, expert), range[1] - range[0]);
            let share = &mut self.shares[key as usize];
            *share += news * (n as f32 / rows.max(1) as f32 - *share);
            if n == 0 {
                continue;
            }
            self.wanted.push(key);
            let (is_ready, slot) = (self.ready(key).is_some(), self.home[key as usize]);
            (hits, misses) = (hits + u64::from(is_ready), misses + u64::from(!is_ready));
            if slot != NONE {
                self.slots[slot as usize].is_held = true;
            }
        }
        (hits, misses)
    }

    /// The next wanted expert that nobody reads, and a slot for it; `None` where there is none, or no slot yet.
    pub fn next_load(&mut self) -> Option<Load> {
        let key = self.wanted.iter().copied().find(|&key| self.home[key as usize] == NONE)?;
        let load = self.take(key, f32::NEG_INFINITY)?;
        self.slots[load.slot as usize].is_held = true;
        Some(load)
    }

    /// A slot for an expert that may be wanted by the next layer; `None` where it has one, or where it would take the
    /// place of one that is wanted sooner.
    pub fn prefetch(&mut self, key: u32) -> Option<Load> {
        if self.home[key as usize] != NONE {
            return None;
        }
        self.take(key, self.wait(key).max(1.0))
    }

    /// An empty slot, or that of the expert that waits longest, if it waits longer than this.
    fn take(&mut self, key: u32, longer_than: f32) -> Option<Load> {
        let mut best: Option<(f32, usize)> = None;
        for (i, slot) in self.slots.iter().enumerate().filter(|(_, slot)| !slot.is_held) {
            let wait = match slot.state {
                State::Empty => f32::INFINITY,
                State::Loading => continue,
                State::Ready => self.wait(slot.key),
            };
            if wait > best.map_or(longer_than, |(longest, _)| longest) {
                best = Some((wait, i));
            }
        }
        let (_, i) = best?;
        let slot = &mut self.slots[i];
        let evicted = (slot.key != NONE).then_some(slot.key);
        *slot = Slot { key, state: State::Loading, is_held: false };
        if let Some(evicted) = evicted {
            self.home[evicted as usize] = NONE;
        }
        self.home[key as usize] = i as u32;
        Some(Load { key, slot: i as u32, evicted })
    }

    /// After how many layers an expert will be wanted, as it seems.
    fn wait(&self, key: u32) -> f32 {
        let layer = key as usize / self.n_experts;
        let layers_between = (layer + self.n_layers - self.layer - 1) % self.n_layers;
        // Of as many rows as this step has, one at least chooses it.
        let chance = (self.shares[key as usize] * self.rows as f32).clamp(1e-6, 1.0);
        layers_between as f32 + self.n_layers as f32 * (1.0 / chance - 1.0)
    }

    /// Whether one of as many rows as this step has will want an expert, as it seems.
    pub fn is_likely(&self, key: u32) -> bool {
        self.shares[key as usize] * self.rows as f32 >= 1.0
    }

    /// The expert of a slot is there.
    pub fn arrived(&mut self, slot: u32) {
        self.slots[slot as usize].state = State::Ready;
    }

    /// The expert of a slot could not be read: the slot is empty.
    pub fn failed(&mut self, slot: u32) {
        let slot = &mut self.slots[slot as usize];
        self.home[slot.key as usize] = NONE;
        *slot = Slot { key: NONE, state: State::Empty, is_held: false };
    }

    /// Whether the step that runs wants the expert of a slot.
    pub fn is_held(&self, slot: u32) -> bool {
        self.slots[slot as usize].is_held
    }

    /// Whether every expert that the layer wants is in memory or being read.
    pub fn is_on_its_way(&self) -> bool {
        self.wanted.iter().all(|&key| self.home[key as usize] != NONE)
    }

    /// Whether no wanted experts are left that no wave has had.
    pub fn is_done(&self) -> bool {
        self.wanted.is_empty()
    }

    /// Puts the wanted experts that are there into `wave`, by their numbers in the layer and in rising order. They keep
    /// their slots until [`Slots::release`].
    pub fn wave(&mut self, wave: &mut Vec<u32>) {
        let (slots, home, n_experts) = (&self.slots, &self.home, self.n_experts as u32);
        self.wanted.retain(|&key| {
            let slot = home[key as usize];
            let is_ready = slot != NONE && slots[slot as usize].state == State::Ready;
            if is_ready {
                wave.push(key % n_experts);
            }
            !is_ready
        });
    }

    /// A wave is computed.
    pub fn release(&mut self, wave: &[u32]) {
        for &expert in wave {
            let slot = self.home[self.key(self.layer, expert as usize) as usize];
            self.slots[slot as usize].is_held = false;
        }
    }

    /// The step ends here: nothing is wanted.
    pub fn abort(&mut self) {
        self.wanted.clear();
        self.slots.iter_mut().for_each(|slot| slot.is_held = false);
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;
    use proptest::prelude::*;

    impl Slots {
        fn check(&self) -> Result<(), TestCaseError> {
            for (i, slot) in self.slots.iter().enumerate() {
                prop_assert_eq!(slot.key == NONE, slot.state == State::Empty, "slot {}", i);
                if slot.key != NONE {
                    prop_assert_eq!(self.home[slot.key as usize], i as u32);
                }
            }
            let homes = self.home.iter().filter(|&&slot| slot != NONE).count();
            prop_assert_eq!(homes, self.slots.iter().filter(|slot| slot.key != NONE).count());
            Ok(())
        }
    }

    /// What a random run decides next.
    fn pick(choices: &mut impl Iterator<Item = usize>, n: usize) -> usize {
        choices.next().unwrap() % n.max(1)
    }

    proptest! {
        /// Layers want experts, reads end in any order, some fail, some experts are fetched ahead: every expert comes
        /// exactly once, none in use is given up, and it goes on while reads end.
        #[test]
        fn every_wanted_expert_comes(
            (n_layers, n_experts, n_slots) in (1usize..5, 1usize..12, 2usize..20),
            choices in proptest::collection::vec(any::<usize>(), 400),
            rows in 1usize..40,
        ) {
            let mut choices = choices.iter().copied().cycle();
            let mut slots = Slots::new(n_layers, n_experts, 2, n_slots);
            let mut reading: Vec<Load> = Vec::new();
            for step in 0..30 {
                let layer = step % n_layers;
                let counts: Vec<usize> = (0..n_experts).map(|_| pick(&mut choices, 3)).collect();
                let mut starts = vec![0];
                counts.iter().for_each(|n| starts.push(starts.last().unwrap() + n));
                let (hits, misses) = slots.want(layer, rows, &starts);
                let expected: Vec<u32> = (0..n_experts as u32).filter(|&e| counts[e as usize] > 0).collect();
                prop_assert_eq!((hits + misses) as usize, expected.len());
                let mut seen = Vec::new();
                let fails = pick(&mut choices, 7) == 0;
                while !slots.is_done() {
                    while let Some(load) = slots.next_load() {
                        reading.push(load);
                    }
                    let mut wave = Vec::new();
                    slots.wave(&mut wave);
                    prop_assert!(wave.is_sorted());
                    let homes: Vec<u32> = wave.iter().map(|&e| slots.ready(slots.key(layer, e as usize)).unwrap()).collect();
                    // While the wave is computed, more is read, and experts of the next layer too.
                    for _ in 0..pick(&mut choices, 4) {
                        let key = slots.key((layer + 1) % n_layers, pick(&mut choices, n_experts));
                        if n_layers > 1 && let Some(load) = slots.prefetch(key) {
                            prop_assert!(!homes.contains(&load.slot));
                            reading.push(load);
                        }
                    }
                    while let Some(load) = slots.next_load() {
                        prop_assert!(!homes.contains(&load.slot));
                        reading.push(load);
                    }
                    prop_assert!(reading.len() <= n_slots);
                    slots.check()?;
                    if wave.is_empty() {
                        // Somebody must be on the way, or this would never end.
                        prop_assert!(!reading.is_empty());
                        let load = reading.swap_remove(pick(&mut choices, reading.len()));
                        if fails && pick(&mut choices, 3) == 0 {
                            slots.failed(load.slot);
                            slots.abort();
                            reading.drain(..).for_each(|load| slots.failed(load.slot));
                            break;
                        }
                        slots.arrived(load.slot);
                    }
                    slots.release(&wave);
                    seen.extend(wave);
                }
                slots.check()?;
                if slots.slots.iter().any(|slot| slot.state != State::Empty) {
                    seen.sort_unstable();
                    prop_assert!(seen == expected || fails, "{:?} of {:?}", seen, expected);
                }
                prop_assert!(!slots.slots.iter().any(|slot| slot.is_held));
            }
        }
    }

    #[test]
    fn what_is_chosen_often_stays() {
        let mut slots = Slots::new(1, 8, 1, 4);
        // Expert 0 comes every other time, the others in turn.
        let mut misses_of_0 = 0;
        for step in 0..200 {
            let expert = if step % 2 == 0 { 0 } else { 1 + step / 2 % 7 };
            let starts: Vec<usize> = (0..9).map(|e| usize::from(e > expert)).collect();
            let (_, misses) = slots.want(0, 1, &starts);
            misses_of_0 += if expert == 0 { misses } else { 0 };
            if let Some(load) = slots.next_load() {
                slots.arrived(load.slot);
            }
            let mut wave = Vec::new();
            slots.wave(&mut wave);
            assert_eq!(wave, [expert as u32]);
            slots.release(&wave);
        }
        assert_eq!(misses_of_0, 1);
    }
}
