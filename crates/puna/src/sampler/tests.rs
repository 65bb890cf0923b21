use std::collections::BTreeMap;

use proptest::prelude::*;

use super::*;

const INF: f32 = f32::INFINITY;

/// Parameters with every stage off at temperature 1.
fn plain() -> SamplingParams {
    SamplingParams { temperature: 1.0, top_k: 0, top_p: 1.0, min_p: 0.0, seed: Some(1), ..SamplingParams::default() }
}

fn bias(pairs: &[(u32, f32)]) -> LogitBias {
    LogitBias(pairs.iter().copied().collect())
}

fn sampler(params: &SamplingParams, vocab_size: usize) -> Sampler {
    Sampler::new(params, vocab_size, &[]).unwrap()
}

fn sample(params: &SamplingParams, logits: &[f32]) -> Result<u32, SampleError> {
    sampler(params, logits.len()).sample(logits, &mut Scratch::default())
}

/// The ids that the chain leaves, ascending.
fn survivors(params: &SamplingParams, logits: &[f32]) -> Vec<u32> {
    left_by(&sampler(params, logits.len()), logits).into_keys().collect()
}

/// The ids that the chain leaves, with their probabilities.
fn left_by(sampler: &Sampler, logits: &[f32]) -> BTreeMap<u32, f64> {
    let mut scratch = Scratch::default();
    let candidates = sampler.narrow(logits, None, &mut scratch).unwrap();
    candidates.probabilities().collect()
}

/// The chain as a textbook has it: f64, the platform's exp and ln, everything sorted anew at every stage.
struct Textbook {
    /// (id, logit)
    tokens: Vec<(u32, f64)>,
    /// The least distance of a sum or probability from the threshold that it was compared with: below the rounding
    /// error either outcome is right.
    margin: f64,
}

impl Textbook {
    fn run(params: &SamplingParams, history: &[u32], logits: &[f32]) -> Textbook {
        let mut tokens: Vec<_> = logits.iter().enumerate().map(|(id, &l)| (id as u32, f64::from(l) + 0.0)).collect();
        for (&id, &bias) in &params.logit_bias.0 {
            tokens[id as usize].1 += f64::from(bias);
        }
        tokens.retain(|t| t.1 > f64::NEG_INFINITY);
        let mut book = Textbook { tokens, margin: f64::INFINITY };
        for kind in &params.samplers {
            match kind {
                SamplerKind::Penalties => book.penalties(params, history),
                SamplerKind::TopK => book.top_k(params.top_k),
                SamplerKind::TypicalP => book.typical(params.typical_p.into(), params.min_keep),
                SamplerKind::TopP => book.top_p(params.top_p.into(), params.min_keep),
                SamplerKind::MinP => book.min_p(params.min_p.into(), params.min_keep),
                SamplerKind::Temperature if params.temperature > 0.0 => {
                    book.tokens.iter_mut().for_each(|t| t.1 /= f64::from(params.temperature));
                }
                SamplerKind::Temperature => {}
            }
        }
        book
    }

    fn penalties(&mut self, params: &SamplingParams, history: &[u32]) {
        let n = usize::try_from(params.repeat_last_n).unwrap_or(history.len()).min(history.len());
        let recent = &history[history.len() - n..];
        for (id, logit) in &mut self.tokens {
            let count = recent.iter().filter(|recent| *recent == id).count() as f64;
            if count > 0.0 {
                let penalty = f64::from(params.repeat_penalty);
                *logit = if *logit > 0.0 { *logit / penalty } else { *logit * penalty };
                *logit -= count * f64::from(params.frequency_penalty) + f64::from(params.presence_penalty);
            }
        }
    }

    fn probabilities(&self) -> Vec<f64> {
        let highest = self.tokens.iter().fold(f64::NEG_INFINITY, |m, t| m.max(t.1));
        let weights: Vec<f64> = self.tokens.iter().map(|t| (t.1 - highest).exp()).collect();
        let total: f64 = weights.iter().sum();
        weights.iter().map(|w| w / total).collect()
    }

