//! Rules for when an operation's result shares memory, overwrites an operand or allocates on Burn's CPU backend.

mod allocation;
mod flex;
mod strides;

pub(crate) use allocation::{Allocation, Operand};
pub(crate) use flex::{over_whole, place};
pub(crate) use strides::Strides;
