//! The `burn-fsdp train` command, in the order of a run:
//!
//! - `config`: the configuration, complete and valid (`sizes`, `recipe`, `checks`, `ranks`, `data`, `documents`, `feed`,
//!   `own_files`, `schedule`, `settings`, `fault`, `run_folder`, `resumed`).
//! - `run`: the whole run, from the initial weights to the report.
//! - `rank`: the loop of one rank around its `trainer`, which is `eager` or `compiled`; these two are independent
//!   (`model`, `optimizer`, `evaluation`, `sample`, `share`, `saving`, `meeting`, `progress`, `metrics`, `trace`).
//! - `outcome`: the result of one rank. `collector`: passes all results to the process that reports.
//! - `report` (`utilization`), `summary`, `curve`: the results of all ranks, as JSON, text and a drawing.

mod chat_files;
mod checks;
mod codec_tokenizer;
mod collector;
mod compiled;
mod config;
mod curve;
mod data;
mod documents;
mod eager;
mod evaluation;
mod fault;
mod feed;
mod meeting;
mod metrics;
mod model;
mod optimizer;
mod outcome;
mod own_files;
mod progress;
mod rank;
mod ranks;
mod recipe;
mod report;
mod resumed;
mod run;
mod run_folder;
mod sample;
mod saved;
mod saving;
mod schedule;
mod settings;
mod share;
mod sizes;
#[cfg(test)]
pub(crate) mod start_memory;
mod summary;
mod trace;
mod trainer;
mod utilization;

pub(crate) use chat_files::ChatFiles;
pub(crate) use config::TrainConfig;
pub(crate) use ranks::{Ranks, agree, device_of, let_launcher_hear, machines};
pub(crate) use run::run;
pub(crate) use settings::tokenizer_of;
