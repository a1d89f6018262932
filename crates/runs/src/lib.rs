//! Metrics of training runs: the files that `burn-fsdp train` writes, and the page that `burn-fsdp report` draws.
//!
//! This crate knows neither Burn nor ranks. It has three parts:
//!
//! - the metrics file: [`StepLine`] is one line, and [`Run`] reads a file (`line`, `run`, `error`);
//! - the page: [`page`] draws runs as one HTML file (`page`, and below it `table`, `chart`, `series`, `scale`, `text`);
//! - TensorBoard: [`EventFile`] writes the same metrics as event files (`events`, and below it `record` and `proto`).

mod chart;
mod error;
mod events;
mod line;
mod page;
mod proto;
mod record;
mod run;
mod scale;
mod series;
mod table;
mod text;

pub use error::Error;
pub use events::{EVENT_FILE_PREFIX, EventFile};
pub use line::StepLine;
pub use page::page;
pub use run::Run;
