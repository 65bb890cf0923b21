//! The logits of a sequence are the same bits whatever runs beside it, however it is cut, on any number of threads,
//! with any instructions, packed or not, in fresh blocks or used ones.

#![allow(clippy::unwrap_used)]

mod gguf_builder;
mod support;

use proptest::prelude::*;
use puna_kernels::dtype::FORMATS;
use puna_kernels::{Acts, DType, KvType};
use puna_model::{BackendKind, Batch, Gguf, LoadOptions, Outputs, Row, SeqId, Span, Tap, arch};
use support::golden::Golden;
use support::maker::{ARCHS, Experts, Rope, Spec, parse};
use support::prompt::Prompt;
use support::run::{KV_TYPES, Run, assert_same, plain, variants};
use support::{Fixture, Rng};

/// One sequence of a model, computed whole: what every other way to compute it must give.
struct Case<'a> {
    name: &'a str,
    gguf: &'a Gguf,
    kind: KvType,
    tokens: Vec<u32>,
    whole: Vec<f32>,
    rng: Rng,
}

/// Tokens at most that sequences of [`check`] go on with before they are cut again.
const JUNK: usize = 20;

/// All equalities of a random sequence of `n` tokens.
fn check(name: &str, gguf: &Gguf, kind: KvType, n: usize, seed: u64) {
    let mut run = Run::new(gguf, &plain(), kind);
    run.total = n + JUNK;
    let mut rng = Rng(seed);
    let tokens = rng.tokens(n, run.vocab_size());
    let whole = run.alone(&tokens, &[n]);
    assert_depends_on_tokens(&whole, &tokens, run.vocab_size(), name);
    let mut case = Case { name, gguf, kind, tokens, whole, rng };
    case.cut(&mut run);
    case.beside_others(&mut run);
    case.beside_poison(&mut run);
    case.in_used_blocks(&mut run);
    case.truncated(&mut run);
    case.some_outputs(&mut run);
    case.embedded(&mut run);
    for options in variants() {
        case.otherwise(&options);
    }
}

/// Rows of a model that is broken may be equal in every way because they say nothing.
fn assert_depends_on_tokens(logits: &[f32], tokens: &[u32], vocab_size: usize, name: &str) {
    for (i, pair) in tokens.windows(2).enumerate().filter(|(_, pair)| pair[0] != pair[1]) {
        let (a, b) = logits[i * vocab_size..][..2 * vocab_size].split_at(vocab_size);
        assert_ne!(a, b, "{name}: the same logits after tokens {pair:?} at {i}");
    }
}

