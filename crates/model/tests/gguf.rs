//! The GGUF reader against valid, odd and damaged files.

#![allow(clippy::unwrap_used)]

mod gguf_builder;

use std::{borrow::Cow, fs, path::Path};

use gguf_builder::{self as gb, Builder, base, cut, message};
use proptest::prelude::*;
use puna_kernels::DType;
use puna_model::{
    Error,
    error::escape,
    gguf::{Array, Gguf, Strings, TensorType, Value},
};

fn parse(bytes: &[u8]) -> Result<Gguf, Error> {
    Gguf::parse("t.gguf", bytes.to_vec().into())
}

/// The container opens and nothing is wrong with it.
fn good(builder: &Builder) -> Gguf {
    let gguf = parse(&builder.bytes()).unwrap();
    gguf.check().unwrap();
    gguf
}

#[test]
fn reads_every_value_type() {
    let gguf = good(&base());
    let meta = gguf.meta();
    assert_eq!(meta.require::<&str>("general.architecture").unwrap(), "llama");
    let values: Vec<Value> = ["u8", "i8", "u16", "i16", "u32", "i32", "u64", "i64", "f32", "f64", "bool"]
        .map(|name| meta.value(&format!("a.{name}")).unwrap())
        .to_vec();
    let expected = [
        Value::U8(200),
        Value::I8(-100),
        Value::U16(60_000),
        Value::I16(-30_000),
        Value::U32(4_000_000_000),
        Value::I32(-2_000_000_000),
        Value::U64(u64::MAX),
        Value::I64(i64::MIN),
        Value::F32(1e-5),
        Value::F64(1e300),
        Value::Bool(true),
    ];
    assert_eq!(values, expected);
    let tokens: Strings = meta.require("tokens").unwrap();
    assert_eq!(tokens.len(), 4);
    assert_eq!(tokens.collect::<Vec<_>>(), [&b"a"[..], b"", "\u{120}t".as_bytes(), b"\n"]);
    assert_eq!(meta.require::<Vec<&str>>("tokens").unwrap(), ["a", "", "\u{120}t", "\n"]);
    assert_eq!(meta.require::<Vec<i32>>("types").unwrap(), [1, 1, 3, 6]);
    assert_eq!(meta.require::<Vec<f32>>("scores").unwrap(), [0.0, -1.5]);
    assert_eq!(meta.require::<Vec<bool>>("flags").unwrap(), [true, false]);
    let keys: Vec<&str> = meta.iter().map(|(key, _)| key).collect();
    assert_eq!((keys.len(), keys[0], keys[15]), (16, "general.architecture", "flags"));
}

