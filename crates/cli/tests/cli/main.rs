//! The command as users run it: a process with arguments, files, output and an exit code.

mod adapters;
mod arguments;
mod base_bits;
mod checkpoints;
mod choice;
mod command;
mod compiled;
mod config_file;
mod corruption;
mod data;
#[path = "../../../runs/tests/decoder/mod.rs"]
mod decoder;
mod devices;
mod documents;
mod dora;
mod dumps;
mod families;
mod faults;
mod features;
mod files;
mod folder;
mod foreign;
mod help;
mod hugging_face;
mod input;
mod interchange;
mod kill;
#[cfg(feature = "mpi")]
#[path = "../../../collectives/tests/launcher/mod.rs"]
mod launcher;
mod launchers;
mod learned;
mod leftovers;
mod links;
mod numbers;
mod old_steps;
mod operations;
mod optimizers;
mod outputs;
mod packing;
mod pages;
mod plan;
#[cfg(feature = "mpi")]
mod processes;
mod prompts;
mod report;
mod restarts;
#[path = "../../../shard/tests/extras/rounding.rs"]
mod rounding;
mod runs;
mod settings;
mod shell;
#[cfg(target_os = "linux")]
mod signals;
#[path = "../../../collectives/tests/skipped/mod.rs"]
mod skipped;
mod start;
mod threads;
mod tokenizers;
mod trace;
