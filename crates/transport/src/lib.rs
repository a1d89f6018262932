//! The data plane: bytes in any memory, and the engines that move them between ranks.
//!
//! [`Engine`] is the interface. Groups above it check calls and explain failures; engines below it move bytes. Nothing
//! here depends on a particular engine.

#![forbid(unsafe_code)]

mod arithmetic;
mod device;
mod engine;
mod payload;
mod pool;
mod source;

pub use arithmetic::{copy, copy_and_read, reduce, reduce_and_read};
pub use device::{DeviceMemory, Stretch};
pub use engine::{AlteredPart, Awaited, Completion, Engine, Findings, Flight, Request, Stopped};
pub use payload::{Fence, Payload, Space};
pub use pool::{Account, Buffer, BufferPool};
pub use source::Source;
