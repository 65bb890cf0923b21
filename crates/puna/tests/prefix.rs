//! Prefixes that are in the cache are not computed again, and change nothing.

#![allow(clippy::unwrap_used)]

#[path = "../../model/tests/gguf_builder/mod.rs"]
mod gguf_builder;
mod made;
mod support;

use made::maker::{Rope, Spec};
use made::{Rng, made, small};
use puna::{Engine, EngineOptions, Error, Prompt, Request, Row};
use support::{answer, check_empty, engine, greedy, model, options, prompt, request, seeded};

fn cached(engine: &mut Engine, r: Request) -> usize {
    answer(engine, r).1.stats.cached_tokens
}

#[test]
fn a_second_turn_computes_what_follows_the_first() {
    for name in ["llama-gqa", "mistral-swa", "mixtral-moe"] {
        let mut fresh = engine(name, 2, 512);
        let mut warm = engine(name, 2, 64);
        for (len, said) in [(70, 20), (64, 32), (100, 1), (31, 2), (5, 120)] {
            let first = prompt(len, len as u32);
            let (answer_1, _) = answer(&mut warm, request(first.clone(), &seeded(4), said));
            let history = [&first[..], &answer_1.tokens].concat();
            let second = [&history[..], &prompt(9, 2)].concat();
            // The last token of an answer is said and not computed.
            let common = history.len() - 1;
            let mut r = request(second, &seeded(5), 12);
            r.logprobs = Some(5);
            let (a, cold) = answer(&mut fresh, r.clone());
            let (b, finish) = answer(&mut warm, r.clone());
            assert_eq!(a, b);
            assert_eq!((cold.stats.cached_tokens, finish.stats.cached_tokens), (0, common / 32 * 32), "{name}, {len}");
            check_empty(&warm);
            fresh = engine(name, 2, 512);
        }
    }
}

#[test]
fn common_prefixes_are_whole_blocks() {
    let mut engine = engine("llama-gqa", 1, 512);
    let first = prompt(200, 1);
    assert_eq!(cached(&mut engine, request(first.clone(), &greedy(), 1)), 0);
    for common in [200, 199, 193, 192, 160, 100, 64, 63, 32, 31, 0] {
        let mut other = first[..common].to_vec();
        other.extend([501, 502, 503]);
        assert_eq!(cached(&mut engine, request(other, &greedy(), 1)), common / 32 * 32, "{common} in common");
    }
    // Of a prompt that is there as a whole, the last token is computed.
    for (len, expected) in [(200, 192), (193, 192), (192, 160), (33, 32), (32, 0), (1, 0)] {
        assert_eq!(cached(&mut engine, request(first[..len].to_vec(), &greedy(), 1)), expected, "{len} tokens");
    }
    check_empty(&engine);
}

/// Those that arrive together and begin alike compute the beginning once.
#[test]
fn what_one_computes_the_others_take() {
    let mut alone = engine("llama-gqa", 1, 512);
    let mut together = engine("llama-gqa", 1, 32);
    let requests: Vec<Request> =
        (0..6).map(|i| request([prompt(160, 1), prompt(5 + i, i as u32)].concat(), &seeded(i as u64), 8)).collect();
    let ids: Vec<_> = requests.iter().map(|r| together.add(r.clone()).unwrap()).collect();
    let mut answers = vec![support::Answer::default(); 6];
    let mut cached = vec![0; 6];
    while !together.is_idle() {
        for event in together.step().unwrap() {
            let i = ids.iter().position(|id| *id == event.id).unwrap();
            answers[i].take(event);
            if let Some(finish) = &event.finish {
                cached[i] = finish.stats.cached_tokens;
            }
        }
        together.check().unwrap();
    }
    assert_eq!(cached, [0, 160, 160, 160, 160, 160]);
    for (r, got) in requests.into_iter().zip(answers) {
        assert_eq!(got, answer(&mut alone, r).0);
    }
}

/// A long text's early blocks have left the window, and can be found all the same.
#[test]
fn windows_give_back_what_can_be_found() {
    let mut engine = engine("mistral-swa", 1, 512);
    let long = prompt(200, 1);
    answer(&mut engine, request(long.clone(), &greedy(), 4));
    let short = [&long[..40], &prompt(5, 9)[..]].concat();
    let (a, finish) = answer(&mut engine, request(short.clone(), &greedy(), 12));
    assert_eq!(finish.stats.cached_tokens, 32);
    assert_eq!(a, answer(&mut support::engine("mistral-swa", 1, 512), request(short, &greedy(), 12)).0);
}

