//! Compiled train steps against Burn's eager ones.

mod agreement;
mod clipping;
mod compiled;
mod custom;
mod documents;
mod dora;
mod dumps;
mod eager;
#[macro_use]
#[path = "../common/optimizers.rs"]
mod every;
mod evaluation;
mod frozen;
mod groups;
mod host_values;
mod hybrid;
mod initial;
mod iterations;
mod kernels;
#[path = "../../../collectives/tests/launcher/mod.rs"]
mod launcher;
mod limits;
mod loss_chunks;
mod models;
mod modules;
mod optimizers;
mod outputs;
mod overrides;
mod parallel;
mod passes;
mod placed_halves;
mod placement;
mod pointwise;
mod precision;
mod recompute_units;
mod redistribution;
mod refusals;
mod scale;
mod scaled;
mod seed;
mod selected;
mod sequence_parallel;
#[path = "../../../collectives/tests/skipped/mod.rs"]
mod skipped;
mod uneven;
mod units;
