//! The bridge between Burn's tensors and the bytes that collectives move and files hold. Both engines use it.
//!
//! Tensors become a [`Source`](burn_fsdp_collectives::Source), which the ranks read; a received buffer becomes a tensor.
//! The CPU backend's memory is used in place in both directions. Other devices have their own memory, so their elements
//! are copied, and [`Staging`] counts the copies.
//!
//! | file | does |
//! |---|---|
//! | `batch` | nests of tensors |
//! | `element` | the only mapping of element types between Burn, collectives and files |
//! | `launch` | starting ranks on the stream that they share |
//! | `lend` | tensors to bytes |
//! | `device` | tensors that threads exchange in the memory of a device |
//! | `medium` | the memory in which a collective exchanges tensors |
//! | `take` | bytes to tensors |
//! | `low_bit` | optimizer states in 16 or 8 bits |
//! | `handle` | tensors as handles of an interpreter, and back |
//! | `host` | tells which tensors are in the host's memory |
//! | `mapped` | bytes in files, mapped into memory |
//! | `staging` | copies to and from other memory, counted |

// `mapped.rs` maps files. Nothing else is unsafe.

mod batch;
mod device;
mod element;
mod handle;
mod host;
mod launch;
mod lend;
mod low_bit;
mod mapped;
mod medium;
mod staging;
mod take;

pub use batch::{Batch, BatchMapper, FloatMapper, cast_floats, map_floats, moved_to};
pub use device::{device_buffer, device_source, device_tensor, exchanges_on_devices};
pub use element::{can_reduce, cast, float_type, is_half, moved_type, reduced_type, saved_type};
pub use handle::{device_handle, host_handle, of_handle};
pub use host::{is_host, is_host_backend, on_host};
pub use launch::launch;
pub use lend::{data_source, first_bytes, read, source};
pub use low_bit::{LowBits, Rounding, StateFormat};
pub use mapped::Mapped;
pub use medium::{Medium, arrived};
pub use staging::{Staged, Staging, Transfers};
pub use take::{data, owned, tensor};
