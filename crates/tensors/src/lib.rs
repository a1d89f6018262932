//! The bridge between Burn's tensors and the bytes that collectives move and files hold. Both engines use it.
//!
//! | file | does |
//! |---|---|
//! | `element` | the only mapping of element types between Burn, collectives and files |
//! | `lend` | tensor to bytes, as a collective reads them |
//! | `take` | bytes to tensor, over the memory that a collective has written |
//! | `host` | whether a tensor is in host memory, which is lent in place |
//! | `staging` | counts the copies of tensors that are not |

#![forbid(unsafe_code)]

mod element;
mod host;
mod lend;
mod staging;
mod take;

pub use element::{float_type, moved_type, reduced_type, saved_type};
pub use host::{is_host, is_host_backend, on_host};
pub use lend::{data_source, first_bytes, read, source};
pub use staging::{Staged, Staging, Transfers};
pub use take::{data, owned, owned_data, tensor};
