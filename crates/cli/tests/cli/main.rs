//! The command as a user runs it: a process with arguments, files, output and an exit code.

mod checkpoints;
mod command;
mod compiled;
mod faults;
mod features;
mod files;
mod input;
mod interchange;
mod plan;
mod report;
mod start;
mod trace;
