use serde_json::json;

use super::*;

fn field_of(error: SampleError) -> String {
    match error {
        SampleError::Param { field, .. } => field,
        other => panic!("{other}"),
    }
}

/// A lookup of metadata in a short list.
fn gguf(pairs: &[(&str, MetaValue<'static>)]) -> Result<(PartialSampling, Vec<String>), SampleError> {
    PartialSampling::from_gguf(|key| pairs.iter().find(|pair| pair.0 == key).map(|pair| pair.1))
}

#[test]
fn every_number_is_checked_and_named() {
    let base = SamplingParams::default();
    assert_eq!(base.validate(), Ok(()));
    type Set = fn(&mut SamplingParams, f32);
    let fields: [(&str, Set, &[f32]); 7] = [
        ("temperature", |p, x| p.temperature = x, &[-1.0, -0.001]),
        ("top_p", |p, x| p.top_p = x, &[-0.1, 1.1]),
        ("min_p", |p, x| p.min_p = x, &[-0.1, 1.1]),
        ("typical_p", |p, x| p.typical_p = x, &[-0.1, 1.1]),
        ("repeat_penalty", |p, x| p.repeat_penalty = x, &[0.0, -1.0]),
        ("presence_penalty", |p, x| p.presence_penalty = x, &[]),
        ("frequency_penalty", |p, x| p.frequency_penalty = x, &[]),
    ];
    for (name, set, bad) in fields {
        for &value in bad.iter().chain(&[f32::NAN, f32::INFINITY, f32::NEG_INFINITY]) {
            let mut params = base.clone();
            set(&mut params, value);
            let error = params.validate().unwrap_err();
            assert!(error.to_string().ends_with(&format!("found {value}")), "{error}");
            assert_eq!(field_of(error), name);
        }
        let mut params = base.clone();
        set(&mut params, 1.0);
        assert_eq!(params.validate(), Ok(()));
    }
    let last_n = SamplingParams { repeat_last_n: -2, ..base.clone() };
    assert_eq!(field_of(last_n.validate().unwrap_err()), "repeat_last_n");
    let long = SamplingParams { samplers: vec![SamplerKind::TopK; 33], ..base.clone() };
    assert_eq!(field_of(long.validate().unwrap_err()), "samplers");
    for (value, fine) in [(f32::NAN, false), (f32::INFINITY, false), (f32::NEG_INFINITY, true), (-100.0, true)] {
        let params = SamplingParams { logit_bias: LogitBias([(9, value)].into()), ..base.clone() };
        assert_eq!(params.validate().map_err(field_of), if fine { Ok(()) } else { Err("logit_bias[9]".into()) });
    }
    assert_eq!(
        SampleError::param("top_p", FRACTION.text, 2.0).to_string(),
        "top_p must be a number from 0 to 1, found 2"
    );
}

#[test]
fn a_biased_id_outside_the_vocabulary_is_refused() {
    let params = SamplingParams { logit_bias: LogitBias([(9, 1.0)].into()), ..SamplingParams::default() };
    assert!(super::super::Sampler::new(&params, 10, &[]).is_ok());
    let error = super::super::Sampler::new(&params, 9, &[]).unwrap_err();
    assert_eq!(error.to_string(), "logit_bias must be about ids below 9, found 9");
}

#[test]
fn the_user_overrides_the_file_and_the_file_the_defaults() {
    let file = PartialSampling { temperature: Some(0.3), top_k: Some(7), ..PartialSampling::default() };
    let user = PartialSampling { top_k: Some(0), seed: Some(5), ..PartialSampling::default() };
    let expected = SamplingParams { temperature: 0.3, top_k: 0, seed: Some(5), ..SamplingParams::default() };
    assert_eq!(PartialSampling::resolve(&user, &file), expected);
    let none = PartialSampling::default();
    assert_eq!(PartialSampling::resolve(&none, &none), SamplingParams::default());
}

#[test]
fn every_stated_parameter_is_applied() {
    let all = json!({
        "samplers": ["top_k", "typ_p"], "temperature": 0.5, "top_k": 1, "top_p": 0.25, "min_p": 0.125,
        "typical_p": 0.75, "min_keep": 2, "repeat_penalty": 1.5, "repeat_last_n": -1, "presence_penalty": -1.0,
        "frequency_penalty": 2.0, "logit_bias": {"3": -1.5, "4": false, "5": true}, "ignore_eos": true,
        "min_tokens": 3, "seed": 18_446_744_073_709_551_615u64,
    });
    let partial: PartialSampling = serde_json::from_value(all.clone()).unwrap();
    let whole: SamplingParams = serde_json::from_value(all).unwrap();
    assert_eq!(PartialSampling::resolve(&partial, &PartialSampling::default()), whole);
    assert_eq!(whole.logit_bias, LogitBias([(3, -1.5), (4, f32::NEG_INFINITY), (5, 0.0)].into()));
    assert_eq!(whole.samplers, [SamplerKind::TopK, SamplerKind::TypicalP]);

    let written = serde_json::to_value(&whole).unwrap();
    assert_eq!(written["logit_bias"]["4"], json!(false));
    assert_eq!(serde_json::from_value::<SamplingParams>(written).unwrap(), whole);
    assert_eq!(serde_json::from_str::<SamplingParams>("{}").unwrap(), SamplingParams::default());
    let nulls: PartialSampling = serde_json::from_str(r#"{"temperature": null, "logit_bias": null}"#).unwrap();
    assert_eq!(nulls, PartialSampling::default());
    assert!(serde_json::from_str::<PartialSampling>(r#"{"temperature": "warm"}"#).is_err());
}

#[test]
fn gguf_metadata_is_honoured() {
    let (sampling, notices) = gguf(&[
        ("general.sampling.temp", MetaValue::Number(0.6f32.into())),
        ("general.sampling.top_k", MetaValue::Number(20.0)),
        ("general.sampling.top_p", MetaValue::Number(0.95f32.into())),
        ("general.sampling.min_p", MetaValue::Number(0.0)),
        ("general.sampling.penalty_last_n", MetaValue::Number(-1.0)),
        ("general.sampling.penalty_repeat", MetaValue::Number(1.05f32.into())),
        ("general.sampling.xtc_probability", MetaValue::Number(0.0)),
        ("general.sampling.sequence", MetaValue::Text("top_k;dry; temp ;")),
    ])
    .unwrap();
    let expected = PartialSampling {
        samplers: Some(vec![SamplerKind::TopK, SamplerKind::Temperature]),
        temperature: Some(0.6),
        top_k: Some(20),
        top_p: Some(0.95),
        min_p: Some(0.0),
        repeat_last_n: Some(-1),
        repeat_penalty: Some(1.05),
        ..PartialSampling::default()
    };
    assert_eq!((sampling, notices), (expected, vec![]));
    assert_eq!(gguf(&[]), Ok((PartialSampling::default(), vec![])));
}

#[test]
fn what_gguf_asks_for_in_vain_is_said() {
    let (sampling, notices) = gguf(&[
        ("general.sampling.mirostat", MetaValue::Number(2.0)),
        ("general.sampling.xtc_probability", MetaValue::Number(0.5)),
        ("general.sampling.sequence", MetaValue::Text("xtc;infill")),
    ])
    .unwrap();
    assert_eq!(sampling, PartialSampling::default());
    assert_eq!(
        notices,
        [
            "general.sampling.sequence: stage \"infill\" is ignored: there is no such sampling stage",
            "general.sampling.xtc_probability = 0.5 is ignored: there is no such sampling stage",
            "general.sampling.mirostat = 2 is ignored: there is no such sampling stage",
        ]
    );
}

#[test]
fn unusable_gguf_metadata_is_an_error_that_names_the_key() {
    let long = "top_k;".repeat(33);
    let long: &'static str = long.leak();
    for (key, value) in [
        ("general.sampling.temp", MetaValue::Number(f64::NAN)),
        ("general.sampling.temp", MetaValue::Number(1e300)),
        ("general.sampling.temp", MetaValue::Text("0.6")),
        ("general.sampling.temp", MetaValue::Other("an array")),
        ("general.sampling.top_k", MetaValue::Number(0.5)),
        ("general.sampling.top_k", MetaValue::Number(4_294_967_295.0)),
        ("general.sampling.top_k", MetaValue::Bool(true)),
        ("general.sampling.top_p", MetaValue::Number(95.0)),
        ("general.sampling.min_p", MetaValue::Number(-0.5)),
        ("general.sampling.penalty_last_n", MetaValue::Number(-2.0)),
        ("general.sampling.penalty_repeat", MetaValue::Number(0.0)),
        ("general.sampling.xtc_probability", MetaValue::Number(f64::INFINITY)),
        ("general.sampling.sequence", MetaValue::Number(1.0)),
        ("general.sampling.sequence", MetaValue::Text(long)),
    ] {
        let error = gguf(&[(key, value)]).unwrap_err();
        assert_eq!(field_of(error), key);
    }
    let error = gguf(&[("general.sampling.temp", MetaValue::Text("0.6"))]).unwrap_err();
    let sentence = "general.sampling.temp must be a number of 0 (greedy) or more, found the string \"0.6\"";
    assert_eq!(error.to_string(), sentence);
}

#[test]
fn generation_config_is_honoured() {
    let config = json!({
        "_from_model_config": true, "bos_token_id": 1, "eos_token_id": [2, 3], "do_sample": true, "temperature": 0.7,
        "top_k": 20, "top_p": 0.8, "min_p": null, "typical_p": 0.9, "repetition_penalty": 1.05,
    });
    let expected = PartialSampling {
        temperature: Some(0.7),
        top_k: Some(20),
        top_p: Some(0.8),
        typical_p: Some(0.9),
        repeat_penalty: Some(1.05),
        ..PartialSampling::default()
    };
    assert_eq!(PartialSampling::from_generation_config(&config), Ok(expected));
    let greedy = PartialSampling::from_generation_config(&json!({"do_sample": false, "temperature": 0.7})).unwrap();
    assert_eq!(greedy.temperature, Some(0.0));
    assert_eq!(PartialSampling::from_generation_config(&json!({})), Ok(PartialSampling::default()));
}

#[test]
fn unusable_generation_config_is_an_error_that_names_the_key() {
    for (key, value) in [
        ("temperature", json!("0.7")),
        ("temperature", json!(-1)),
        ("top_k", json!(1e12)),
        ("top_k", json!([50])),
        ("top_p", json!(1.5)),
        ("min_p", json!({})),
        ("typical_p", json!(true)),
        ("repetition_penalty", json!(0)),
        ("do_sample", json!(1)),
    ] {
        let error = PartialSampling::from_generation_config(&json!({ key: value })).unwrap_err();
        assert_eq!(field_of(error), format!("generation_config.json: {key}"));
    }
    assert!(PartialSampling::from_generation_config(&json!([1])).is_err());
}
