//! A training run, in the order in which it comes about:
//!
//! - `config`: what is to be done, complete and valid (`data`, `schedule`, `settings`, `fault`, `run_folder`,
//!   `resumed`).
//! - `run`: the whole run, from the initial weights to the report.
//! - `rank`: what one rank does in it, around its `trainer`: `eager` or `compiled`, of which neither knows
//!   the other (`model`, `optimizer`, `evaluation`, `sample`, `share`, `saving`, `meeting`, `progress`,
//!   `metrics`, `trace`).
//! - `outcome`: what the rank has to tell when it is done.
//! - `report`, `summary`, `curve`: what is left of all ranks afterwards.

mod compiled;
mod config;
mod curve;
mod data;
mod eager;
mod evaluation;
mod fault;
mod meeting;
mod metrics;
mod model;
mod optimizer;
mod outcome;
mod progress;
mod rank;
mod report;
mod resumed;
mod run;
mod run_folder;
mod sample;
mod saving;
mod schedule;
mod settings;
mod share;
mod summary;
mod trace;
mod trainer;

pub(crate) use config::TrainConfig;
pub(crate) use run::run;
