//! Rotary positions: every kind of scaling ends as a list of inverse frequencies and one magnitude.
//!
//! Frequencies are computed as the reference does, in single precision from `1 / theta^(2i / width)`, with powers
//! from basic operations only, so that every machine gets the same bits.

use puna_kernels::math;

/// Rotation of the first `2 * inv_freq.len()` dimensions of a head, in pairs `(i, i + half)`.
#[derive(Clone, Debug, PartialEq)]
pub struct Rope {
    /// Angle per position of each pair.
    pub inv_freq: Vec<f32>,
    /// What takes its place in long sequences.
    pub long: Option<LongRope>,
    /// Which of three positions turns a pair; all are the same without sections.
    pub sections: Option<Sections>,
    /// Multiplies cosines and sines (YaRN's attention factor).
    pub magnitude: f32,
    /// The kind of scaling, for people.
    pub kind: &'static str,
    /// The base.
    pub theta: f32,
    /// What the frequencies were made from.
    pub scaling: Scaling,
}

/// What a rotation's frequencies were made from, beside its base: what a file says of it.
#[derive(Clone, Debug, PartialEq)]
pub enum Scaling {
    /// The frequencies say it all: those of the base, each divided by some number.
    Divided,
    /// All are divided by this factor.
    Linear(f32),
    /// YaRN.
    Yarn(Yarn),
    /// Factors of each pair: in short sequences, in long ones.
    LongRope([Vec<f32>; 2]),
}

/// Longrope: sequences longer than the original context turn by other frequencies, from the first position on.
#[derive(Clone, Debug, PartialEq)]
pub struct LongRope {
    /// The longest sequence that keeps the short list.
    pub original_context: usize,
    /// Angle per position of each pair.
    pub inv_freq: Vec<f32>,
}

/// Multi-axis rotation: pairs turn by time, height or width.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sections {
    /// Pairs of each axis.
    pub sizes: [usize; 3],
    /// Axes take turns, pair by pair, as long as they have pairs left; otherwise they follow one another.
    pub interleaved: bool,
}

impl Sections {
    /// The axis of pair `i`.
    fn axis(&self, i: usize) -> usize {
        let [t, h, w] = self.sizes;
        if self.interleaved {
            match i % 3 {
                1 if i < 3 * h => 1,
                2 if i < 3 * w => 2,
                _ => 0,
            }
        } else if i < t {
            0
        } else if i < t + h {
            1
        } else {
            2
        }
    }
}

/// YaRN's parameters (arXiv 2309.00071), named as transformers names them.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Yarn {
    /// How many times longer the context became.
    pub factor: f32,
    /// Positions before scaling.
    pub original_context: usize,
    /// Rotations over the original context above which a frequency stays.
    pub beta_fast: f32,
    /// Rotations below which a frequency is divided by the factor.
    pub beta_slow: f32,
    /// Round the borders of the ramp outwards.
    pub truncate: bool,
}

/// `1 / theta^(2i / width)` for each pair of `width` rotary dimensions.
pub fn base_frequencies(theta: f32, width: usize) -> Vec<f32> {
    base_wavelengths(theta, width).map(|w| 1.0 / w).collect()
}

/// `1 / (factor * theta^(2i / width))`, a factor for each pair.
pub fn scaled_frequencies(theta: f32, width: usize, factors: &[f32]) -> Vec<f32> {
    base_wavelengths(theta, width).zip(factors).map(|(w, f)| 1.0 / (f * w)).collect()
}

fn base_wavelengths(theta: f32, width: usize) -> impl Iterator<Item = f32> {
    (0..width / 2).map(move |i| {
        let exponent = (2 * i) as f32 / width as f32;
        math::pow(f64::from(theta), f64::from(exponent)) as f32
    })
}

impl Yarn {
    /// Frequencies between those of the original context and those divided by the factor.
    pub fn frequencies(&self, theta: f32, width: usize) -> Vec<f32> {
        // The pair that turns so many times over the original context.
        let pair = |rotations: f32| {
            let wavelengths = self.original_context as f64 / (f64::from(rotations) * 2.0 * std::f64::consts::PI);
            width as f64 * math::ln(wavelengths) / (2.0 * math::ln(f64::from(theta)))
        };
        let (mut low, mut high) = (pair(self.beta_fast), pair(self.beta_slow));
        if self.truncate {
            (low, high) = (low.floor(), high.ceil());
        }
        let (low, mut high) = (low.max(0.0) as f32, high.min(width as f64 - 1.0) as f32);
        if low == high {
            high += 0.001;
        }
        let blend = |(i, freq): (usize, f32)| {
            let ramp = ((i as f32 - low) / (high - low)).clamp(0.0, 1.0);
            let keep = 1.0 - ramp;
            freq / self.factor * (1.0 - keep) + freq * keep
        };
        base_frequencies(theta, width).into_iter().enumerate().map(blend).collect()
    }

    /// `0.1 m ln(factor) + 1`: how attention sharpens with length.
    pub fn magnitude(factor: f32, m: f32) -> f32 {
        if factor <= 1.0 { 1.0 } else { (0.1 * f64::from(m) * math::ln(f64::from(factor)) + 1.0) as f32 }
    }
}

