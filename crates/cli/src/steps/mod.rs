//! What can be done with a saved step: look at it, write it as plain files, let its model go on from a text.

pub(crate) mod consolidate;
pub(crate) mod generate;
pub(crate) mod inspect;
mod open;
