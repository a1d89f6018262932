//! What training a model takes, without training it.

mod preset;
mod published;
mod run;

pub(crate) use run::run;