/// Llama 3.1's scaling: slow pairs are divided by a factor, fast ones stay, those between are blended.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Llama3 {
    /// Divides slow pairs.
    pub factor: f32,
    /// Turns over the original context below which a pair is slow.
    pub low_freq_factor: f32,
    /// Turns above which it is fast; above `low_freq_factor`.
    pub high_freq_factor: f32,
    /// Positions before scaling.
    pub original_context: usize,
}

impl Llama3 {
    /// Frequencies as transformers computes them, in single precision.
    pub fn frequencies(&self, theta: f32, width: usize) -> Vec<f32> {
        let (low, high, context) = (self.low_freq_factor, self.high_freq_factor, self.original_context as f32);
        let scale = |freq: f32| {
            let wavelength = 2.0 * std::f32::consts::PI / freq;
            if wavelength < context / high {
                freq
            } else if wavelength > context / low {
                freq / self.factor
            } else {
                let smooth = (context / wavelength - low) / (high - low);
                (1.0 - smooth) * freq / self.factor + smooth * freq
            }
        };
        base_frequencies(theta, width).into_iter().map(scale).collect()
    }
}

impl LongRope {
    /// What cosines and sines are multiplied by in sequences of any length, where the context became `factor` times
    /// longer: `sqrt(1 + ln(factor) / ln(original))`.
    pub fn magnitude(factor: f32, original_context: usize) -> f32 {
        if factor <= 1.0 {
            return 1.0;
        }
        (1.0 + math::ln(f64::from(factor)) / math::ln(original_context as f64)).sqrt() as f32
    }
}

impl Rope {
    /// Pairs that rotate.
    pub fn half(&self) -> usize {
        self.inv_freq.len()
    }

    /// Whether a sequence of `len` positions turns by the long list.
    pub fn is_long(&self, len: usize) -> bool {
        self.long.as_ref().is_some_and(|long| len > long.original_context)
    }

    /// Appends cosines and sines of a position (time, height, width; the same number three times in text).
    pub fn push_angles(&self, position: [u32; 3], is_long: bool, cos: &mut Vec<f32>, sin: &mut Vec<f32>) {
        let list = self.long.as_ref().filter(|_| is_long).map_or(&self.inv_freq, |long| &long.inv_freq);
        for (i, freq) in list.iter().enumerate() {
            let axis = self.sections.map_or(0, |sections| sections.axis(i));
            // The angle is rounded to single precision, as in the reference.
            let angle = position[axis] as f32 * freq;
            let (s, c) = math::sin_cos(f64::from(angle));
            cos.push(c as f32 * self.magnitude);
            sin.push(s as f32 * self.magnitude);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frequencies_fall_from_one() {
        let f = base_frequencies(10_000.0, 8);
        for (f, e) in f.iter().zip([1.0, 0.1, 0.01, 0.001f32]) {
            assert!((f / e - 1.0).abs() < 1e-6, "{f} expected {e}");
        }
    }

    #[test]
    fn sections_share_out_the_pairs() {
        let axes =
            |sizes, interleaved| -> Vec<usize> { (0..8).map(|i| Sections { sizes, interleaved }.axis(i)).collect() };
        assert_eq!(axes([2, 3, 3], false), [0, 0, 1, 1, 1, 2, 2, 2]);
        assert_eq!(axes([4, 2, 2], true), [0, 1, 2, 0, 1, 2, 0, 0]);
    }

    #[test]
    fn llama3_has_three_bands() {
        let scaled = Llama3 { factor: 8.0, low_freq_factor: 1.0, high_freq_factor: 4.0, original_context: 64 };
        let (base, scaled) = (base_frequencies(500_000.0, 32), scaled.frequencies(500_000.0, 32));
        let mut bands = [0; 3];
        for (freq, got) in base.into_iter().zip(scaled) {
            let turns = f64::from(freq) * 64.0 / (2.0 * std::f64::consts::PI);
            let (band, share) = match turns {
                t if t > 4.0 => (0, 1.0),
                t if t < 1.0 => (2, 0.0),
                t => (1, (t - 1.0) / 3.0),
            };
            let expected = f64::from(freq) * (share + (1.0 - share) / 8.0);
            assert!((f64::from(got) / expected - 1.0).abs() < 1e-6, "{got} expected {expected}");
            bands[band] += 1;
        }
        assert!(bands.iter().all(|&n| n > 0), "{bands:?}");
    }

    #[test]
    fn longrope_sharpens_with_length() {
        assert_eq!(LongRope::magnitude(1.0, 4096), 1.0);
        assert!((LongRope::magnitude(32.0, 4096) - 1.190_238).abs() < 1e-6);
    }

    #[test]
    fn yarn_keeps_fast_pairs_and_slows_the_others() {
        let yarn = Yarn { factor: 4.0, original_context: 64, beta_fast: 32.0, beta_slow: 1.0, truncate: true };
        let (base, scaled) = (base_frequencies(10_000.0, 16), yarn.frequencies(10_000.0, 16));
        assert_eq!(scaled[0], base[0]);
        assert!((scaled[7] / base[7] - 0.25).abs() < 1e-6);
        assert!(scaled.iter().zip(&base).all(|(s, b)| s <= b && *s >= b * 0.2499));
        assert!((Yarn::magnitude(4.0, 1.0) - 1.138_629_4).abs() < 1e-6);
        assert_eq!(Yarn::magnitude(1.0, 1.0), 1.0);
    }
}
