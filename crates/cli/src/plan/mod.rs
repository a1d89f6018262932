//! The `burn-fsdp plan` command: the cost of a training run, without running it.

pub(crate) mod preset;
mod proof;
mod run;

pub(crate) use run::run;
