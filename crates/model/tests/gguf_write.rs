//! What the writer writes is what the reader reads: metadata of every type, tensors of every kind, and nothing of a
//! file that did not become complete.

#![allow(clippy::unwrap_used)]

use proptest::prelude::*;
use puna_kernels::DType;
use puna_kernels::dtype::FORMATS;
use puna_model::Error;
use puna_model::gguf::{Field, Gguf, Header, TensorType, Value};
use std::fs;
use std::path::Path;

fn field() -> impl Strategy<Value = Field> {
    let text = "[a-z\u{e9}\u{1f642} ]{0,12}";
    prop_oneof![
        any::<u8>().prop_map(Field::from),
        any::<i8>().prop_map(Field::from),
        any::<u16>().prop_map(Field::from),
        any::<i16>().prop_map(Field::from),
        any::<u32>().prop_map(Field::from),
        any::<i32>().prop_map(Field::from),
        any::<u64>().prop_map(Field::from),
        any::<i64>().prop_map(Field::from),
        any::<f32>().prop_map(Field::from),
        any::<f64>().prop_map(Field::from),
        any::<bool>().prop_map(Field::from),
        text.prop_map(Field::from),
        prop::collection::vec(any::<u8>(), 0..9).prop_map(|bytes| Field::from(&bytes[..])),
        prop::collection::vec(any::<i32>(), 0..9).prop_map(Field::from),
        prop::collection::vec(any::<bool>(), 0..9).prop_map(Field::from),
        prop::collection::vec(any::<f32>(), 0..9).prop_map(Field::from),
        prop::collection::vec(text, 0..9).prop_map(Field::from),
    ]
}

/// Rows of whole blocks.
fn tensor() -> impl Strategy<Value = (DType, Vec<usize>)> {
    (0..FORMATS.len(), prop::collection::vec(1usize..4, 0..4), 1usize..3).prop_map(|(format, outer, blocks)| {
        let format = FORMATS[format];
        (format.dtype, [&outer[..], &[blocks * format.block_len]].concat())
    })
}

fn bytes_of(dtype: DType, shape: &[usize], seed: u8) -> Vec<u8> {
    let [outer @ .., cols] = shape else { panic!("a tensor has a dimension") };
    let n = outer.iter().product::<usize>() * dtype.row_bytes(*cols).unwrap();
    (0..n).map(|i| (i as u8).wrapping_mul(31).wrapping_add(seed)).collect()
}

proptest! {
    #[test]
    fn reads_what_was_written(
        fields in prop::collection::btree_map("[a-z.]{1,20}", field(), 0..12),
        tensors in prop::collection::btree_map("[a-z0-9.]{1,63}", tensor(), 0..8),
        piece in 1usize..100,
    ) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.gguf");
        let mut header = Header::new(&path);
        for (key, field) in &fields {
            header.set(key, field.clone());
        }
        for (name, (dtype, shape)) in &tensors {
            header.tensor(name, shape, TensorType::Weight(*dtype)).unwrap();
        }
        let mut writer = header.create(false).unwrap();
        for (seed, (dtype, shape)) in (0..).zip(tensors.values()) {
            for piece in bytes_of(*dtype, shape, seed).chunks(piece) {
                writer.write(piece).unwrap();
            }
        }
        let size = writer.finish().unwrap();
        prop_assert_eq!(size, fs::metadata(&path).unwrap().len());

        let gguf = Gguf::open(&path).unwrap();
        gguf.check().unwrap();
        let read: Vec<(String, Field)> = gguf.meta().iter().map(|(key, value)| (key.to_owned(), value.into())).collect();
        prop_assert_eq!(read, fields.into_iter().collect::<Vec<_>>());
        prop_assert_eq!(gguf.tensors().len(), tensors.len());
        for ((seed, (name, (dtype, shape))), info) in (0..).zip(&tensors).zip(gguf.tensors()) {
            prop_assert_eq!((&*info.name, info.ty), (name.as_str(), TensorType::Weight(*dtype)));
            prop_assert_eq!(info.shape.iter().map(|&n| n as usize).collect::<Vec<_>>(), shape.clone());
            prop_assert_eq!(&gguf.data(info).unwrap()[..], &bytes_of(*dtype, shape, seed)[..]);
            prop_assert_eq!(info.offset % 32, 0);
        }
    }
}

#[test]
fn a_key_that_is_set_again_has_its_last_value() {
    let mut header = Header::new("x.gguf");
    header.set("a", 1u32);
    header.set("b", true);
    header.set("a", "two");
    // Weights lie where the writer puts them.
    header.set("general.alignment", 4096u32);
    let gguf = Gguf::parse("x.gguf", header.to_bytes().into()).unwrap();
    let read: Vec<_> = gguf.meta().iter().collect();
    assert_eq!(read, [("a", Value::Str(b"two")), ("b", Value::Bool(true))]);
}