    fn sort(&mut self) {
        self.tokens.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
    }

    fn top_k(&mut self, k: i32) {
        if k > 0 {
            self.sort();
            self.tokens.truncate(k as usize);
        }
    }

    fn top_p(&mut self, p: f64, min_keep: usize) {
        if p >= 1.0 {
            return;
        }
        self.sort();
        let mut sum = 0.0;
        for (i, q) in self.probabilities().into_iter().enumerate() {
            sum += q;
            self.margin = self.margin.min((sum - p).abs());
            if sum >= p && i + 1 >= min_keep {
                self.tokens.truncate(i + 1);
                return;
            }
        }
    }

    fn min_p(&mut self, p: f64, min_keep: usize) {
        self.sort();
        let q = self.probabilities();
        let keep = q.iter().filter(|&&x| x >= p * q[0]).count();
        for x in &q[1..] {
            // Equal logits give equal probabilities in any arithmetic.
            if x != &q[0] && p > 0.0 {
                self.margin = self.margin.min((x / q[0] / p - 1.0).abs());
            }
        }
        self.tokens.truncate(keep.max(min_keep));
    }

    fn typical(&mut self, p: f64, min_keep: usize) {
        if p >= 1.0 {
            return;
        }
        let q = self.probabilities();
        let entropy: f64 = -q.iter().filter(|&&q| q > 0.0).map(|q| q * q.ln()).sum::<f64>();
        let highest = self.tokens.iter().fold(f64::NEG_INFINITY, |m, t| m.max(t.1));
        let total: f64 = self.tokens.iter().map(|t| (t.1 - highest).exp()).sum();
        let score = |t: &(u32, f64)| (total.ln() - (t.1 - highest) - entropy).abs();
        let mut order: Vec<usize> = (0..q.len()).collect();
        order.sort_by(|&a, &b| {
            score(&self.tokens[a]).total_cmp(&score(&self.tokens[b])).then(self.tokens[a].0.cmp(&self.tokens[b].0))
        });
        for pair in order.windows(2) {
            let (a, b) = (&self.tokens[pair[0]], &self.tokens[pair[1]]);
            if a.1 != b.1 {
                self.margin = self.margin.min((score(a) - score(b)).abs());
            }
        }
        let mut sum = 0.0;
        let mut keep = order.len();
        for (i, &at) in order.iter().enumerate() {
            sum += q[at];
            self.margin = self.margin.min((sum - p).abs());
            if sum > p && i + 1 >= min_keep {
                keep = i + 1;
                break;
            }
        }
        self.tokens = order[..keep].iter().map(|&at| self.tokens[at]).collect();
    }
}

/// Rows of logits: smooth ones, ones full of ties, ones with -inf and ones of extreme size.
fn rows() -> impl Strategy<Value = Vec<f32>> {
    let smooth = (-12.0f32..12.0).boxed();
    let tied = (-6i32..6).prop_map(|x| x as f32 * 0.5).boxed();
    let masked = prop_oneof![1 => Just(-INF), 3 => -5.0f32..5.0].boxed();
    let extreme = prop_oneof![Just(f32::MAX), Just(f32::MIN), Just(0.0), Just(-0.0), -1e30f32..1e30].boxed();
    let size = prop_oneof![1 => 1usize..4, 3 => 4usize..40, 1 => 200usize..700];
    (prop_oneof![4 => Just(smooth), 3 => Just(tied), 2 => Just(masked), 1 => Just(extreme)], size)
        .prop_flat_map(|(logit, size)| proptest::collection::vec(logit, size))
        .prop_filter("a token must be left", |row| row.iter().any(|&logit| logit > -INF))
}

