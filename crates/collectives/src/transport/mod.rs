//! The data plane: bytes somewhere, and the engines that move them between ranks.
//!
//! [`Engine`] is the seam. Above it, groups check and explain; below it, bytes move. Nothing here names an engine.

mod arithmetic;
mod engine;
mod payload;
mod pool;
mod source;

pub(crate) use arithmetic::{Combined, copy_and_read, reduce_and_read};
pub use arithmetic::{copy, reduce};
pub use engine::{Awaited, Completion, Engine, Findings, Flight, Request, Withdrawn};
pub use payload::{Fence, Payload, Space};
pub use pool::{Account, Buffer, BufferPool};
pub use source::Source;