#[test]
fn reads_tensors() {
    let gguf = good(&base());
    let names: Vec<&str> = gguf.tensors().map(|t| &*t.name).collect();
    let expected = ["token_embd.weight", "blk.0.attn_q.weight", "blk.0.ffn_up_exps.weight", "output_norm.weight"];
    assert_eq!(names, expected);

    let embd = gguf.tensor("token_embd.weight").unwrap();
    assert_eq!((&embd.shape[..], embd.rows(), embd.cols(), embd.elements()), (&[4, 8][..], 4, 8, 32));
    let (dtype, bytes) = gguf.weight(embd).unwrap();
    assert_eq!(dtype, DType::F32);
    assert_eq!(bytes[4 * 31..], 31f32.to_le_bytes());

    let q = gguf.tensor("blk.0.attn_q.weight").unwrap();
    assert_eq!((q.ty, q.bytes, &gguf.data(q).unwrap()[..]), (TensorType::Weight(DType::Q4_0), 36, &[7; 36][..]));
    let exps = gguf.tensor("blk.0.ffn_up_exps.weight").unwrap();
    assert_eq!((&exps.shape[..], exps.rows(), exps.cols()), (&[2, 3, 2][..], 6, 2));
    let norm = gguf.tensor("output_norm.weight").unwrap();
    assert_eq!((norm.rows(), norm.cols()), (1, 8));
    assert_eq!(message(gguf.tensor("nope"), "nope"), r#"t.gguf: tensor "nope": missing"#);
}

#[test]
fn data_is_not_copied() {
    let bytes: bytes::Bytes = base().bytes().into();
    let gguf = Gguf::parse("t", bytes.clone()).unwrap();
    let range = bytes.as_ptr_range();
    for t in gguf.tensors() {
        let data = gguf.data(t).unwrap();
        assert!(range.contains(&data.as_ptr()));
        assert_eq!(data.as_ptr() as usize - range.start as usize, t.offset as usize);
    }
}

#[test]
fn converts_integers_that_fit_and_nothing_else() {
    let gguf = good(&base().key("list", gb::array(3, &[1, -1].map(gb::i16))));
    let meta = gguf.meta();
    assert_eq!(meta.require::<u64>("a.u8").unwrap(), 200);
    assert_eq!(meta.require::<u32>("a.u32").unwrap(), 4_000_000_000);
    assert_eq!(meta.require::<i64>("a.u16").unwrap(), 60_000);
    assert_eq!(meta.require::<f64>("a.f32").unwrap(), f64::from(1e-5f32));
    assert_eq!(meta.require::<f32>("a.f64").unwrap(), f32::INFINITY);
    assert_eq!(meta.require::<Vec<i64>>("list").unwrap(), [1, -1]);
    assert_eq!(meta.require::<Array>("types").unwrap().len(), 4);
    assert_eq!(meta.get::<u32>("absent"), Ok(None));

    let wrong = [
        (meta.require::<u32>("absent").map(drop), r#"key "absent": missing"#),
        (
            meta.require::<u32>("a.i8").map(drop),
            r#"key "a.i8": expected an integer from 0 to 4294967295, found i8 -100"#,
        ),
        (meta.require::<u8>("a.u16").map(drop), r#"key "a.u16": expected an integer from 0 to 255, found u16 60000"#),
        (meta.get::<u32>("a.f32").map(drop), r#"key "a.f32": expected an integer type, found f32 1e-5"#),
        (meta.get::<f32>("a.u8").map(drop), r#"key "a.u8": expected a float type, found u8 200"#),
        (meta.get::<bool>("a.u8").map(drop), r#"key "a.u8": expected type bool, found u8 200"#),
        (meta.get::<&str>("a.bool").map(drop), r#"key "a.bool": expected type string, found bool true"#),
        (meta.get::<u32>("types").map(drop), r#"key "types": expected an integer type, found array of 4 i32"#),
        (meta.get::<Array>("a.u8").map(drop), r#"key "a.u8": expected type array, found u8 200"#),
        (
            meta.get::<Strings>("types").map(drop),
            r#"key "types": expected an array of type string, found array of 4 i32"#,
        ),
        (
            meta.get::<Vec<u32>>("list").map(drop),
            r#"key "list": element 1: expected an integer from 0 to 4294967295, found i16 -1"#,
        ),
    ];
    for (result, expected) in wrong {
        assert_eq!(message(result, expected), format!("t.gguf: {expected}"));
    }
}

#[test]
fn strings_may_be_no_utf8() {
    let gguf = good(&base().key("bad", gb::string(b"a\xffb")).key("list", gb::strings(&[&b"ok"[..], b"\xc3"])));
    let meta = gguf.meta();
    assert_eq!(meta.require::<&[u8]>("bad").unwrap(), b"a\xffb");
    assert_eq!(meta.require::<Cow<str>>("bad").unwrap(), "a\u{fffd}b");
    let text = message(meta.require::<&str>("bad"), "bad");
    assert_eq!(text, r#"t.gguf: key "bad": expected UTF-8 text, found string "a\xffb""#);
    assert_eq!(meta.require::<Strings>("list").unwrap().last(), Some(&b"\xc3"[..]));
    assert!(message(meta.require::<Vec<&str>>("list"), "list").contains("element 1: expected UTF-8"));
}

#[test]
fn shows_values_short_and_clean() {
    let many = gb::array(0, &[9; 20].map(gb::u8));
    let pair = gb::array(9, &[gb::array(0, &[1, 2].map(gb::u8)), gb::strings(&["x"])]);
    let gguf = good(
        &base()
            .key("evil", gb::string("a\x1b[2J\n\0\u{202e}"))
            .key("long", gb::string("x".repeat(5000)))
            .key("many", many)
            .key("pair", pair),
    );
    let shown = |key: &str| gguf.meta().value(key).unwrap().to_string();
    assert_eq!(shown("evil"), r#""a\u{1b}[2J\n\0\u{202e}""#);
    assert_eq!(shown("long").chars().count(), 103);
    assert_eq!(shown("many"), "[9, 9, 9, 9, 9, 9, 9, 9, … 20 in all]");
    assert_eq!(shown("pair"), "[array of 2 u8, array of 1 string]");
    assert_eq!(shown("tokens"), "[\"a\", \"\", \"\u{120}t\", \"\\n\"]");
    assert_eq!(shown("a.f32"), "1e-5");
}

fn nested(depth: usize) -> gb::Value {
    (1..depth).fold(gb::array(0, &[gb::u8(1)]), |inner, _| gb::array(9, &[inner]))
}

#[test]
fn odd_files_that_are_fine() {
    let align = |n: usize| {
        let mut b = Builder::new().key("general.alignment", gb::u32(n as u32));
        b.alignment = n;
        b.f32("a", &[3]).f32("b", &[5])
    };
    let mut v2 = base();
    v2.version = 2;
    let fine = [
        ("version_2", v2),
        ("align_8", align(8)),
        ("align_64", align(64)),
        ("align_4096", align(4096)),
        ("align_u64", base().key("general.alignment", gb::u64(32))),
        ("array_nested_two", base().key("x", nested(2))),
        ("array_nested_four", base().key("x", nested(4))),
        ("array_empty_unused", base().key("x", gb::strings::<&str>(&[]))),
        ("vocab_only", Builder::new().key("tokens", gb::strings(&["a"]))),
        ("nothing", Builder::new()),
        ("name_64", base().f32(&"n".repeat(64), &[1])),
        ("dims_four", base().f32("x", &[2, 1, 3, 4])),
        ("order_of_data_free", {
            let mut b = base();
            (b.tensors[0].offset, b.tensors[1].offset) = (64, 0);
            b.tensors.swap(0, 1);
            b.tensors[0].offset = 128;
            b.tensors[1].offset = 0;
            b
        }),
    ];
    for (id, b) in &fine {
        let gguf = good(b);
        assert_eq!(gguf.tensors().len(), b.tensors.len(), "{id}");
        for t in gguf.tensors() {
            assert_eq!(gguf.data(t).unwrap().len() as u64, t.bytes, "{id}");
        }
    }

    let bytes = base().bytes();
    let mut garbage = bytes.clone();
    garbage.extend([0xa5; 3000]);
    parse(&garbage).unwrap().check().unwrap();
    let norm_end = good(&base()).tensor("output_norm.weight").map(|t| (t.offset + t.bytes) as usize).unwrap();
    parse(&bytes[..norm_end]).unwrap().check().unwrap();
    assert!(parse(&bytes[..norm_end - 1]).unwrap().check().is_err());

    // A number for each alignment, so that a reader that ignores the key fails here.
    for n in [8, 64] {
        let gguf = good(&align(n));
        assert_eq!(gguf.data(gguf.tensor("b").unwrap()).unwrap()[16..], 4f32.to_le_bytes(), "align_{n}");
    }
}

/// Damage that makes the container unreadable, and a word the message must have.
fn broken() -> Vec<(String, Vec<u8>, &'static str)> {
    let all = base().bytes();
    let mut list: Vec<(String, Vec<u8>, &'static str)> = vec![];
    let mut add = |id: &str, bytes: Vec<u8>, word| list.push((id.into(), bytes, word));

    add("empty_file", vec![], "empty");
    add("magic_half", cut(&all, 2), "magic");
    add("magic_only", cut(&all, 4), "end of file");
    add("header_cut", cut(&all, 17), "end of file");
    add("bad_magic", [b"GGML", &all[4..]].concat(), "magic");
    add("html_page", b"<!DOCTYPE html><html></html>".to_vec(), "web page");
    add("html_spaces", b"\n  <html>".to_vec(), "web page");
    add("lfs_pointer", b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n".to_vec(), "Git LFS pointer");
    add("json", b"{\"error\": \"not found\"}".to_vec(), "JSON");
    add("safetensors", b"\x10\0\0\0\0\0\0\0{\"a\":{}}".to_vec(), "safetensors");
    add("zip", b"PK\x03\x04....".to_vec(), "zip");

    let b = |change: fn(&mut Builder)| {
        let mut b = base();
        change(&mut b);
        b.bytes()
    };
    add("version_0", b(|b| b.version = 0), "version 0 ");
    add("version_1", b(|b| b.version = 1), "version 1 ");
    add("version_future", b(|b| b.version = 4), "version 4 ");
    add("version_odd", b(|b| b.version = 0x0001_0003), "version 65539 ");
    add("big_endian", b(|b| b.version = 3u32.swap_bytes()), "big-endian");
    add("n_kv_max", b(|b| b.n_keys = Some(u64::MAX)), "metadata key count");
    add("n_kv_2e62", b(|b| b.n_keys = Some(1 << 62)), "metadata key count");
    add("n_kv_plus_one", b(|b| b.n_keys = Some(17)), "end of file");
    add("n_tensors_max", b(|b| b.n_tensors = Some(u64::MAX)), "tensor count");
    add("n_tensors_2e60", b(|b| b.n_tensors = Some(1 << 60)), "tensor count");
    add("n_tensors_plus_one", b(|b| b.n_tensors = Some(5)), "tensor 4 of 5: the name is empty");
    add("table_cut", cut(&all, base().header().len() - 30), "end of file");

    let key = |key: &[u8], value: gb::Value| base().key(key, value).bytes();
    let end = |bytes: &[u8]| Builder { tensors: vec![], ..base() }.header().into_iter().chain(bytes.to_vec()).collect();
    let with_key = |bytes: &[u8]| -> Vec<u8> {
        let mut file: Vec<u8> = end(bytes);
        file[16..24].copy_from_slice(&17u64.to_le_bytes());
        file
    };
    add("key_len_max", with_key(&[0xff; 40]), "string length 18446744073709551615");
    add("key_len_past_eof", with_key(&[&(1u64 << 20).to_le_bytes()[..], &[0; 32]].concat()), "string length 1048576");
    add("key_empty", key(b"", gb::u32(1)), "key is empty");
    add("key_long", key(&[b'k'; 65_536], gb::u32(1)), "65536 bytes");
    add("key_not_utf8", key(b"a\xff", gb::u32(1)), "not UTF-8");
    add("key_duplicate", key(b"a.u8", gb::u32(1)), "duplicate metadata key \"a.u8\"");
    add("type_of_value", key(b"x", gb::Value { ty: 13, bytes: vec![0; 8] }), "unknown type 13");
    add("bool_two", key(b"x", gb::Value { ty: 7, bytes: vec![2] }), "bool value 2");
    add("bools_two", key(b"x", gb::raw_array(7, 3, &[0, 1, 2])), "bool value 2");
    let text = |n: u64| gb::Value { ty: 8, bytes: n.to_le_bytes().to_vec() };
    add("str_len_max", key(b"x", text(u64::MAX)), "string length");
    add("str_len_2e40", key(b"x", text(1 << 40)), "string length");
    add("array_type_unknown", key(b"x", gb::raw_array(77, 4, &[0; 16])), "unknown type 77");
    add("array_count_max", key(b"x", gb::raw_array(0, u64::MAX, &[0; 16])), "array length");
    add("array_count_wraps", key(b"x", gb::raw_array(10, 1 << 61, &[0; 16])), "array length");
    add("array_strings_huge", key(b"x", gb::raw_array(8, 1 << 58, &[0; 16])), "array length");
    add("array_500m", key(b"x", gb::raw_array(4, 500_000_000, &[0; 16])), "array length");
    add("array_string_len", key(b"x", gb::raw_array(8, 1, &[0xff; 8])), "string length");
    add("array_nested_count", key(b"x", gb::array(9, &[gb::raw_array(2, u64::MAX, &[])])), "array length");
    add("array_nested_five", key(b"x", nested(5)), "nested");
    add("array_nested_deep", key(b"x", nested(5000)), "nested");
    for (n, id) in [(0, "zero"), (1, "one"), (4, "four"), (12, "12"), (48, "48")] {
        add(&format!("align_{id}"), key(b"general.alignment", gb::u32(n)), "general.alignment");
    }
    add("align_negative", key(b"general.alignment", gb::i32(-32)), "general.alignment");
    add("align_string", key(b"general.alignment", gb::string("32")), "general.alignment");
    add("align_float", key(b"general.alignment", gb::f32(32.0)), "integer type, found f32");
    list.extend(broken_tables());
    list
}

fn broken_tables() -> Vec<(String, Vec<u8>, &'static str)> {
    let mut list: Vec<(String, Vec<u8>, &'static str)> = vec![];
    let mut add = |id: &str, b: Builder, word| list.push((id.into(), b.bytes(), word));
    let last = |change: fn(&mut gb::Tensor)| base().last(change);

    add("tensor_duplicate", base().f32("output_norm.weight", &[8]), "duplicate tensor \"output_norm.weight\"");
    add("tensor_name_65", base().f32(&"x".repeat(65), &[8]), "name of 65 bytes");
    add("tensor_name_long", base().f32(&"x".repeat(300), &[8]), "name of 300 bytes");
    add("tensor_name_empty", base().f32("", &[8]), "name is empty");
    add("tensor_name_not_utf8", base().tensor(b"a\xff", &[8], 0, vec![0; 32]), "not UTF-8");
    add("dims_none", base().f32("x", &[]), "0 dimensions");
    add("dims_five", base().f32("x", &[1, 1, 1, 1, 8]), "5 dimensions");
    add("dims_huge_count", last(|t| t.n_dims = u32::MAX), "4294967295 dimensions");
    add("dim_zero_first", last(|t| t.dims[0] = 0), "zero");
    add("dim_zero_second", base().f32("x", &[2, 8]).last(|t| t.dims[1] = 0), "zero");
    add("dims_product_wraps", base().f32("x", &[1, 1]).last(|t| t.dims = vec![1 << 32; 2]), "overflow");
    add("bytes_wrap", last(|t| t.dims[0] = 1 << 62), "overflow");
    add("type_unknown", last(|t| t.ty = 200), "unknown tensor type 200");
    add("type_minus_one", last(|t| t.ty = u32::MAX), "unknown tensor type 4294967295");
    for id in [4, 5, 31, 32, 33, 36, 37, 38] {
        add(&format!("type_removed_{id}"), base().last(|t| t.ty = id), "was removed");
    }
    add("row_not_block_multiple", base().f32("x", &[2, 16]).last(|t| t.ty = 2), "not a multiple of Q4_0's block");
    add("row_wraps_block", base().f32("x", &[32, 16]).last(|t| t.ty = 2), "row length 16");
    add("offset_unaligned", last(|t| t.offset += 8), "multiple of the alignment");
    add("offset_wraps", last(|t| t.offset = u64::MAX - 31), "overflow");
    add("end_wraps", last(|t| (t.dims[0], t.offset) = ((1 << 61) - 8, 1 << 63)), "overflow");
    add("overlap_same", last(|t| t.offset = 0), "overlap");
    add("overlap_partly", last(|t| t.offset = 96), "overlap");
    list
}

#[test]
fn broken_containers_are_refused_by_name() {
    for (id, bytes, word) in broken() {
        let text = message(parse(&bytes), &id);
        assert!(text.starts_with("t.gguf: "), "{id}: {text}");
        assert!(text.contains(word), "{id}: {text}");
    }
}

#[test]
fn broken_containers_cost_nothing() {
    for (id, bytes, _) in broken() {
        let bytes: bytes::Bytes = bytes.into();
        let size = bytes.len() as u64;
        let cost = allocation_counter::measure(|| drop(Gguf::parse("t", bytes)));
        assert!(cost.bytes_max < 16 * size + 8192, "{id}: {} bytes for a file of {size}", cost.bytes_max);
    }
}

#[test]
fn weights_behind_the_end_are_problems() {
    let all = base().bytes();
    let header = base().header().len().next_multiple_of(32);
    let cases = [
        ("offset_past_eof", base().last(|t| t.offset = 1 << 20).bytes(), "expected 1049"),
        ("size_past_eof", base().last(|t| t.dims[0] = 1 << 40).bytes(), "expected 43980465"),
        ("size_past_everything", base().last(|t| t.dims[0] = 1 << 60).bytes(), "expected 46116860"),
        ("data_one_byte_short", cut(&all, all.len() - 1), "truncated"),
        ("data_half", cut(&all, header + 100), "\"token_embd.weight\" and 3 more pass the end of file"),
        ("data_missing", cut(&all, header), "and 3 more pass the end of file"),
        ("header_only", cut(&all, base().header().len()), "and 3 more pass the end of file"),
    ];
    for (id, bytes, word) in cases {
        let gguf = parse(&bytes).unwrap();
        assert_eq!(gguf.problems().len(), 1, "{id}");
        let text = message(gguf.check(), id);
        assert!(text.contains("truncated") && text.contains(word), "{id}: {text}");
        assert!(text.ends_with(&format!("found {}", bytes.len())), "{id}: {text}");
        let norm = gguf.tensor("output_norm.weight").unwrap();
        let text = message(gguf.data(norm), id);
        assert!(text.contains("tensor \"output_norm.weight\" passes the end of file"), "{id}: {text}");
    }
}

#[test]
fn integers_are_tensors_but_no_weights() {
    for (id, name, bytes) in [(24, "I8", 4), (25, "I16", 8), (26, "I32", 16), (27, "I64", 32), (28, "F64", 32)] {
        let gguf = good(&Builder::new().tensor("x", &[4], id, vec![1; bytes]));
        let x = gguf.tensor("x").unwrap();
        assert_eq!((x.ty.name(), x.bytes), (name, bytes as u64));
        assert_eq!(gguf.data(x).unwrap().len(), bytes);
        let expected = format!("t.gguf: tensor \"x\": type {name} is not a weight format");
        assert_eq!(message(gguf.weight(x), name), expected);
    }
}

/// Every call that reads something from `gguf`.
fn use_all(gguf: &Gguf) {
    let mut text = String::new();
    for (key, value) in gguf.meta().iter() {
        text += &format!("{} = {value}\n", escape(key));
        if let Value::Array(array) = value {
            assert!(array.iter().count() <= array.len());
        }
        drop(gguf.meta().get::<Vec<&str>>(key));
        drop(gguf.meta().get::<Vec<u8>>(key));
        drop(gguf.meta().get::<u32>(key));
    }
    for t in gguf.tensors() {
        text += &format!("{} {:?} {} {}\n", escape(&*t.name), t.shape, t.ty, t.elements());
        let whole = gguf.data(t).is_ok();
        assert!(whole || gguf.check().is_err());
        drop(gguf.weight(t));
    }
    assert!(!text.chars().any(|c| c.is_control() && c != '\n'));
}

#[test]
fn every_prefix_is_an_error() {
    let all = base().bytes();
    let norm_end = good(&base()).tensor("output_norm.weight").map(|t| (t.offset + t.bytes) as usize).unwrap();
    for n in 0..all.len() {
        let result = parse(&all[..n]).and_then(|gguf| gguf.check());
        assert_eq!(result.is_ok(), n >= norm_end, "{n} bytes: {result:?}");
        if let Err(e) = result {
            let text = message(Err::<(), _>(e), "prefix");
            assert!(["end of file", "empty", "magic"].iter().any(|w| text.contains(w)), "{n} bytes: {text}");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 4000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn damage_never_panics(
        edits in prop::collection::vec((any::<prop::sample::Index>(), prop_oneof![any::<u8>(), Just(0), Just(0xff)]), 1..8),
        end in prop::option::of(any::<prop::sample::Index>()),
    ) {
        let mut bytes = base().bytes();
        for (at, byte) in edits {
            let at = at.index(bytes.len());
            bytes[at] = byte;
        }
        if let Some(end) = end {
            bytes.truncate(end.index(bytes.len()) + 1);
        }
        let size = bytes.len() as u64;
        let bytes = bytes::Bytes::from(bytes);
        let mut result = None;
        let cost = allocation_counter::measure(|| result = Some(Gguf::parse("t", bytes)));
        prop_assert!(cost.bytes_max < 16 * size + 8192, "{} bytes for a file of {size}", cost.bytes_max);
        match result.unwrap() {
            Ok(gguf) => use_all(&gguf),
            Err(e) => drop(message(Err::<(), _>(e), "damage")),
        }
    }

    #[test]
    fn noise_behind_a_header_never_panics(noise in prop::collection::vec(any::<u8>(), 0..300), keys in 0u64..4, tensors in 0u64..4) {
        let mut bytes = b"GGUF\x03\0\0\0".to_vec();
        bytes.extend(tensors.to_le_bytes());
        bytes.extend(keys.to_le_bytes());
        bytes.extend(noise);
        if let Ok(gguf) = parse(&bytes) {
            use_all(&gguf);
        }
    }

    #[test]
    fn what_is_written_is_read(
        keys in prop::collection::btree_map("[a-z.]{1,12}", (any::<i64>(), prop::collection::vec(any::<Vec<u8>>(), 0..5)), 0..6),
        shapes in prop::collection::vec(prop::collection::vec(1u64..5, 1..=4), 0..5),
        align in 3u32..8,
    ) {
        let mut b = Builder { alignment: 1 << align, ..Builder::new() };
        b = b.key("general.alignment", gb::u32(1 << align));
        for (key, (number, list)) in &keys {
            b = b.key(format!("n.{key}"), gb::i64(*number)).key(format!("l.{key}"), gb::strings(list));
        }
        for (i, shape) in shapes.iter().enumerate() {
            b = b.f32(&i.to_string(), shape);
        }
        let gguf = good(&b);
        for (key, (number, list)) in &keys {
            prop_assert_eq!(gguf.meta().require::<i64>(&format!("n.{key}")).unwrap(), *number);
            let strings: Strings = gguf.meta().require(&format!("l.{key}")).unwrap();
            prop_assert_eq!(strings.map(<[u8]>::to_vec).collect::<Vec<_>>(), list.clone());
        }
        for (i, (t, shape)) in gguf.tensors().zip(&shapes).enumerate() {
            prop_assert_eq!(&t.shape, shape);
            prop_assert_eq!(&gguf.data(t).unwrap()[..], &b.tensors[i].data[..]);
        }
    }
}

/// The files of a split model: `per_shard` tensors each, metadata in the first.
fn shards(per_shard: &[usize]) -> Vec<Builder> {
    let count = per_shard.len() as u16;
    let total: usize = per_shard.iter().sum();
    let mut next = 0;
    (0..count)
        .zip(per_shard)
        .map(|(no, &n)| {
            let first =
                if no == 0 { Builder::new().key("general.architecture", gb::string("llama")) } else { Builder::new() };
            let b = first.key("split.no", gb::u16(no)).key("split.count", gb::u16(count));
            let b = b.key("split.tensors.count", gb::i32(total as i32));
            next += n;
            (next - n..next).fold(b, |b, i| b.f32(&format!("t{i}"), &[1 + i as u64]))
        })
        .collect()
}

fn write(folder: &Path, names: impl IntoIterator<Item = String>, shards: &[Builder]) {
    for (name, shard) in names.into_iter().zip(shards) {
        fs::write(folder.join(name), shard.bytes()).unwrap();
    }
}

fn names(count: usize, width: usize) -> impl Iterator<Item = String> {
    (1..=count).map(move |n| format!("m-{n:0width$}-of-{count:0width$}.gguf"))
}

#[test]
fn split_models_open_by_any_file() {
    let sets = [
        ("two", vec![2, 1], 5),
        ("one_empty", vec![2, 0, 1], 5),
        ("first_empty", vec![0, 3], 5),
        ("twelve", vec![1; 12], 5),
        ("narrow", vec![1; 12], 1),
        ("odd_width", vec![1; 3], 2),
    ];
    for (id, per_shard, width) in sets {
        let dir = tempfile::tempdir().unwrap();
        write(dir.path(), names(per_shard.len(), width), &shards(&per_shard));
        for name in names(per_shard.len(), width) {
            let gguf = Gguf::open(dir.path().join(name)).unwrap();
            gguf.check().unwrap();
            assert_eq!(gguf.shards().len(), per_shard.len(), "{id}");
            assert_eq!(gguf.meta().require::<&str>("general.architecture").unwrap(), "llama", "{id}");
            let total: usize = per_shard.iter().sum();
            assert!(gguf.tensors().map(|t| t.name.to_string()).eq((0..total).map(|i| format!("t{i}"))), "{id}");
            for (i, t) in gguf.tensors().enumerate() {
                assert_eq!(gguf.data(t).unwrap()[4 * i..], (i as f32).to_le_bytes(), "{id}");
            }
        }
    }
}

#[test]
fn split_models_that_do_not_fit_together() {
    type Damage = fn(&mut Vec<Builder>);
    fn set(b: &mut Builder, key: &str, value: gb::Value) {
        b.keys.iter_mut().find(|(k, _)| k == key.as_bytes()).unwrap().1 = value;
    }
    let cases: [(&str, Damage, &str); 14] = [
        ("no_disagrees", |s| set(&mut s[1], "split.no", gb::u16(0)), "split.no is 0, expected 1 in shard 2 of 3"),
        ("first_no", |s| set(&mut s[0], "split.no", gb::u16(1)), "split.no is 1, expected 0 in shard 1 of 3"),
        ("swapped", |s| s.swap(1, 2), "split.no is 2, expected 1"),
        ("count_disagrees", |s| set(&mut s[2], "split.count", gb::u16(2)), "split.count is 2, expected 3"),
        (
            "count_not_as_named",
            |s| set(&mut s[0], "split.count", gb::u16(2)),
            "split.count is 2, the file name says 00003",
        ),
        ("no_missing", |s| drop(s[1].keys.remove(0)), "key \"split.no\": missing"),
        ("no_string", |s| set(&mut s[1], "split.no", gb::string("1")), "expected an integer type, found string"),
        ("tensor_total", |s| set(&mut s[0], "split.tensors.count", gb::i32(99)), "split.tensors.count"),
        ("tensor_lost", |s| drop(s[2].tensors.pop()), "split.tensors.count is 6, the shards have 5 tensors"),
        ("duplicate_tensor", |s| s[1].tensors[0].name = b"t0".to_vec(), "duplicate tensor \"t0\""),
        (
            "other_model",
            |s| s[2].keys.push((b"general.architecture".to_vec(), gb::string("qwen2"))),
            "key \"general.architecture\" is not as in the first shard",
        ),
        (
            "total_disagrees",
            |s| set(&mut s[1], "split.tensors.count", gb::i32(5)),
            "split.tensors.count is 5, expected 6 in shard 2 of 3",
        ),
        (
            "alignment_of_first_only",
            |s| {
                s[0].alignment = 64;
                s[0].tensors.truncate(1);
                s[0].keys.push((b"general.alignment".to_vec(), gb::u32(64)));
            },
            "general.alignment is 64 in the first shard and missing here",
        ),
        ("shard_damaged", |s| s[1].version = 9, "version 9"),
    ];
    for (id, damage, word) in cases {
        let dir = tempfile::tempdir().unwrap();
        let mut set = shards(&[2, 2, 2]);
        damage(&mut set);
        write(dir.path(), names(3, 5), &set);
        let gguf = Gguf::open(dir.path().join("m-00001-of-00003.gguf")).unwrap();
        let text = message(gguf.check(), id);
        assert!(text.contains(word), "{id}: {text}");
        use_all(&gguf);
    }
}

#[test]
fn shards_that_are_missing_are_named() {
    let open = |lost: &str, opened: &str| {
        let dir = tempfile::tempdir().unwrap();
        write(dir.path(), names(3, 5), &shards(&[1, 1, 1]));
        fs::remove_file(dir.path().join(lost)).unwrap();
        Gguf::open(dir.path().join(opened))
    };
    let gguf = open("m-00002-of-00003.gguf", "m-00003-of-00003.gguf").unwrap();
    let text = message(gguf.check(), "second missing");
    assert!(text.contains("a shard is missing: number 2 of 3") && text.ends_with("m-00002-of-00003.gguf"), "{text}");
    assert_eq!(gguf.tensors().len(), 1);
    let text = message(open("m-00001-of-00003.gguf", "m-00002-of-00003.gguf"), "first missing");
    assert!(text.contains("the first shard is missing") && text.ends_with("m-00001-of-00003.gguf"), "{text}");
}

#[test]
fn shards_need_their_names() {
    let dir = tempfile::tempdir().unwrap();
    let set = shards(&[1, 1]);
    write(dir.path(), ["renamed.gguf".into()], &set);
    let text = message(Gguf::open(dir.path().join("renamed.gguf")).unwrap().check(), "renamed");
    assert!(text.contains("split.count is 2") && text.contains("NAME-00001-of-00002.gguf"), "{text}");
    let text = message(parse(&set[0].bytes()).unwrap().check(), "in memory");
    assert!(text.contains("only one shard of 2"), "{text}");

    // Left behind by a merge: not split any more.
    for count in [0, 1] {
        let merged = Builder::new().key("split.no", gb::u16(0)).key("split.count", gb::u16(count)).f32("x", &[1]);
        good(&merged);
    }
}

#[test]
fn a_cut_shard_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let set = shards(&[1, 1]);
    write(dir.path(), names(2, 5), &set);
    let second = dir.path().join("m-00002-of-00002.gguf");
    fs::write(&second, cut(&set[1].bytes(), set[1].header().len())).unwrap();
    let gguf = Gguf::open(dir.path().join("m-00001-of-00002.gguf")).unwrap();
    let text = message(gguf.check(), "cut");
    assert!(text.contains("m-00002-of-00002.gguf: the file is truncated: tensor \"t1\" passes"), "{text}");
    gguf.data(gguf.tensor("t0").unwrap()).unwrap();
}

#[test]
fn files_that_are_none() {
    let dir = tempfile::tempdir().unwrap();
    let missing = message(Gguf::open(dir.path().join("a\nb.gguf")), "missing");
    assert!(missing.ends_with(r"a\nb.gguf: no such file"), "{missing}");
    let folder = message(Gguf::open(dir.path()), "folder");
    assert!(folder.ends_with(": it is a directory, expected a file"), "{folder}");
    let empty = dir.path().join("empty.gguf");
    fs::write(&empty, b"").unwrap();
    assert!(message(Gguf::open(&empty), "empty").ends_with("not a GGUF file: the file is empty"));
}