fn chains() -> impl Strategy<Value = SamplingParams> {
    let order = prop_oneof![
        3 => Just(SamplerKind::DEFAULT_ORDER.to_vec()),
        1 => Just(SamplerKind::DEFAULT_ORDER.to_vec()).prop_shuffle(),
        1 => proptest::sample::subsequence(SamplerKind::DEFAULT_ORDER.to_vec(), 0..6),
    ];
    let fraction = || prop_oneof![2 => 0.0f32..=1.0, 1 => Just(1.0f32), 1 => Just(0.0), 1 => 0.98f32..1.0];
    let filters = (
        prop_oneof![Just(0), Just(-1), Just(1), 1..30, Just(i32::MAX)],
        fraction(),
        fraction(),
        fraction(),
        prop_oneof![4 => Just(0usize), 1 => 1usize..12],
        prop_oneof![Just(1.0f32), 0.05f32..3.0, Just(0.0)],
    );
    let penalties = (
        prop_oneof![Just(1.0f32), 0.5f32..2.0],
        prop_oneof![Just(0.0f32), -2.0f32..2.0],
        prop_oneof![Just(0.0f32), -2.0f32..2.0],
        prop_oneof![Just(64), Just(0), Just(-1), 1..6],
    );
    (order, filters, penalties).prop_map(|(samplers, filter, penalty)| SamplingParams {
        samplers,
        top_k: filter.0,
        top_p: filter.1,
        min_p: filter.2,
        typical_p: filter.3,
        min_keep: filter.4,
        temperature: filter.5,
        repeat_penalty: penalty.0,
        presence_penalty: penalty.1,
        frequency_penalty: penalty.2,
        repeat_last_n: penalty.3,
        seed: Some(7),
        ..SamplingParams::default()
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 3000, max_global_rejects: 100_000, ..ProptestConfig::default() })]

    #[test]
    fn the_chain_is_the_textbooks(
        row in rows(),
        params in chains(),
        history in proptest::collection::vec(0u32..40, 0..12),
        biased in proptest::option::of((any::<proptest::sample::Index>(), -3.0f32..3.0)),
    ) {
        let mut params = params;
        if let Some((index, bias)) = biased {
            params.logit_bias.0.insert(index.index(row.len()) as u32, bias);
        }
        let book = Textbook::run(&params, &history, &row);
        // f32 holds a penalized or biased logit with an error of 2^-24 of it.
        prop_assume!(book.margin > 1e-4);
        prop_assume!(params.repeat_penalty == 1.0 || row.iter().all(|logit| logit.abs() < 1e3 || *logit == -INF));

        let mut sampler = sampler(&params, row.len());
        sampler.accept_prompt(&history);
        if params.temperature == 0.0 {
            // Only the likeliest of what is left matters, and fewer candidates may be looked at.
            let best = book.tokens.iter().min_by(|a, b| (b.1 as f32).total_cmp(&(a.1 as f32)).then(a.0.cmp(&b.0)));
            let chosen = sampler.sample(&row, &mut Scratch::default()).unwrap();
            prop_assert_eq!(chosen, best.unwrap().0);
            return Ok(());
        }
        let left = left_by(&sampler, &row);
        let expected: BTreeMap<u32, f64> = book.tokens.iter().map(|t| t.0).zip(book.probabilities()).collect();
        prop_assert_eq!(left.keys().collect::<Vec<_>>(), expected.keys().collect::<Vec<_>>());
        for (id, p) in &left {
            prop_assert!((p - expected[id]).abs() < 1e-4, "token {} has {} for {}", id, p, expected[id]);
        }
        let chosen = sampler.sample(&row, &mut Scratch::default()).unwrap();
        prop_assert!(left[&chosen] > 0.0);
    }

    #[test]
    fn the_draw_inverts_the_cumulative_distribution(row in rows(), u in 0.0f64..1.0) {
        let mut candidates = Candidates::default();
        candidates.fill(&row, usize::MAX);
        let chosen = candidates.pick(u).unwrap();
        let below: f64 = candidates.probabilities().take_while(|(id, _)| *id < chosen).map(|(_, p)| p).sum();
        let to: f64 = candidates.probabilities().take_while(|(id, _)| *id <= chosen).map(|(_, p)| p).sum();
        prop_assert!(below <= u + 1e-12 && u <= to + 1e-12, "{} of {}..{}", u, below, to);
    }

    #[test]
    fn a_limit_gives_the_head_of_the_sorted_row(row in rows(), limit in 0usize..300) {
        let mut limited = Candidates::default();
        limited.fill(&row, limit);
        let mut all = Candidates::default();
        all.fill(&row, usize::MAX);
        all.rank();
        if limit < row.len() {
            prop_assert_eq!(limited.items(), &all.items()[..limit.min(all.items().len())]);
        } else {
            prop_assert!(limited.items().is_sorted_by_key(|item| item.id));
            prop_assert_eq!(limited.items().len(), all.items().len());
        }
    }

    #[test]
    fn used_scratch_and_clones_change_nothing(rows in proptest::collection::vec(rows(), 1..6), params in chains()) {
        let mut scratch = Scratch::default();
        for row in &rows {
            let mut sampler = sampler(&params, row.len());
            let mut clone = sampler.clone();
            for _ in 0..3 {
                let id = sampler.sample(row, &mut scratch).unwrap();
                prop_assert_eq!(clone.sample(row, &mut Scratch::default()).unwrap(), id);
                sampler.accept(id);
                clone.accept(id);
            }
        }
    }

    #[test]
    fn log_softmax_is_the_textbooks(row in rows(), n in 0usize..800) {
        let softmax = LogSoftmax::new(&row).unwrap();
        let highest = row.iter().fold(-INF, |m, &l| m.max(l));
        let total: f64 = row.iter().map(|&l| (f64::from(l) - f64::from(highest)).exp()).sum();
        let expected = |id: u32| (f64::from(row[id as usize]) - f64::from(highest) - total.ln()).max(MIN_LOGPROB);
        for id in 0..row.len() as u32 {
            let logprob = softmax.get(id).unwrap();
            prop_assert!((logprob - expected(id)).abs() < 1e-9);
            prop_assert!((MIN_LOGPROB..=0.0).contains(&logprob));
        }
        prop_assert_eq!(softmax.get(row.len() as u32), None);

        let mut top = Vec::new();
        softmax.top(n, &mut Scratch::default(), &mut top);
        let mut ids: Vec<u32> = (0..row.len() as u32).filter(|&id| row[id as usize] > -INF).collect();
        ids.sort_by(|&a, &b| (row[b as usize] + 0.0).total_cmp(&(row[a as usize] + 0.0)).then(a.cmp(&b)));
        ids.truncate(n);
        prop_assert_eq!(top.iter().map(|t| t.id).collect::<Vec<_>>(), ids);
        prop_assert!(top.iter().all(|t| Some(t.logprob) == softmax.get(t.id)));
    }

    #[test]
    fn what_validates_never_fails_on_finite_logits(
        row in rows(),
        temperature in prop_oneof![Just(0.0f32), Just(f32::from_bits(1)), Just(f32::MAX), Just(1e-20f32)],
        repeat_penalty in prop_oneof![Just(f32::MIN_POSITIVE), Just(f32::MAX), Just(1.1f32)],
        subtracted in prop_oneof![Just(f32::MIN), Just(f32::MAX), Just(0.0f32)],
        params in chains(),
        samplers in proptest::collection::vec(proptest::sample::select(SamplerKind::DEFAULT_ORDER.to_vec()), 0..32),
        added in prop_oneof![Just(f32::MIN), Just(f32::MAX)],
    ) {
        let params = SamplingParams {
            temperature,
            repeat_penalty,
            presence_penalty: subtracted,
            frequency_penalty: subtracted,
            repeat_last_n: -1,
            samplers,
            logit_bias: bias(&[(0, added)]),
            ..params
        };
        let mut sampler = sampler(&params, row.len());
        sampler.accept_prompt(&[0, 1, 2, 2, 1_000_000]);
        for _ in 0..3 {
            let id = sampler.sample(&row, &mut Scratch::default()).unwrap();
            prop_assert!(row[id as usize] > -INF);
            sampler.accept(id);
        }
    }
}

