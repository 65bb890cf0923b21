//! placeholder
use super::ChatTemplate;
use crate::error::Result;
use crate::tokenizer::{Segment, Tokenizer};
use serde_json::Value as Json;

pub(super) fn render(template: &ChatTemplate, root: Json, _tokenizer: &Tokenizer) -> Result<Vec<Segment>> {
    Ok(vec![Segment::trusted(template.render_variables(&root)?)])
}
