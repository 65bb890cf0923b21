//! Every block format against reference values (testdata/quant-blocks.*: 64 random blocks a format, dequantized by an
//! independent implementation), and the integer form of a block against the reference on any bytes.

#![allow(clippy::unwrap_used)]

use proptest::prelude::*;
use puna_kernels::dtype::FORMATS;
use puna_kernels::{Arith, DType, Format, Group};
use safetensors::SafeTensors;

/// Lists all variants of DType; a missing one does not compile.
macro_rules! every_dtype {
    ($($dtype:ident)*) => {
        const DTYPES: &[DType] = &[$(DType::$dtype),*];
        const _: fn(DType) = |dtype| match dtype { $(DType::$dtype => {})* };
    };
}

every_dtype! {
    F32 F16 BF16 Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q2_K Q3_K Q4_K Q5_K Q6_K IQ1_S IQ1_M IQ2_XXS IQ2_XS IQ2_S IQ3_XXS IQ3_S
    IQ4_NL IQ4_XS TQ1_0 TQ2_0 MXFP4 NVFP4
}

/// The largest `|sub|` and `|q|` of a format, whatever its bytes.
const BOUNDS: &[(DType, u16, u8)] = &[
    (DType::Q4_0, 1, 8),
    (DType::Q4_1, 1, 15),
    (DType::Q5_0, 1, 16),
    (DType::Q5_1, 1, 31),
    (DType::Q8_0, 1, 128),
    (DType::Q2_K, 15, 3),
    (DType::Q3_K, 32, 4),
    (DType::Q4_K, 1, 15),
    (DType::Q5_K, 1, 31),
    (DType::Q6_K, 128, 32),
    (DType::IQ1_S, 1, 9),
    (DType::IQ1_M, 15, 9),
    (DType::IQ2_XXS, 1, 43),
    (DType::IQ2_XS, 31, 43),
    (DType::IQ2_S, 31, 43),
    (DType::IQ3_XXS, 1, 62),
    (DType::IQ3_S, 1, 15),
    (DType::IQ4_NL, 1, 127),
    (DType::IQ4_XS, 1, 127),
    (DType::TQ1_0, 1, 1),
    (DType::TQ2_0, 1, 2),
    (DType::MXFP4, 1, 12),
    (DType::NVFP4, 1, 12),
];

fn testdata(name: &str) -> Vec<u8> {
    std::fs::read(format!("{}/../../testdata/{name}", env!("CARGO_MANIFEST_DIR")))
        .expect("testdata is part of the project")
}

fn block_formats() -> impl Iterator<Item = &'static Format> {
    FORMATS.iter().copied().filter(|f| f.unpack.is_some())
}

fn dequantize(format: &Format, blocks: &[u8]) -> Vec<f32> {
    // NaN: a value that is not written shows.
    let mut values = vec![f32::NAN; blocks.len() / format.block_bytes * format.block_len];
    (format.dequantize)(blocks, &mut values);
    values
}

fn unpack(format: &Format, blocks: &[u8]) -> Vec<Group> {
    let mut groups = vec![Group::ZERO; blocks.len() / format.block_bytes * format.block_len / 32];
    (format.unpack.expect("a block format"))(blocks, &mut groups);
    groups
}

/// Equal, a NaN being equal to a NaN and 0 to -0.
fn same(a: f32, b: f32) -> bool {
    a == b || a.is_nan() && b.is_nan()
}

#[track_caller]
fn assert_groups_equal_reference(format: &Format, blocks: &[u8]) {
    let (groups, values) = (unpack(format, blocks), dequantize(format, blocks));
    for (g, (group, expected)) in groups.iter().zip(values.as_chunks::<32>().0).enumerate() {
        for (i, (&w, &e)) in group.dequantize().iter().zip(expected).enumerate() {
            assert!(same(w, e), "{} column {}: unpack gives {w}, dequantize {e}", format.name, 32 * g + i);
        }
    }
}

/// What the kernels take for granted about a group of a format of this class.
#[track_caller]
fn assert_fits_class(format: &Format, group: &Group) {
    let Group { sub, d, min, .. } = group;
    let (one_d, one_min) = (d[0].to_bits() == d[1].to_bits(), min[0].to_bits() == min[1].to_bits());
    let (no_sub, no_min) = (*sub == [1, 1], *min == [0.0, 0.0]);
    let fits = match format.arith {
        Arith::Float => false,
        Arith::Scale32 => no_sub && one_d && no_min,
        Arith::Scale32Min => no_sub && one_d && one_min,
        Arith::Scale16 => one_d && no_min,
        Arith::Scale16Min => one_d,
        Arith::Float16 => no_sub && no_min,
    };
    assert!(fits, "{} is {:?}, yet gives {group:?}", format.name, format.arith);
    for (&d, &sub) in d.iter().zip(sub) {
        let exact = f64::from(d) * f64::from(sub);
        assert!(exact.is_nan() || f64::from(d * f32::from(sub)) == exact, "{}: {d} * {sub} rounds", format.name);
    }
}