#[test]
fn ties_at_a_threshold_are_exact() {
    let four = [1.5f32; 4];
    assert_eq!(survivors(&SamplingParams { top_p: 0.5, ..plain() }, &four), [0, 1]);
    assert_eq!(survivors(&SamplingParams { top_p: 0.0, ..plain() }, &four), [0]);
    assert_eq!(survivors(&SamplingParams { top_k: 3, ..plain() }, &four), [0, 1, 2]);
    assert_eq!(survivors(&SamplingParams { min_p: 1.0, ..plain() }, &four), [0, 1, 2, 3]);
    // More than p, where top_p takes p itself: as in llama.cpp.
    assert_eq!(survivors(&SamplingParams { typical_p: 0.5, ..plain() }, &four), [0, 1, 2]);
    assert_eq!(survivors(&SamplingParams { top_p: 0.25, min_keep: 3, ..plain() }, &four), [0, 1, 2]);
    assert_eq!(survivors(&SamplingParams { top_k: 1, ..plain() }, &[-0.0, 0.0]), [0]);
}

#[test]
fn typical_sampling_may_pass_over_the_likeliest_token() {
    // One token of probability 0.4 and sixty of 0.01: the entropy is 3.13 nats, the surprisals 0.92 and 4.61.
    let mut row = vec![0.01f32.ln(); 61];
    row[60] = 0.4f32.ln();
    let params = SamplingParams { typical_p: 0.3, temperature: 0.0, ..plain() };
    assert_eq!(survivors(&params, &row).len(), 31);
    assert_eq!(sample(&params, &row), Ok(0));
    assert_eq!(sample(&SamplingParams { temperature: 0.0, ..plain() }, &row), Ok(60));
}

