//! A warm sampler allocates nothing, whatever its chain.

#![allow(clippy::unwrap_used)]

use puna::sampler::{LogSoftmax, PartialSampling, Sampler, SamplingParams, Scratch};

const VOCAB_SIZE: u32 = 5_000;

fn row(step: u32) -> Vec<f32> {
    let hash = |id: u32| (step * 7919 + id).wrapping_mul(2_654_435_761) >> 12;
    (0..VOCAB_SIZE).map(|id| (hash(id) % 4096) as f32 * 0.004).collect()
}

fn chains() -> Vec<SamplingParams> {
    [
        r#"{}"#,
        r#"{"temperature": 0}"#,
        r#"{"top_k": 0}"#,
        r#"{"top_k": 0, "top_p": 1, "min_p": 0}"#,
        r#"{"top_k": 0, "typical_p": 0.9}"#,
        r#"{"repeat_penalty": 1.1, "frequency_penalty": 0.1, "logit_bias": {"7": -3}, "ignore_eos": true}"#,
        r#"{"samplers": ["temperature", "penalties", "min_p"], "presence_penalty": 0.5, "repeat_last_n": 16}"#,
    ]
    .map(|json| {
        let user: PartialSampling = serde_json::from_str(json).expect("this is JSON");
        PartialSampling::resolve(&user, &PartialSampling { seed: Some(3), ..PartialSampling::default() })
    })
    .to_vec()
}

#[test]
fn a_warm_sampler_allocates_nothing() {
    let rows: Vec<_> = (0..8).map(row).collect();
    let mut scratch = Scratch::default();
    let mut top = Vec::new();
    for params in chains() {
        let mut sampler = Sampler::new(&params, VOCAB_SIZE as usize, &[2]).unwrap();
        let mut steps = |count: usize| {
            for row in rows.iter().cycle().take(count) {
                let id = sampler.sample(row, &mut scratch).unwrap();
                sampler.accept(id);
                let softmax = LogSoftmax::new(row).unwrap();
                softmax.top(20, &mut scratch, &mut top);
                assert!(softmax.get(id).unwrap() <= top[0].logprob);
            }
        };
        steps(8);
        let warm = allocation_counter::measure(|| steps(150));
        assert_eq!(warm.count_total, 0, "{params:?}");
    }
}
