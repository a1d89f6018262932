//! The data plane: bytes somewhere, and the engines that move them between ranks.
//!
//! [`Engine`] is the seam. Above it, groups check and explain; below it, bytes move. Nothing here names an engine.

#![forbid(unsafe_code)]

mod arithmetic;
mod engine;
mod payload;
mod pool;
mod source;

pub use arithmetic::{Combined, copy, copy_and_read, reduce, reduce_and_read};
pub use engine::{Awaited, Completion, Engine, Findings, Flight, Request, Withdrawn};
pub use payload::{Fence, Payload, Space};
pub use pool::{Account, Buffer, BufferPool};
pub use source::Source;