#[test]
fn large_vocabularies_are_narrowed_as_small_ones_are() {
    let mut state = 1u32;
    let row: Vec<f32> = (0..150_000)
        .map(|_| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) as f32 * (20.0 / 16_777_216.0)
        })
        .collect();
    for params in [
        SamplingParams::default(),
        SamplingParams { top_p: 0.9, ..plain() },
        SamplingParams { top_p: 0.99999, min_keep: 149_000, ..plain() },
        SamplingParams { typical_p: 0.7, ..plain() },
        SamplingParams { min_p: 0.02, ..plain() },
        SamplingParams { top_k: 100_000, top_p: 0.999, ..plain() },
    ] {
        let book = Textbook::run(&params, &[], &row);
        let mut expected: Vec<u32> = book.tokens.iter().map(|t| t.0).collect();
        expected.sort_unstable();
        assert!(book.margin > 1e-12, "a tie of {}", book.margin);
        assert_eq!(survivors(&params, &row), expected);
    }
}

#[test]
fn samples_follow_the_softmax() {
    let row = [0.0f32, 1.0, -1.0, 2.0, 0.5, -2.0, 1.5, 0.25, -0.5, 0.75];
    for temperature in [0.7, 1.0, 1.8] {
        let params = SamplingParams { temperature, seed: Some(2024), ..plain() };
        let mut sampler = sampler(&params, row.len());
        let mut scratch = Scratch::default();
        let draws = 50_000;
        let mut counts = [0.0f64; 10];
        for _ in 0..draws {
            counts[sampler.sample(&row, &mut scratch).unwrap() as usize] += 1.0;
        }
        let weights = row.map(|logit| f64::from(logit / temperature).exp());
        let total: f64 = weights.iter().sum();
        let expected = weights.map(|w| w / total * f64::from(draws));
        let chi_square: f64 = counts.iter().zip(expected).map(|(count, e)| (count - e) * (count - e) / e).sum();
        // 9 degrees of freedom: the statistic exceeds 27.9 once in a thousand seeds, and falls below 1.15 as rarely.
        assert!((1.15..27.9).contains(&chi_square), "chi-square is {chi_square} at temperature {temperature}");
    }
}