impl Case<'_> {
    #[track_caller]
    fn same(&self, run: &Run, got: &[f32], what: &str) {
        self.same_from(run, 0, got, what);
    }

    /// Logits of the positions from `start` on.
    #[track_caller]
    fn same_from(&self, run: &Run, start: usize, got: &[f32], what: &str) {
        let vocab_size = run.vocab_size();
        let what = format!("{} with {} cache: {what}", self.name, self.kind);
        assert_same(got, &self.whole[start * vocab_size..], vocab_size, &what);
    }

    fn cut(&self, run: &mut Run) {
        for sizes in [&[1][..], &[2], &[7], &[33, 1, 1, 12]] {
            let got = run.alone(&self.tokens, sizes);
            self.same(run, &got, &format!("chunks of {sizes:?}"));
        }
    }

    fn beside_others(&mut self, run: &mut Run) {
        let vocab_size = run.vocab_size();
        let mut seqs = vec![self.tokens.clone()];
        seqs.extend([1, 5, 40, 17].map(|n| self.rng.tokens(n, vocab_size)));
        let got = run.together(&seqs, &mut self.rng);
        self.same(run, &got[0], "beside others");
        for (seq, got) in seqs.iter().zip(&got).skip(1) {
            let alone = run.alone(seq, &[seq.len()]);
            assert_same(got, &alone, vocab_size, &format!("{}: another of {} tokens", self.name, seq.len()));
        }
    }

    /// Nothing of a sequence that is all NaN reaches another in the same batch.
    fn beside_poison(&self, run: &mut Run) {
        let mut poison = Batch { embeds: vec![f32::NAN; run.model.config().dim], ..Batch::default() };
        let [seq, bad] = [(); 2].map(|()| run.kv.add());
        let mut got = Vec::new();
        for (i, chunk) in self.tokens.chunks(9).enumerate() {
            let batch = &mut poison;
            batch.rows.clear();
            batch.spans.clear();
            batch.outputs.clear();
            let rows = chunk.len();
            let span = Span { seq: bad, start: run.len(bad), rows, total: run.total, draft: 0 };
            for own in [i % 2 == 0, i % 2 != 0] {
                if own {
                    run.push(batch, seq, chunk, Outputs::All);
                } else {
                    batch.rows.extend(vec![Row::Embed(0); rows]);
                    batch.spans.push(span);
                }
            }
            got.extend(run.forward(&poison));
        }
        self.same(run, &got, "beside NaN");
        [seq, bad].into_iter().for_each(|seq| run.kv.remove(seq));
    }

    /// What sequences that have ended left behind is not seen, whatever it is.
    fn in_used_blocks(&self, run: &mut Run) {
        let n = self.tokens.len();
        let seqs: Vec<SeqId> = [n, 3 * n, 1].map(|n| run.poisoned(n)).to_vec();
        seqs.into_iter().for_each(|seq| run.kv.remove(seq));
        for sizes in [&[n][..], &[9]] {
            let got = run.alone(&self.tokens, sizes);
            self.same(run, &got, "in blocks full of NaN");
        }
    }

    fn truncated(&mut self, run: &mut Run) {
        let n = self.tokens.len();
        for keep in [n, n - 1, n / 2, 32, 1, 0].map(|keep| keep.min(n)) {
            let seq = run.kv.add();
            run.feed_chunks(seq, &self.tokens[..keep], &[11]);
            let junk = 1 + self.rng.below(JUNK);
            let junk = self.rng.tokens(junk, run.vocab_size());
            run.feed_chunks(seq, &junk, &[5]);
            let kept = run.kv.truncate(seq, keep);
            assert!(kept == keep || kept == 0, "{}: {kept} positions kept of {keep}", self.name);
            assert_eq!(run.len(seq), kept);
            let got = run.feed_chunks(seq, &self.tokens[kept..], &[8]);
            self.same_from(run, kept, &got, &format!("from {kept} on after a cut at {keep}"));
            run.kv.remove(seq);
        }
    }

    fn some_outputs(&mut self, run: &mut Run) {
        let (n, vocab_size) = (self.tokens.len() as u32, run.vocab_size());
        let some = (0..n).filter(|_| self.rng.below(3) == 0).collect();
        for outputs in [vec![], vec![0], vec![n - 1], some] {
            let seq = run.kv.add();
            let mut batch = Batch::default();
            run.push(&mut batch, seq, &self.tokens, Outputs::None);
            let rows = outputs.iter().map(|&o| &self.whole[o as usize * vocab_size..][..vocab_size]);
            let wanted = rows.flatten().copied().collect::<Vec<f32>>();
            batch.outputs = outputs;
            let got = run.forward(&batch);
            assert_same(&got, &wanted, vocab_size, &format!("{}: logits of {:?}", self.name, batch.outputs));
            run.kv.remove(seq);
        }
    }

    /// Rows that bring their embedding along, beside tokens.
    fn embedded(&mut self, run: &mut Run) {
        let mut tap = Embeddings::default();
        let seq = run.kv.add();
        let mut batch = Batch::default();
        run.push(&mut batch, seq, &self.tokens, Outputs::All);
        let got = run.model.forward_with(&batch, &mut run.kv, &mut tap).unwrap().to_vec();
        self.same(run, &got, "with a tap");
        run.kv.remove(seq);
        batch.spans[0].seq = run.kv.add();
        batch.embeds = tap.0;
        for (i, row) in batch.rows.iter_mut().enumerate().filter(|_| self.rng.below(2) == 0) {
            *row = Row::Embed(i as u32);
        }
        let got = run.forward(&batch);
        self.same(run, &got, "with rows of embeddings");
        run.kv.remove(batch.spans[0].seq);
    }

    fn otherwise(&self, options: &LoadOptions) {
        let mut run = Run::new(self.gguf, options, self.kind);
        run.total = self.tokens.len() + JUNK;
        let n = self.tokens.len();
        let got = run.alone(&self.tokens, &[n / 2, 1, 1, n]);
        self.same(&run, &got, &format!("{options:?}"));
    }
}