fn refused(name: &str, shape: &[usize], dtype: DType) -> String {
    let mut header = Header::new("x.gguf");
    header.tensor("twice", &[1], TensorType::Weight(DType::F32)).unwrap();
    let error = header.tensor(name, shape, TensorType::Weight(dtype)).unwrap_err();
    assert!(matches!(error, Error::Tensor { .. }), "{error:?}");
    error.to_string()
}

#[test]
fn tensors_that_the_format_does_not_have_are_refused() {
    assert!(refused("twice", &[1], DType::F32).contains("two tensors"));
    assert!(refused("", &[1], DType::F32).contains("0 bytes"));
    assert!(refused(&"x".repeat(64), &[1], DType::F32).contains("64 bytes"));
    assert!(refused("x", &[], DType::F32).contains("one to four"));
    assert!(refused("x", &[1; 5], DType::F32).contains("one to four"));
    assert!(refused("x", &[3, 0], DType::F32).contains("none of them 0"));
    assert!(refused("x", &[33], DType::Q8_0).contains("not a multiple"));
    assert!(refused("x", &[usize::MAX, 2], DType::F32).contains("overflows"));
}

fn names(folder: &Path) -> Vec<String> {
    let mut names: Vec<String> =
        fs::read_dir(folder).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

fn one_tensor(path: &Path) -> Header {
    let mut header = Header::new(path);
    header.tensor("x", &[4], TensorType::Weight(DType::F32)).unwrap();
    header
}

#[test]
fn a_file_that_is_not_complete_is_no_file() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    let mut writer = one_tensor(&path).create(false).unwrap();
    writer.write(&[0; 15]).unwrap();
    let error = writer.finish().unwrap_err().to_string();
    assert!(error.contains("\"x\": expected 16 bytes, found 15"), "{error}");
    let mut writer = one_tensor(&path).create(false).unwrap();
    assert!(writer.write(&[0; 17]).unwrap_err().to_string().contains("expected 16 bytes, found 17"));
    drop(writer);
    let mut writer = one_tensor(&path).create(false).unwrap();
    writer.write(&[0; 16]).unwrap();
    assert!(writer.write(&[0]).unwrap_err().to_string().contains("more bytes than tensors"));
    drop(writer);
    assert!(names(folder.path()).is_empty(), "{:?}", names(folder.path()));
}

#[test]
fn a_file_that_is_there_stays_until_it_may_be_replaced() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    fs::write(&path, "old").unwrap();
    let error = one_tensor(&path).create(false).err().unwrap().to_string();
    assert!(error.ends_with("cannot be written: there is a file of this name already"), "{error}");
    let mut writer = one_tensor(&path).create(true).unwrap();
    assert_eq!(fs::read(&path).unwrap(), b"old");
    writer.write(&[7; 16]).unwrap();
    writer.finish().unwrap();
    assert_eq!(Gguf::open(&path).unwrap().tensors().len(), 1);
    assert_eq!(names(folder.path()), ["model.gguf"]);
    // One that appears meanwhile stays, too.
    let other = folder.path().join("other.gguf");
    let mut writer = one_tensor(&other).create(false).unwrap();
    writer.write(&[7; 16]).unwrap();
    fs::write(&other, "new").unwrap();
    assert!(writer.finish().unwrap_err().to_string().contains("already"));
    assert_eq!(fs::read(&other).unwrap(), b"new");
}

#[test]
fn places_where_no_file_can_be() {
    let folder = tempfile::tempdir().unwrap();
    let error = |path: &Path| one_tensor(path).create(true).err().unwrap().to_string();
    assert!(error(folder.path()).contains("it is a directory"));
    assert!(error(&folder.path().join("none/model.gguf")).contains("there is no such folder"));
    #[cfg(unix)]
    assert!(error(Path::new("/dev/null")).contains("it is not a regular file"));
}

#[cfg(unix)]
#[test]
fn others_may_read_the_file_as_they_may_any_other() {
    use std::os::unix::fs::PermissionsExt;
    let folder = tempfile::tempdir().unwrap();
    let (path, plain) = (folder.path().join("model.gguf"), folder.path().join("plain"));
    Header::new(&path).create(false).unwrap().finish().unwrap();
    fs::write(&plain, "").unwrap();
    let mode = |path| fs::metadata(path).unwrap().permissions().mode();
    assert_eq!(mode(&path), mode(&plain));
}
