//! The commands for a saved step: `inspect`, `consolidate` and `generate`.

mod beside;
pub(crate) mod consolidate;
pub(crate) mod generate;
pub(crate) mod inspect;
mod merge;
mod open;
mod peft;