#[derive(Default)]
struct Embeddings(Vec<f32>);

impl Tap for Embeddings {
    fn residual(&mut self, layer: usize, x: &mut Acts) {
        if layer == 0 {
            self.0.extend(x.values());
        }
    }

    fn wants_all_rows(&self) -> bool {
        true
    }
}

#[test]
fn models_of_the_testdata() {
    for (i, fixture) in Fixture::all().iter().enumerate() {
        let gguf = fixture.gguf();
        let rope = arch::from_gguf(&gguf).unwrap().1.rope;
        // Three blocks; two would never merge a middle one. Where long sequences turn otherwise, a short one too.
        let short = rope.long.map(|long| long.original_context - JUNK);
        for n in [Some(70), short].into_iter().flatten() {
            check(&fixture.name, &gguf, KV_TYPES[i % KV_TYPES.len()], n, i as u64);
        }
    }
}

/// Prompts of the testdata, those with images among them, cut and beside others.
#[test]
fn prompts_with_positions_and_images() {
    for fixture in Fixture::all() {
        let mut run = Run::new(&fixture.gguf(), &plain(), KvType::F16);
        let (prompt, vocab_size) = (Golden::read(&fixture).prompt, run.vocab_size());
        let mut other = Prompt::tokens(&Rng(8).tokens(prompt.len(), vocab_size));
        if !prompt.positions.is_empty() {
            other.positions = (0..other.len() as u32).map(|p| [p; 3]).collect();
        }
        let whole = prompt_in_chunks(&mut run, &prompt, prompt.len(), None);
        for chunk in [1, 5, 20] {
            let got = prompt_in_chunks(&mut run, &prompt, chunk, None);
            assert_same(&got, &whole, vocab_size, &format!("{} in chunks of {chunk}", fixture.name));
            let got = prompt_in_chunks(&mut run, &prompt, chunk, Some(&other));
            assert_same(&got, &whole, vocab_size, &format!("{} in chunks of {chunk}, beside another", fixture.name));
        }
    }
}

/// Logits of a prompt, beside another of the same length where there is one.
fn prompt_in_chunks(run: &mut Run, prompt: &Prompt, chunk: usize, other: Option<&Prompt>) -> Vec<f32> {
    let [seq, other_seq] = [(); 2].map(|()| run.kv.add());
    let mut logits = Vec::new();
    let mut batch = Batch::default();
    for start in (0..prompt.len()).step_by(chunk) {
        let range = start..prompt.len().min(start + chunk);
        batch.clear();
        if let Some(other) = other {
            other.push(&mut batch, other_seq, range.clone(), Outputs::None);
        }
        prompt.push(&mut batch, seq, range, Outputs::All);
        logits.extend(run.forward(&batch));
    }
    [seq, other_seq].into_iter().for_each(|seq| run.kv.remove(seq));
    logits
}

