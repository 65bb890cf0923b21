//! Arithmetic on rows and blocks of language models. Knows no model.
//!
//! Every operation gives the same bits at every [`Isa`], for one row and for many, on one thread and on many: the
//! order of every sum is fixed and written down in docs/numerics.md.

pub mod act;
pub mod attention;
pub mod dtype;
pub mod exec;
mod float_panel;
pub mod isa;
pub mod kv;
pub mod linear;
pub mod math;
mod memory;
pub mod ops;
mod pack;
mod panel;
pub mod pool;
pub mod quant;
pub mod roof;
mod simd;

pub use act::{ActBlock, Acts};
pub use attention::{Attention, AttnScratch, KvView, attention};
pub use dtype::{Arith, DType, Format, Group, quantize};
pub use exec::Exec;
pub use isa::Isa;
pub use kv::{KV_BLOCK, KvBlocks, KvLayer, KvLayout, KvPlan, KvType, kv_store};
pub use linear::{Matrix, MatrixSource, Product, matmul, pack_in_place, packed_bytes};
pub use pool::Pool;
