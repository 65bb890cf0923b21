//! Levels of instructions: detected once, chosen at run time.

use crate::simd::{Scalar, Simd};
use std::fmt;
use std::str::FromStr;
use std::sync::OnceLock;

/// A level of instructions. Every level gives the same bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Isa {
    /// Plain Rust, on every processor.
    Scalar,
    /// AVX2 with FMA and F16C; AVX-VNNI where present.
    Avx2,
    /// AVX-512 F, BW, DQ and VL; AVX-512 VNNI where present.
    Avx512,
}

/// What a kernel does at one level; [`Isa::run`] calls it inside a function that enables the instructions.
pub(crate) trait Kernel {
    /// Must be `#[inline(always)]`, and so must be everything hot that it calls.
    fn run<S: Simd>(self, s: S);
}

impl Isa {
    /// The best level of this processor, or what the environment variable PUNA_ISA names if that is lower.
    pub fn detect() -> Isa {
        static BEST: OnceLock<Isa> = OnceLock::new();
        *BEST.get_or_init(|| {
            let best = *Isa::available().last().expect("Scalar is always available");
            let wish = std::env::var("PUNA_ISA").ok().and_then(|name| name.parse().ok());
            wish.map_or(best, |wish: Isa| wish.min(best))
        })
    }

    /// The levels of this processor, lowest first.
    pub fn available() -> &'static [Isa] {
        static LEVELS: OnceLock<Vec<Isa>> = OnceLock::new();
        LEVELS.get_or_init(|| [Isa::Scalar, Isa::Avx2, Isa::Avx512].into_iter().filter(|isa| isa.present()).collect())
    }

    /// The name that `--isa` and PUNA_ISA take.
    pub fn name(self) -> &'static str {
        match self {
            Isa::Scalar => "scalar",
            Isa::Avx2 => "avx2",
            Isa::Avx512 => "avx512",
        }
    }

    #[cfg(target_arch = "x86_64")]
    fn present(self) -> bool {
        match self {
            Isa::Scalar => true,
            Isa::Avx2 => {
                is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c")
            }
            Isa::Avx512 => {
                Isa::Avx2.present()
                    && is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512dq")
                    && is_x86_feature_detected!("avx512vl")
            }
        }
    }

    #[cfg(not(target_arch = "x86_64"))]
    fn present(self) -> bool {
        self == Isa::Scalar
    }

    /// Runs a kernel at this level.
    ///
    /// # Panics
    /// If the level is not available: callers take it from [`Isa::detect`] or [`Isa::available`].
    pub(crate) fn run<K: Kernel>(self, kernel: K) {
        #[cfg(target_arch = "x86_64")]
        {
            use crate::simd::{Avx2, Avx512};
            assert!(Isa::available().contains(&self), "{self} is not available on this processor");
            static VNNI: OnceLock<(bool, bool)> = OnceLock::new();
            let &(avx_vnni, avx512_vnni) =
                VNNI.get_or_init(|| (is_x86_feature_detected!("avxvnni"), is_x86_feature_detected!("avx512vnni")));
            // SAFETY: each level was detected above.
            unsafe {
                match self {
                    Isa::Scalar => kernel.run(Scalar),
                    Isa::Avx2 if avx_vnni => run_avx2_vnni(kernel, Avx2::new()),
                    Isa::Avx2 => run_avx2(kernel, Avx2::new()),
                    Isa::Avx512 if avx512_vnni => run_avx512_vnni(kernel, Avx512::new()),
                    Isa::Avx512 => run_avx512(kernel, Avx512::new()),
                }
            }
        }
        #[cfg(not(target_arch = "x86_64"))]
        kernel.run(Scalar);
    }
}

#[cfg(target_arch = "x86_64")]
mod enabled {
    use super::Kernel;
    use crate::simd::{Avx2, Avx512};

    #[target_feature(enable = "avx2,fma,f16c")]
    pub fn run_avx2<K: Kernel>(kernel: K, s: Avx2<false>) {
        kernel.run(s);
    }

    #[target_feature(enable = "avx2,fma,f16c,avxvnni")]
    pub fn run_avx2_vnni<K: Kernel>(kernel: K, s: Avx2<true>) {
        kernel.run(s);
    }

    #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")]
    pub fn run_avx512<K: Kernel>(kernel: K, s: Avx512<false>) {
        kernel.run(s);
    }

    #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
    pub fn run_avx512_vnni<K: Kernel>(kernel: K, s: Avx512<true>) {
        kernel.run(s);
    }
}
#[cfg(target_arch = "x86_64")]
use enabled::{run_avx2, run_avx2_vnni, run_avx512, run_avx512_vnni};

impl fmt::Display for Isa {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Isa {
    type Err = String;

    fn from_str(s: &str) -> Result<Isa, String> {
        [Isa::Scalar, Isa::Avx2, Isa::Avx512]
            .into_iter()
            .find(|isa| isa.name() == s)
            .ok_or_else(|| format!("'{s}' is no instruction level: expected scalar, avx2 or avx512"))
    }
}
