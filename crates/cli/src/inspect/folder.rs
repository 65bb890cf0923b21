//! The report of a Hugging Face folder. Its metadata is its config.json.

use super::common::{self, Checked};
use super::report::{Entry, File, Report, Shape, Special, Summary, Tensor, Tokenizer};
use crate::error::Error;
use puna::ModelFiles;
use puna_kernels::KvType;
use puna_model::error::escape;
use puna_model::hf::Folder;
use puna_model::{Checkpoint, Config};
use serde_json::{Value, json};

/// Describes a folder.
///
/// # Errors
/// Only when config.json cannot be opened.
pub fn report(folder: &Folder, ctx: Option<u64>, kv: KvType) -> Result<Report, Error> {
    let checked = Checked::new(folder, folder.problems(), folder.path());
    let file = |f: &puna_model::hf::safetensors::Container| File {
        path: f.path.clone(),
        bytes: f.map.len() as u64,
        format: "safetensors".to_owned(),
    };
    let tensor = |(name, file, info): (&str, usize, &puna_model::hf::safetensors::Info)| Tensor {
        name: name.to_owned(),
        ty: info.ty.name,
        shape: info.shape.iter().map(|&n| n as u64).collect(),
        bytes: info.range.end - info.range.start,
        file,
        offset: info.range.start,
    };
    let tensors: Vec<Tensor> = folder.tensors().map(tensor).collect();
    let mut metadata = Vec::new();
    // What is wrong with it is a reason already.
    if let Some(Ok(json)) = folder.file("config.json")?.map(|bytes| serde_json::from_slice(&bytes)) {
        flatten(String::new(), json, &mut metadata);
    }
    Ok(Report {
        files: folder.files().iter().map(file).collect(),
        summary: Summary {
            tokenizer: checked.files.as_ref().and_then(|files| tokenizer(folder, files)),
            ..summary(folder, &tensors, &metadata, &checked, (ctx, kv))
        },
        runs: checked.reasons.is_empty(),
        notices: checked.notices(),
        reasons: checked.reasons,
        metadata,
        tensors,
    })
}

/// The values of an object, with the names of objects they are in before theirs.
fn flatten(key: String, value: Value, entries: &mut Vec<Entry>) {
    match value {
        Value::Object(object) => {
            let prefix = if key.is_empty() { String::new() } else { format!("{key}.") };
            object.into_iter().for_each(|(key, value)| flatten(format!("{prefix}{key}"), value, entries));
        }
        value => {
            let shown = match &value {
                Value::String(text) => escape(text).to_string(),
                // JSON has its own escapes; quotes need no second one.
                value => escape(&value.to_string()).to_string().replace("\\\"", "\""),
            };
            let value = match value {
                Value::Array(list) if list.len() > common::MAX_ELEMENTS => json!({"type": "array", "len": list.len()}),
                value => value,
            };
            entries.push(Entry { key, value, shown });
        }
    }
}

fn summary(
    folder: &Folder,
    tensors: &[Tensor],
    metadata: &[Entry],
    checked: &Checked,
    (ctx, kv): (Option<u64>, KvType),
) -> Summary {
    let config = checked.config.as_ref();
    let shape = config.map_or_else(Shape::default, common::shape);
    let (types, elements, bytes) = common::types(tensors);
    let (parameters, active_parameters) = config.map_or((elements, elements), |c| parameters(folder, c));
    let ctx = ctx.unwrap_or_else(|| shape.context_length.unwrap_or(4096).min(4096) as u64);
    let find = |ends: &[&str]| metadata.iter().find(|e| ends.iter().any(|end| e.key.ends_with(end)));
    let factor = find(&["rope_parameters.factor", "rope_scaling.factor"]).and_then(|e| e.value.as_f64());
    let model_type = find(&["text_config.model_type"]).or(find(&["model_type"]));
    Summary {
        architecture: config.map(|c| c.arch.to_owned()).or(model_type.and_then(|e| Some(e.value.as_str()?.to_owned()))),
        name: None,
        parameters,
        active_parameters,
        rope: config.map(|c| common::rope(c, factor.map(|f| f as f32))),
        windows: config.map(common::windows).unwrap_or_default(),
        experts: config.and_then(common::experts),
        scales: config.map(common::scales).unwrap_or_default(),
        bits_per_weight: common::bits(elements, bytes),
        types,
        tokenizer: None,
        memory: common::memory(config, ctx, kv, checked.weight_bytes.unwrap_or(bytes)),
        shape,
    }
}

/// Parameters of the text model, and those that a token makes use of.
fn parameters(folder: &Folder, config: &Config) -> (u64, u64) {
    let (mut others, mut experts) = (0, 0);
    for name in folder.names().iter().filter(|name| common::is_trained(name)) {
        let elements = folder.shape(name).unwrap_or_default().iter().product::<usize>() as u64;
        // An expert's are `blk.L.ffn_gate.E.weight`.
        let is_expert = name.split('.').nth(3).is_some_and(|part| part.bytes().all(|b| b.is_ascii_digit()));
        *(if is_expert { &mut experts } else { &mut others }) += elements;
    }
    let (used, n) = config.moe.map_or((1, 1), |moe| (moe.routing.used as u64, moe.n_experts as u64));
    (others + experts, others + experts / n * used)
}

fn tokenizer(folder: &Folder, files: &ModelFiles) -> Option<Tokenizer> {
    let t = files.tokenizer()?;
    let special = |(role, id): (&str, Option<u32>)| {
        let id = id?;
        Some(Special { role: role.to_owned(), id: id.into(), text: Some(t.token_text(id).into_owned()) })
    };
    let roles = [("bos", t.bos_id()), ("eos", t.eos_id()), ("unknown", t.unk_id()), ("padding", t.pad_id())];
    let file = ["tokenizer.json", "tokenizer.model"].into_iter().find(|name| folder.path().join(name).exists());
    Some(Tokenizer {
        model: file.map(str::to_owned),
        pre: None,
        tokens: Some(t.vocab_size()),
        special: roles.into_iter().filter_map(special).collect(),
        add_bos: Some(t.adds_bos()),
        add_eos: Some(t.adds_eos()),
        chat_template: files.template().is_some(),
    })
}