/// As long as memory lasts.
#[test]
fn a_bounded_cache_forgets() {
    let block = 32 * kv_bytes_a_position();
    let small = EngineOptions { kv_bytes: Some(8 * block), ..options(1, 512) };
    let mut engine = Engine::load(model("llama-gqa"), &small, &mut |_, _| {}).unwrap();
    assert_eq!((engine.ctx(), engine.status().kv_limit), (256, 8 * block));
    assert!(engine.notices().is_empty(), "{:?}: the context of the model is 256", engine.notices());
    let first = prompt(100, 1);
    let ask = |engine: &mut Engine, tokens: &[u32]| cached(engine, request(tokens.to_vec(), &greedy(), 1));
    assert_eq!(ask(&mut engine, &first), 0);
    assert_eq!(ask(&mut engine, &prompt(120, 2)), 0);
    assert_eq!(ask(&mut engine, &first), 96);
    assert_eq!(ask(&mut engine, &prompt(220, 3)), 0);
    assert!(ask(&mut engine, &first) < 96);
    check_empty(&engine);
    assert!(engine.status().kv_cached > 0);
}

fn kv_bytes_a_position() -> usize {
    let engine = engine("llama-gqa", 1, 8);
    let c = engine.config();
    c.n_layers * c.n_kv_heads * 2 * c.head_dim.next_multiple_of(16) * 2
}

#[test]
fn requests_that_never_fit() {
    let block = 32 * kv_bytes_a_position();
    let load = |kv_bytes, ctx| {
        let options = EngineOptions { kv_bytes: Some(kv_bytes), ctx, ..options(1, 512) };
        Engine::load(model("llama-gqa"), &options, &mut |_, _| {})
    };
    for bytes in [0, 1, block - 1] {
        assert_eq!(load(bytes, None).err().unwrap(), Error::KvBytes { bytes, block });
    }
    let mut engine = load(2 * block + 1, Some(200)).unwrap();
    assert_eq!(engine.ctx(), 64);
    assert!(engine.notices()[0].contains("64") && engine.notices()[0].contains("200"), "{:?}", engine.notices());
    let error = engine.add(request(prompt(64, 1), &greedy(), 1)).unwrap_err();
    assert_eq!(error, Error::ContextExceeded { prompt: 64, ctx: 64 });
    let (a, _) = answer(&mut engine, request(prompt(50, 1), &greedy(), 1000));
    assert_eq!(a.tokens.len(), 14);
    check_empty(&engine);
}

/// Where long sequences turn otherwise: an answer that crosses the length is computed again as a long one.
#[test]
fn rotations_do_not_mix() {
    let spec = Spec { rope: Rope::Long(60), ..Spec::default() };
    let mut warm = made(&spec, &options(1, 40)).unwrap();
    for (len, n) in [(50, 40), (50, 8), (70, 10), (90, 9), (50, 30), (61, 1), (60, 1), (60, 2)] {
        let mut r = request(small(len, 1), &seeded(len as u64), n);
        r.logprobs = Some(2);
        let (a, cold) = answer(&mut made(&spec, &options(1, 512)).unwrap(), r.clone());
        let (b, _) = answer(&mut warm, r.clone());
        assert_eq!(a, b, "{len} and {n} more");
        assert_eq!(cold.stats.cached_tokens, 0);
        let several = Request { n: 3, ..r };
        let mut got = vec![support::Answer::default(); 3];
        warm.generate(several, |event| {
            got[event.sample].take(event);
            true
        })
        .unwrap();
        assert_eq!(got[0], a);
        check_empty(&warm);
    }
    assert_eq!(cached(&mut warm, request(small(70, 1), &greedy(), 1)), 64);
    assert_eq!(cached(&mut warm, request(small(60, 1), &greedy(), 1)), 32);
}

/// Rows of an image are known by their bytes.
#[test]
fn embedding_rows() {
    let spec = Spec::default();
    let mut warm = made(&spec, &options(1, 512)).unwrap();
    let mut rng = Rng(3);
    let mut image = Prompt::from(small(100, 1));
    image.embeds = (0..40 * spec.dim).map(|_| rng.number()).collect();
    (0..40).for_each(|i| image.rows[5 + i] = Row::Embed(i as u32));
    let mut other = image.clone();
    other.embeds[spec.dim * 30] += 1.0;
    let mut placed = image.clone();
    placed.positions = (0..100).map(|i| [i + i / 50; 3]).collect();
    for (p, expected) in [(&image, [0, 96]), (&other, [32, 96]), (&placed, [32, 96]), (&image, [96, 96])] {
        let mut r = request(p.clone(), &seeded(9), 30);
        r.logprobs = Some(2);
        let (fresh, _) = answer(&mut made(&spec, &options(1, 7)).unwrap(), r.clone());
        for expected in expected {
            let (got, finish) = answer(&mut warm, r.clone());
            assert_eq!(got, fresh);
            // What differs is in the second block.
            assert_eq!(finish.stats.cached_tokens, expected);
        }
    }
    let error = warm.add(request(Prompt { positions: vec![[0; 3]], ..image }, &greedy(), 1)).unwrap_err();
    assert!(error.to_string().contains("1 positions for 100 rows"), "{error}");
    check_empty(&warm);
}