#[test]
fn every_dtype_has_one_row() {
    assert_eq!(FORMATS.len(), DTYPES.len());
    for &dtype in DTYPES {
        let format = dtype.format();
        assert_eq!(format.dtype, dtype);
        assert_eq!(format.name, format!("{dtype:?}"));
        assert_eq!(DType::from_ggml(dtype as u32), Some(dtype));
        assert_eq!(DType::from_name(&format.name.to_lowercase()), Some(dtype));
        assert_eq!(format.unpack.is_some(), format.arith.is_integer(), "{}", format.name);
        assert!(format.unpack.is_none() || format.block_len % 32 == 0, "{}", format.name);
    }
}

#[test]
fn rows_agree_with_the_reference_table() {
    let table: serde_json::Map<String, serde_json::Value> =
        serde_json::from_slice(&testdata("quant-blocks.json")).unwrap();
    assert_eq!(table.len(), block_formats().count());
    for (name, row) in table {
        let format = DType::from_name(&name).unwrap().format();
        let ours = [format.dtype as usize, format.block_len, format.block_bytes];
        let theirs = ["ggml_type", "elements", "bytes"].map(|key| row[key].as_u64().unwrap() as usize);
        assert_eq!(ours, theirs, "{name}");
    }
}

#[test]
fn dequantize_equals_reference_values_bit_for_bit() {
    let file = testdata("quant-blocks.safetensors");
    let tensors = SafeTensors::deserialize(&file).unwrap();
    for format in block_formats() {
        let blocks = tensors.tensor(&format!("{}.bytes", format.name)).unwrap().data();
        let expected = tensors.tensor(&format!("{}.values", format.name)).unwrap().data();
        let expected: Vec<f32> = expected.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect();
        let values = dequantize(format, blocks);
        assert_eq!(values.len(), expected.len(), "{}", format.name);
        for (i, (w, e)) in values.iter().zip(&expected).enumerate() {
            assert_eq!(w.to_bits(), e.to_bits(), "{} value {i}: {w}, expected {e}", format.name);
        }
        assert_groups_equal_reference(format, blocks);
    }
}

#[test]
fn extreme_bytes_are_handled() {
    for format in block_formats() {
        for byte in [0x00, 0x7c, 0x7f, 0x80, 0xfc, 0xff] {
            let blocks = vec![byte; 2 * format.block_bytes];
            assert_groups_equal_reference(format, &blocks);
            unpack(format, &blocks).iter().for_each(|group| assert_fits_class(format, group));
        }
    }
}

/// Scales 2^(e - 127) and E4M3 by their definitions: the code 1 is the weight 1/2.
#[test]
fn scale_bytes_of_float4_formats_are_right() {
    for byte in 0..=255u8 {
        let mxfp4 = dequantize(DType::MXFP4.format(), &[&[byte][..], &[0x11; 16]].concat());
        assert_eq!(f64::from(mxfp4[0]), 2f64.powi(i32::from(byte) - 128), "MXFP4 scale {byte}");

        let (exponent, mantissa) = (i32::from(byte >> 3 & 15), f64::from(byte & 7) / 8.0);
        let scale = match exponent {
            _ if byte == 0x7f => 0.0,
            0 => mantissa * 2f64.powi(-6),
            _ => (1.0 + mantissa) * 2f64.powi(exponent - 7),
        };
        let nvfp4 = dequantize(DType::NVFP4.format(), &[[byte; 4].as_slice(), &[0x11; 32]].concat());
        assert_eq!(f64::from(nvfp4[0]), scale / 2.0, "NVFP4 scale {byte}");
    }
}

/// `|sum of sub * q * a|` over 32 columns stays below 2^24, so that f32 holds it exactly. The worst case is Q6_K,
/// 32 * 128 * 32 * 127 = 16646144. The bounds are what random blocks really reach, and no more.
#[test]
fn integer_sums_are_exact_in_f32() {
    for &(dtype, max_sub, max_q) in BOUNDS {
        let worst = 32 * u32::from(max_sub) * u32::from(max_q) * 127;
        assert!(worst < 1 << 24, "{}: {worst}", dtype.name());

        let format = dtype.format();
        let mut state = 1u64;
        let blocks: Vec<u8> = std::iter::repeat_with(|| {
            // Knuth's MMIX generator.
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (state >> 56) as u8
        })
        .take(2000 * format.block_bytes)
        .collect();
        let groups = unpack(format, &blocks);
        let sub = groups.iter().flat_map(|g| g.sub).map(i16::unsigned_abs).max();
        let q = groups.iter().flat_map(|g| g.q).map(i8::unsigned_abs).max();
        assert_eq!((sub, q), (Some(max_sub), Some(max_q)), "{}", format.name);
    }
    assert_eq!(BOUNDS.len(), block_formats().count());
}

fn dtype_and_blocks() -> impl Strategy<Value = (DType, Vec<u8>)> {
    let dtypes: Vec<_> = block_formats().map(|f| f.dtype).collect();
    (prop::sample::select(dtypes), 1..4usize).prop_flat_map(|(dtype, n)| {
        let bytes = n * dtype.format().block_bytes;
        (Just(dtype), prop::collection::vec(any::<u8>(), bytes))
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(4000))]

    #[test]
    fn unpack_equals_dequantize_on_any_bytes((dtype, blocks) in dtype_and_blocks()) {
        let format = dtype.format();
        assert_groups_equal_reference(format, &blocks);
        for group in unpack(format, &blocks) {
            assert_fits_class(format, &group);
        }
    }
}
