//! The backend's rules that a memory plan needs.

mod flex;
mod model;
mod strides;

pub(crate) use flex::Flex;
pub(crate) use model::{Allocation, Backend, Operand};
pub(crate) use strides::Strides;
