//! Rope parameters of a config.json: `rope_parameters` (transformers 5), or `rope_scaling` and `rope_theta`.

use super::families::{Axes, Family};
use super::json::{Given, Keys, shown};
use crate::error::{Error, escape};
use crate::rope::{Llama3, LongRope, Rope, Scaling, Sections, Yarn, base_frequencies, scaled_frequencies};
use serde_json::Value;

/// Everything that the kinds of scaling are made from.
struct Params<'a> {
    keys: &'a Keys<'a>,
    family: &'a Family,
    /// `rope_parameters`, or else `rope_scaling`.
    block: Option<Keys<'a>>,
    /// `max_position_embeddings`
    context: usize,
    theta: f32,
    /// Dimensions of a head that rotate.
    width: usize,
}

/// Reads the rotation of a model with heads of `head_dim`.
pub fn rope(keys: &Keys, family: &Family, head_dim: usize, context: usize) -> Result<Rope, Error> {
    let block = block(keys)?;
    let given = block.as_ref().map(|block| block.positive("rope_theta")).transpose()?.and_then(Given::value);
    let theta = match given {
        Some(theta) => theta,
        None => keys.positive("rope_theta")?.or(family.defaults.theta, family.defaults.theta),
    };
    let width = width(keys, block.as_ref(), family, head_dim)?;
    let params = Params { keys, family, block, context, theta, width };
    let kind = match &params.block {
        None => "default",
        Some(block) => match block.text("rope_type")? {
            Some(kind) => kind,
            None => block.text("type")?.unwrap_or("default"),
        },
    };
    let mut rope = params.kind(kind)?;
    rope.sections = params.sections()?;
    Ok(rope)
}

/// The block of parameters. Where a file has both, the newer one counts, and the older one must not say otherwise.
fn block<'a>(keys: &Keys<'a>) -> Result<Option<Keys<'a>>, Error> {
    let (new, old) = (keys.object("rope_parameters")?, keys.object("rope_scaling")?);
    if let (Some(new), Some(old)) = (&new, &old) {
        for key in old.keys() {
            if let (Given::Value(a), Given::Value(b)) = (new.get(key), old.get(key))
                && !same(a, b)
            {
                return Err(old.error(key, format!("{}, while rope_parameters has {}", shown(b), shown(a))));
            }
        }
    }
    let block = new.or(old);
    if let Some(block) = &block
        && let Some(nested) = block.keys().find(|key| matches!(block.get(key), Given::Value(Value::Object(_))))
    {
        return Err(block.error(nested, "parameters of a kind of layers are not supported"));
    }
    Ok(block)
}

/// Equal, numbers by their value.
fn same(a: &Value, b: &Value) -> bool {
    a == b || a.as_f64().is_some_and(|x| b.as_f64() == Some(x))
}

/// Dimensions of a head that rotate.
fn width(keys: &Keys, block: Option<&Keys>, family: &Family, head_dim: usize) -> Result<usize, Error> {
    let key = "partial_rotary_factor";
    let of_block = block.map(|block| block.fraction(key)).transpose()?.and_then(Given::value);
    let factor = of_block.or(keys.fraction(key)?.value());
    let (key, width) = match (factor, keys.count("rotary_dim")?.value()) {
        (Some(factor), _) => (key, (head_dim as f64 * factor) as usize),
        (None, Some(width)) => ("rotary_dim", width),
        (None, None) => (key, head_dim),
    };
    if width != head_dim && !family.partial_rotary {
        let what = format!("heads of {head_dim} of which {width} dimensions rotate are not supported in this family");
        return Err(keys.error(key, what));
    }
    if width == 0 || width > head_dim || width % 2 != 0 {
        let what = format!("expected an even number up to the head's {head_dim} dimensions, found {width}");
        return Err(keys.error(key, what));
    }
    Ok(width)
}

