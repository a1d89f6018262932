//! What a plan of memory asks of the backend that runs a step.

mod flex;
mod model;
mod strides;

pub(crate) use flex::Flex;
pub(crate) use model::{Backend, Operand, Place};
pub(crate) use strides::Strides;