/// Logits that depend on the step and the token, made without libm.
fn synthetic_row(step: u32, vocab_size: u32) -> Vec<f32> {
    (0..vocab_size)
        .map(|id| {
            let hash = (step * 7919 + id).wrapping_mul(2_654_435_761) >> 16;
            (hash % 1000) as f32 * 0.012 - 6.0
        })
        .collect()
}

fn text(params: &SamplingParams, steps: u32) -> Vec<u32> {
    let mut sampler = sampler(params, 500);
    let mut scratch = Scratch::default();
    (0..steps)
        .map(|step| {
            let id = sampler.sample(&synthetic_row(step, 500), &mut scratch).unwrap();
            sampler.accept(id);
            id
        })
        .collect()
}

#[test]
fn a_seed_gives_these_tokens_on_every_machine() {
    let defaults = SamplingParams { seed: Some(42), ..SamplingParams::default() };
    assert_eq!(text(&defaults, 12), [242, 285, 357, 428, 337, 222, 54, 258, 197, 453, 20, 9]);
    let open = SamplingParams { repeat_penalty: 1.3, frequency_penalty: 0.2, seed: Some(u64::MAX), ..plain() };
    assert_eq!(text(&open, 12), [189, 156, 117, 108, 180, 489, 12, 125, 149, 345, 344, 143]);
    let typical = SamplingParams { typical_p: 0.6, top_p: 0.9, top_k: 0, seed: Some(0), ..SamplingParams::default() };
    assert_eq!(text(&typical, 12), [270, 184, 90, 189, 422, 198, 321, 235, 174, 54, 207, 119]);
}

#[test]
fn the_random_stream_is_chacha12() {
    // Key stream of ChaCha with 12 rounds for a 256-bit key and nonce of zeros (draft-strombergson-chacha-test-vectors).
    let stream: [[u8; 8]; 2] =
        [[0x9b, 0xf4, 0x9a, 0x6a, 0x07, 0x55, 0xf9, 0x53], [0x81, 0x1f, 0xce, 0x12, 0x5f, 0x26, 0x83, 0xd5]];
    let mut sampler = sampler(&SamplingParams { seed: Some(0), ..plain() }, 1);
    for bytes in stream {
        let n = u64::from_le_bytes(bytes) >> 11;
        assert_eq!(uniform(&mut sampler.rng), n as f64 / 9_007_199_254_740_992.0);
    }
}

#[test]
fn every_draw_takes_one_number_and_greedy_takes_none() {
    let mut scratch = Scratch::default();
    let mut one_left = sampler(&SamplingParams { top_k: 1, ..plain() }, 3);
    let mut all_left = sampler(&plain(), 3);
    let mut greedy = sampler(&SamplingParams { temperature: 0.0, ..plain() }, 3);
    let mut fails = sampler(&plain(), 3);
    for _ in 0..5 {
        one_left.sample(&[0.0, 1.0, 2.0], &mut scratch).unwrap();
        all_left.sample(&[0.0, 1.0, 2.0], &mut scratch).unwrap();
        greedy.sample(&[0.0, 1.0, 2.0], &mut scratch).unwrap();
        fails.sample(&[f32::NAN; 3], &mut scratch).unwrap_err();
        fails.sample(&[-INF; 3], &mut scratch).unwrap_err();
    }
    assert_eq!(one_left.rng, all_left.rng);
    assert_eq!(greedy.rng, fails.rng);
    assert_ne!(one_left.rng, greedy.rng);
}