impl Params<'_> {
    fn kind(&self, kind: &str) -> Result<Rope, Error> {
        let (theta, width) = (self.theta, self.width);
        let plain = |kind, inv_freq| {
            let (magnitude, scaling) = (1.0, Scaling::Divided);
            Rope { inv_freq, long: None, sections: None, magnitude, kind, theta, scaling }
        };
        match kind {
            "default" => Ok(plain("none", base_frequencies(theta, width))),
            "mrope" if self.family.axes.is_some() => Ok(plain("none", base_frequencies(theta, width))),
            "linear" => {
                let factor = self.require("factor")?;
                let slower = base_frequencies(theta, width).into_iter().map(|f| f / factor);
                Ok(Rope { scaling: Scaling::Linear(factor), ..plain("linear", slower.collect()) })
            }
            "llama3" => Ok(plain("llama3", self.llama3()?.frequencies(theta, width))),
            // Phi-3 had another name for its first kind.
            "longrope" | "su" => self.longrope(),
            "yarn" if self.family.original_context_outside => self.longrope(),
            "yarn" => {
                let (yarn, magnitude) = self.yarn()?;
                let scaling = Scaling::Yarn(yarn);
                Ok(Rope { magnitude, scaling, ..plain("yarn", yarn.frequencies(theta, width)) })
            }
            other => {
                let supported = "default, linear, llama3, yarn, longrope";
                let what = format!("\"{}\" is not supported; supported are {supported}", escape(other));
                Err(self.block().error("rope_type", what))
            }
        }
    }

    /// The block, or where it would be.
    fn block(&self) -> &Keys<'_> {
        self.block.as_ref().unwrap_or(self.keys)
    }

    fn require(&self, key: &str) -> Result<f32, Error> {
        self.block().positive(key)?.value().ok_or_else(|| self.block().missing(key))
    }

    fn optional(&self, key: &str) -> Result<Option<f32>, Error> {
        Ok(self.block().positive(key)?.value())
    }

    /// Positions before scaling.
    fn original_context(&self) -> Result<usize, Error> {
        let key = "original_max_position_embeddings";
        let outside = self.keys.count(key)?.value();
        if self.family.original_context_outside {
            return outside.ok_or_else(|| self.keys.missing(key));
        }
        Ok(outside.or(self.block().count(key)?.value()).unwrap_or(self.context))
    }

    /// How many times longer the context is than the original one.
    fn stretch(&self) -> Result<f32, Error> {
        Ok(self.context as f32 / self.original_context()? as f32)
    }

    fn llama3(&self) -> Result<Llama3, Error> {
        let (low, high) = (self.require("low_freq_factor")?, self.require("high_freq_factor")?);
        if high <= low {
            let what = format!("expected a number above low_freq_factor {low}, found {high}");
            return Err(self.block().error("high_freq_factor", what));
        }
        Ok(Llama3 {
            factor: self.require("factor")?,
            low_freq_factor: low,
            high_freq_factor: high,
            original_context: self.original_context()?,
        })
    }

    fn yarn(&self) -> Result<(Yarn, f32), Error> {
        let factor = match self.block().positive("factor")? {
            Given::Absent => return Err(self.block().missing("factor")),
            Given::Null => self.stretch()?,
            Given::Value(factor) => factor,
        };
        // Zero is as good as absent.
        let or_default = |key: &str, default: f32| {
            Ok::<f32, Error>(self.block().not_negative(key)?.value().filter(|&x| x != 0.0).unwrap_or(default))
        };
        let yarn = Yarn {
            factor,
            original_context: self.original_context()?,
            beta_fast: or_default("beta_fast", 32.0)?,
            beta_slow: or_default("beta_slow", 1.0)?,
            truncate: self.block().flag("truncate")?.unwrap_or(true),
        };
        let (m, all) = (or_default("mscale", 0.0)?, or_default("mscale_all_dim", 0.0)?);
        let magnitude = match self.optional("attention_factor")? {
            Some(factor) => factor,
            None if m != 0.0 && all != 0.0 => Yarn::magnitude(factor, m) / Yarn::magnitude(factor, all),
            None => Yarn::magnitude(factor, 1.0),
        };
        Ok((yarn, magnitude))
    }

    fn longrope(&self) -> Result<Rope, Error> {
        let (theta, width, original_context) = (self.theta, self.width, self.original_context()?);
        if original_context < 2 {
            return Err(self.keys.error("original_max_position_embeddings", "expected a number above 1"));
        }
        let (short, long) = (self.factors("short_factor")?, self.factors("long_factor")?);
        let factor = match self.optional("factor")? {
            Some(factor) => factor,
            None => self.stretch()?,
        };
        let magnitude = match self.optional("attention_factor")? {
            Some(magnitude) => magnitude,
            None => LongRope::magnitude(factor, original_context),
        };
        Ok(Rope {
            inv_freq: scaled_frequencies(theta, width, &short),
            long: Some(LongRope { original_context, inv_freq: scaled_frequencies(theta, width, &long) }),
            sections: None,
            magnitude,
            kind: "longrope",
            theta,
            scaling: Scaling::LongRope([short, long]),
        })
    }

    /// One of longrope's lists: a factor for each pair.
    fn factors(&self, key: &str) -> Result<Vec<f32>, Error> {
        let factor = |v: &Value| v.as_f64().map(|x| x as f32).filter(|x| x.is_finite() && *x > 0.0);
        let half = self.width / 2;
        let list = self.block().list(key, "numbers above 0", factor)?.ok_or_else(|| self.block().missing(key))?;
        if list.len() != half {
            let what = format!("wrong length: expected {half} factors, one a pair, found {}", list.len());
            return Err(self.block().error(key, what));
        }
        Ok(list)
    }

    /// Pairs that turn by time, height and width.
    fn sections(&self) -> Result<Option<Sections>, Error> {
        let Some(Axes { sections: usual, interleaved, .. }) = self.family.axes else { return Ok(None) };
        let order = "mrope_interleaved";
        if self.block().flag(order)?.is_some_and(|given| given != interleaved) {
            return Err(self.block().error(order, format!("only {interleaved} is supported in this family")));
        }
        let key = "mrope_section";
        let size = |v: &Value| v.as_u64().and_then(|n| u32::try_from(n).ok()).map(|n| n as usize);
        let sizes = self.block().list(key, "three whole numbers", size)?.unwrap_or(usual.to_vec());
        let half = self.width / 2;
        match sizes[..] {
            [t, h, w] if t + h + w == half => Ok(Some(Sections { sizes: [t, h, w], interleaved })),
            _ => {
                let what = format!("expected three numbers that add up to {half} pairs, found {sizes:?}");
                Err(self.block().error(key, what))
            }
        }
    }
}
