//! Which format each tensor gets.

use crate::quantize::fitting;
use puna_kernels::{Arith, DType};

/// The format that a model's weights are to have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Target {
    /// Each its own; FP8, which GGUF does not have, becomes F32, in which nothing is lost.
    Keep,
    /// This one, wherever it fits.
    Format(DType),
}

/// What the choice of a tensor's format depends on.
pub struct Tensor<'a> {
    /// GGUF's name.
    pub name: &'a str,
    /// Its dimensions.
    pub dims: usize,
    /// Length of a row.
    pub cols: usize,
    /// It makes the logits.
    pub is_head: bool,
}

impl Tensor<'_> {
    /// Whether it is multiplied with many times over or looked up in, so that its format matters. Norms, biases and
    /// routers are small, and every reader expects them in F32.
    pub fn is_bulk(&self) -> bool {
        self.dims >= 2 && self.name.ends_with(".weight") && !self.name.contains("ffn_gate_inp")
    }

    /// The format of a tensor that is large. The second one is what it would have been if rows were whole blocks.
    pub fn format(&self, own: DType, target: Target) -> (DType, Option<DType>) {
        let Target::Format(target) = target else { return (own, None) };
        if target.format().arith == Arith::Float {
            return (target, None);
        }
        // What is wrong in the logits is wrong in every answer; and so does llama.cpp.
        let wanted = match target {
            DType::Q8_0 => DType::Q8_0,
            _ if self.is_head && DType::Q6_K.row_bytes(self.cols).is_some() => return (DType::Q6_K, None),
            _ if self.is_head => DType::Q8_0,
            target => target,
        };
        let fitting = fitting(wanted, self.cols).unwrap_or(DType::F16);
        (fitting, Some(wanted).filter(|&wanted| wanted != fitting))
    }
}

/// `general.file_type` of a file whose weights mostly have this format: ggml's `llama_ftype`.
pub fn file_type(dtype: DType) -> u32 {
    match dtype {
        DType::F32 => 0,
        DType::F16 => 1,
        DType::Q4_0 => 2,
        DType::Q4_1 => 3,
        DType::Q8_0 => 7,
        DType::Q5_0 => 8,
        DType::Q5_1 => 9,
        DType::Q2_K => 10,
        DType::Q3_K => 11,
        DType::Q4_K => 14,
        DType::Q5_K => 16,
        DType::Q6_K => 18,
        DType::IQ2_XXS => 19,
        DType::IQ2_XS => 20,
        DType::IQ3_XXS => 23,
        DType::IQ1_S => 24,
        DType::IQ4_NL => 25,
        DType::IQ3_S => 26,
        DType::IQ2_S => 28,
        DType::IQ4_XS => 30,
        DType::IQ1_M => 31,
        DType::BF16 => 32,
        DType::TQ1_0 => 36,
        DType::TQ2_0 => 37,
        DType::MXFP4 => 38,
        DType::NVFP4 => 39,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_output_has_more_bits_than_the_rest() {
        let format = |is_head, cols, target| {
            let tensor = Tensor { name: "output.weight", dims: 2, cols, is_head };
            tensor.format(DType::F32, Target::Format(target))
        };
        assert_eq!(format(false, 512, DType::Q4_K), (DType::Q4_K, None));
        assert_eq!(format(true, 512, DType::Q4_K), (DType::Q6_K, None));
        assert_eq!(format(true, 96, DType::Q4_0), (DType::Q8_0, None));
        assert_eq!(format(true, 512, DType::Q8_0), (DType::Q8_0, None));
        assert_eq!(format(true, 80, DType::Q4_0), (DType::F16, Some(DType::Q8_0)));
        assert_eq!(format(false, 96, DType::Q4_K), (DType::Q8_0, Some(DType::Q4_K)));
        assert_eq!(format(false, 80, DType::Q4_K), (DType::F16, Some(DType::Q4_K)));
        assert_eq!(format(true, 80, DType::BF16), (DType::BF16, None));
    }

    #[test]
    fn every_format_has_a_number() {
        let mut seen: Vec<u32> = puna_kernels::dtype::FORMATS.iter().map(|format| file_type(format.dtype)).collect();
        seen.sort();
        seen.dedup();
        assert_eq!(seen.len(), puna_kernels::dtype::FORMATS.len());
    }
}