#[test]
fn a_random_seed_can_be_read_back() {
    let random = SamplingParams { seed: None, ..plain() };
    let mut first = sampler(&random, 500);
    let mut again = sampler(&SamplingParams { seed: Some(first.seed()), ..plain() }, 500);
    assert_eq!(again.seed(), first.seed());
    let mut scratch = Scratch::default();
    for step in 0..50 {
        let row = synthetic_row(step, 500);
        assert_eq!(first.sample(&row, &mut scratch), again.sample(&row, &mut scratch));
    }
    let seeds: std::collections::HashSet<u64> = (0..20).map(|_| sampler(&random, 1).seed()).collect();
    assert!(seeds.len() > 15);
}

#[test]
fn temperature_zero_takes_the_highest_logit_and_the_lowest_id() {
    let greedy = SamplingParams { temperature: 0.0, ..SamplingParams::default() };
    assert_eq!(sample(&greedy, &[1.0, 3.0, 3.0, 2.0]), Ok(1));
    assert_eq!(sample(&greedy, &[-0.0, 0.0]), Ok(0));
    assert_eq!(sample(&greedy, &[-INF, f32::MIN]), Ok(1));
    // Also when the chain has no temperature stage.
    let no_stage = SamplingParams { samplers: vec![], ..greedy.clone() };
    assert_eq!(sample(&no_stage, &[1.0, 3.0, 3.0, 2.0]), Ok(1));
    // And when a later stage than the first passes over the likeliest token.
    let late = vec![SamplerKind::TopK, SamplerKind::Penalties];
    let late = SamplingParams { samplers: late, repeat_penalty: 2.0, ..greedy.clone() };
    let mut sampler = sampler(&late, 3);
    sampler.accept_prompt(&[1]);
    assert_eq!(sampler.sample(&[1.0, 3.0, 2.9], &mut Scratch::default()), Ok(2));
    let biased = SamplingParams { logit_bias: bias(&[(3, 1.5)]), ..greedy };
    assert_eq!(sample(&biased, &[1.0, 3.0, 3.0, 2.0]), Ok(3));
}

#[test]
fn a_ban_of_all_but_one_token_forces_it() {
    let row = synthetic_row(3, 300);
    for forced in [0, 17, 299] {
        let ban: Vec<_> = (0..300).filter(|&id| id != forced).map(|id| (id, -INF)).collect();
        for params in [SamplingParams::default(), plain(), SamplingParams { temperature: 0.0, ..plain() }] {
            let params = SamplingParams { logit_bias: bias(&ban), ..params };
            assert_eq!(sample(&params, &row), Ok(forced));
        }
    }
}

#[test]
fn a_bias_of_minus_100_forces_what_it_spares() {
    let row = synthetic_row(3, 300);
    let most: Vec<_> = (0..300).filter(|&id| id != 123).map(|id| (id, -100.0)).collect();
    let params = SamplingParams { logit_bias: bias(&most), ..SamplingParams::default() };
    assert_eq!(sample(&params, &row), Ok(123));
}

#[test]
fn end_tokens_are_banned_on_request() {
    let row = [0.0, 5.0, 9.0, 7.0];
    let greedy = SamplingParams { temperature: 0.0, ..plain() };
    let eog = [2, 3, 70_000];
    let mut scratch = Scratch::default();

    let ignore = SamplingParams { ignore_eos: true, ..greedy.clone() };
    let mut sampler = Sampler::new(&ignore, 4, &eog).unwrap();
    for _ in 0..5 {
        assert_eq!(sampler.sample(&row, &mut scratch), Ok(1));
        sampler.accept(1);
    }

    let mut sampler = Sampler::new(&SamplingParams { min_tokens: 2, ..greedy }, 4, &eog).unwrap();
    sampler.accept_prompt(&[1, 1, 1]);
    for expected in [1, 1, 2] {
        assert_eq!(sampler.sample(&row, &mut scratch), Ok(expected));
        sampler.accept(expected);
    }
}