#[test]
fn every_weight_format() {
    for (i, format) in FORMATS.iter().enumerate() {
        let spec = Spec {
            n_layers: 1,
            n_heads: 6,
            n_kv_heads: 3,
            head_dim: 32,
            dim: 256,
            ffn_dim: 256,
            vocab_size: 70,
            types: vec![format.dtype],
            seed: i as u64,
            ..Spec::default()
        };
        check(format.name, &spec.gguf(), KV_TYPES[i % KV_TYPES.len()], 34, i as u64);
    }
}

#[test]
fn formats_mixed_in_one_file() {
    use DType::*;
    let shape = Spec { head_dim: 64, dim: 256, ffn_dim: 512, vocab_size: 33, ..Spec::default() };
    let experts = Some(Experts { n: 5, used: 2, ffn_dim: 256, split: false, sigmoid: false });
    let specs = [
        Spec { types: vec![Q6_K, Q4_K, Q4_K, Q5_K, F16, Q8_0, IQ4_XS], biases: true, ..shape.clone() },
        Spec { types: vec![F32, Q4_0, IQ3_S, BF16, TQ2_0], experts, ..shape.clone() },
        Spec { types: vec![MXFP4, Q8_0, NVFP4], experts, ..shape },
    ];
    for spec in specs {
        check(&format!("{:?}", spec.types), &spec.gguf(), KvType::F16, 34, 3);
    }
}

#[test]
fn every_architecture_quantized() {
    for (i, arch) in ARCHS.into_iter().enumerate() {
        let experts = Experts { n: 5, used: 2, ffn_dim: 64, split: i % 3 == 0, sigmoid: arch == "minimax-m2" };
        let experts = (i % 2 == 0 || arch == "minimax-m2").then_some(experts);
        let types = vec![DType::Q4_0, DType::Q8_0, DType::Q5_1];
        let spec = Spec { arch, ffn_dim: 96, experts, biases: i % 2 == 1, types, seed: i as u64, ..Spec::default() };
        check(arch, &spec.gguf(), KV_TYPES[i % KV_TYPES.len()], 40, i as u64);
    }
}

#[test]
fn heads_of_any_ratio() {
    let ratios = [(7, 1), (14, 2), (6, 2), (5, 5), (24, 1), (20, 1), (9, 3)];
    for (i, (n_heads, n_kv_heads)) in ratios.into_iter().enumerate() {
        let spec = Spec {
            n_heads,
            n_kv_heads,
            head_dim: [8, 20, 36, 6][i % 4],
            dim: [24, 44, 50][i % 3],
            ffn_dim: [37, 64, 100][i % 3],
            vocab_size: [41, 64, 97][i % 3],
            window: (i % 2 == 1).then_some(19),
            biases: i % 3 == 0,
            seed: i as u64,
            ..Spec::default()
        };
        check(&format!("{n_heads} heads over {n_kv_heads}"), &spec.gguf(), KV_TYPES[i % KV_TYPES.len()], 67, i as u64);
    }
}

/// A case that fails is shown whole, its seed included: nothing needs to be kept of it.
fn cases(cases: u32) -> ProptestConfig {
    ProptestConfig { cases, max_shrink_iters: 100, failure_persistence: None, ..ProptestConfig::default() }
}

prop_compose! {
    fn experts()(
        n in 1usize..40, used in 1usize..6, ffn_dim in 1usize..40, split: bool, sigmoid: bool,
    ) -> Experts {
        Experts { n, used: used.min(n), ffn_dim, split, sigmoid }
    }
}

