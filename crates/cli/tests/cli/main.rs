//! The command as a user runs it: a process with arguments, files, output and an exit code.

mod command;
mod faults;
mod files;
mod input;
mod plan;
mod report;
mod start;