#[test]
fn penalties_follow_the_window() {
    let row = [2.0f32, -2.0, 1.0, 0.0];
    let params = SamplingParams {
        repeat_penalty: 2.0,
        presence_penalty: 0.25,
        frequency_penalty: 0.5,
        repeat_last_n: 3,
        ..plain()
    };
    let logits_after = |params: &SamplingParams, history: &[u32]| {
        let mut sampler = sampler(params, row.len());
        sampler.accept_prompt(history);
        sampler.adjust(&row, None, &mut Vec::new()).to_vec()
    };
    // Token 0 has left the window.
    assert_eq!(logits_after(&params, &[0, 1, 3, 1]), [2.0, -4.0 - 1.0 - 0.25, 1.0, -0.5 - 0.25]);
    assert_eq!(logits_after(&params, &[]), row);
    let off = SamplingParams { repeat_last_n: 0, ..params.clone() };
    assert_eq!(logits_after(&off, &[0, 1, 3, 1]), row);
    let all = SamplingParams { repeat_last_n: -1, ..params };
    assert_eq!(logits_after(&all, &[0, 1, 3, 1]), [1.0 - 0.5 - 0.25, -4.0 - 1.0 - 0.25, 1.0, -0.5 - 0.25]);
}

#[test]
fn broken_logits_are_errors_that_name_the_token() {
    let long = |at: usize, value: f32| {
        let mut row = vec![0.5f32; 1000];
        row[at] = value;
        row
    };
    for at in [0, 255, 256, 700, 999] {
        for value in [f32::NAN, -f32::NAN, INF] {
            let error = sample(&plain(), &long(at, value)).unwrap_err();
            assert!(error.to_string().starts_with(&format!("the logits are not finite: token {at} has")), "{error}");
        }
        assert!(sample(&plain(), &long(at, -INF)).is_ok());
    }
    // A ban does not hide broken logits.
    let ban = SamplingParams { logit_bias: bias(&[(1, -INF)]), ..plain() };
    assert!(matches!(sample(&ban, &[0.0, INF]), Err(SampleError::NotFinite { id: 1, value: INF })));
    assert_eq!(sample(&plain(), &[-INF; 3]), Err(SampleError::NothingLeft { vocab_size: 3 }));
    assert_eq!(sample(&ban, &[-INF, 0.0]), Err(SampleError::NothingLeft { vocab_size: 2 }));
    assert_eq!(sample(&plain(), &[]), Err(SampleError::NothingLeft { vocab_size: 0 }));
    let mut three = sampler(&plain(), 3);
    let error = three.sample(&[0.0; 4], &mut Scratch::default()).unwrap_err();
    assert_eq!(error, SampleError::LogitsLen { expected: 3, found: 4 });
    assert!(matches!(LogSoftmax::new(&[0.0, f32::NAN]), Err(SampleError::NotFinite { id: 1, .. })));
    assert!(matches!(LogSoftmax::new(&[-INF]), Err(SampleError::NothingLeft { vocab_size: 1 })));
    assert!(matches!(LogSoftmax::new(&[]), Err(SampleError::NothingLeft { vocab_size: 0 })));
}

#[test]
fn a_last_token_of_any_probability_ends_the_draw() {
    let mut candidates = Candidates::default();
    candidates.fill(&[0.0, 0.0, -900.0], usize::MAX);
    assert_eq!(candidates.pick(0.0), Some(0));
    assert_eq!(candidates.pick(0.5), Some(1));
    assert_eq!(candidates.pick(1.0 - f64::EPSILON / 2.0), Some(1));
    assert_eq!(candidates.pick(1.0), Some(1));
}