prop_compose! {
    /// A float model of any shape.
    fn float_model()(
        arch in proptest::sample::select(&ARCHS[..]),
        (n_layers, n_kv_heads, group, half) in (1usize..4, 1usize..4, 1usize..6, 1usize..24),
        (dim, ffn_dim, vocab_size) in (3usize..80, 1usize..90, 2usize..70),
        rope in prop_oneof![
            Just(Rope::Plain), Just(Rope::Partial(2)), Just(Rope::Linear), Just(Rope::Yarn), Just(Rope::Llama3),
            Just(Rope::Long(32)), Just(Rope::Long(500)),
        ],
        window in proptest::option::of(prop_oneof![1u32..5, 5u32..70, Just(32u32), Just(33u32)]),
        windowed in any::<[bool; 3]>(),
        experts in proptest::option::of(experts()),
        (biases, scales, tied, mixed) in any::<(bool, bool, bool, bool)>(),
        types in proptest::collection::vec(prop_oneof![Just(DType::F32), Just(DType::F16), Just(DType::BF16)], 1..4),
        seed: u64,
    ) -> Spec {
        let windowed = if mixed { windowed[..n_layers].to_vec() } else { vec![] };
        Spec {
            arch, n_layers, n_heads: n_kv_heads * group, n_kv_heads, head_dim: 2 * half, dim, ffn_dim, vocab_size, rope,
            window, windowed, experts, biases, scales, tied, types, seed,
        }
    }
}

prop_compose! {
    /// A model whose matrices have any formats.
    fn quantized_model()(
        spec in float_model(),
        (dim, ffn_dim) in prop_oneof![Just((256, 256)), Just((64, 96)), Just((32, 160)), Just((192, 64))],
        head_dim in prop_oneof![Just(16usize), Just(32), Just(20)],
        types in proptest::collection::vec(0..FORMATS.len(), 1..6),
    ) -> Spec {
        let experts = spec.experts.map(|e| Experts { ffn_dim: 64, n: e.n.min(6), used: e.used.min(3).min(e.n), ..e });
        let n_layers = spec.n_layers.min(2);
        let windowed = spec.windowed.into_iter().take(n_layers).collect();
        let types = types.into_iter().map(|i| FORMATS[i].dtype).collect();
        Spec { n_layers, dim, ffn_dim, head_dim, experts, windowed, types, ..spec }
    }
}

proptest! {
    #![proptest_config(cases(24))]

    #[test]
    fn float_models_of_any_shape(spec in float_model(), kind in proptest::sample::select(&KV_TYPES[..])) {
        check("made at random", &spec.gguf(), kind, 66, spec.seed);
    }

    #[test]
    fn quantized_models_of_any_shape(spec in quantized_model(), kind in proptest::sample::select(&KV_TYPES[..])) {
        check("made at random", &spec.gguf(), kind, 36, spec.seed);
    }
}

/// What a number is, where NaN is NaN whatever its payload.
fn kinds(logits: &[f32]) -> Vec<Option<u32>> {
    logits.iter().map(|x| (!x.is_nan()).then(|| x.to_bits())).collect()
}

proptest! {
    #![proptest_config(cases(60))]

    /// Weights of any bits, infinities and NaN among them, are computed, and everywhere the same.
    #[test]
    fn weights_of_any_bits(spec in quantized_model(), rare in any::<bool>()) {
        let mut rng = Rng(spec.seed);
        let hostile = spec.builder().map(|mut t| {
            if t.name != b"rope_freqs.weight" && !t.name.starts_with(b"rope_factors") {
                let one_in = if rare { 200 } else { 1 };
                for byte in &mut t.data {
                    if rng.below(one_in) == 0 {
                        *byte = rng.bits() as u8;
                    }
                }
            }
            vec![t]
        });
        let gguf = parse(&hostile);
        let tokens = Rng(1).tokens(36, spec.vocab_size);
        let expected = Run::new(&gguf, &plain(), KvType::F16).alone(&tokens, &[36]);
        for options in variants().into_iter().filter(|o| o.threads == 1) {
            let got = Run::new(&gguf, &options, KvType::F16).alone(&tokens, &[5]);
            prop_assert_eq!(kinds(&got), kinds(&expected), "{:?}", options);
        }
        let reference = LoadOptions { backend: BackendKind::Reference, ..plain() };
        prop_assert_eq!(Run::new(&gguf, &reference, KvType::F16).alone(&tokens, &[36]).len(), expected.len());
    }
}
