//! `puna template`: the prompt that a conversation becomes.

use crate::error::Error;
use crate::tokenize::read_text;
use clap::Args;
use puna::ModelFiles;
use puna_text::{ChatInput, ChatTemplate};
use serde_json::{Map, Value};
use std::io::Write;
use std::path::PathBuf;

/// Arguments of `puna template`.
#[derive(Args)]
pub struct TemplateArgs {
    /// GGUF file or Hugging Face folder; its metadata is enough
    model: PathBuf,
    /// JSON list of messages, passed to the template as they are; - is standard input
    #[arg(long, value_name = "FILE")]
    messages: PathBuf,
    /// Use this template (Jinja) in place of the model's
    #[arg(long, value_name = "FILE")]
    template: Option<PathBuf>,
    /// JSON list of tools
    #[arg(long, value_name = "FILE")]
    tools: Option<PathBuf>,
    /// A variable of the template, its value in JSON: add_generation_prompt=false; may be repeated
    #[arg(long, value_name = "NAME=JSON", value_parser = variable)]
    var: Vec<(String, Value)>,
}

fn variable(text: &str) -> Result<(String, Value), String> {
    let (name, value) = text.split_once('=').ok_or("expected NAME=JSON")?;
    let value = serde_json::from_str(value).map_err(|e| format!("the value of {name} is no JSON: {e}"))?;
    Ok((name.to_owned(), value))
}

/// Prints the prompt.
pub fn run(args: &TemplateArgs) -> Result<(), Error> {
    let read_json = |path: &PathBuf| -> Result<Value, Error> {
        serde_json::from_str(&read_text(Some(path))?).map_err(|e| Error::file(path, e))
    };
    let messages = read_json(&args.messages)?;
    let tools = args.tools.as_ref().map(read_json).transpose()?;
    let files = ModelFiles::open(&args.model)?;
    let source = match &args.template {
        Some(path) => read_text(Some(path))?,
        None => files.template().ok_or_else(|| puna::Error::NoTemplate { path: files.path() })?.to_owned(),
    };
    let tokenizer = files.tokenizer();
    let text_of = |id: Option<u32>| Some(tokenizer?.token_text(id?));
    let (bos, eos) = (text_of(tokenizer.and_then(|t| t.bos_id())), text_of(tokenizer.and_then(|t| t.eos_id())));
    let variables: Map<String, Value> = args.var.iter().cloned().collect();
    let input = ChatInput {
        messages: Some(&messages),
        tools: tools.as_ref(),
        add_generation_prompt: true,
        bos_token: bos.as_deref(),
        eos_token: eos.as_deref(),
        variables: Some(&variables),
    };
    let error = |e| puna::Error::text(&args.template.clone().unwrap_or_else(|| files.path()), e);
    let prompt = ChatTemplate::new(&source).and_then(|t| t.render(&input)).map_err(error)?;
    let mut out = std::io::stdout().lock();
    out.write_all(prompt.as_bytes())?;
    out.flush()?;
    Ok(())
}
