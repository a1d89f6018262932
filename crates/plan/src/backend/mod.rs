//! The rules of the backend that runs a step, as far as a plan of memory needs them.

mod flex;
mod model;
mod strides;

pub(crate) use flex::Flex;
pub(crate) use model::{Allocation, Backend, Operand};
pub(crate) use strides::Strides;
