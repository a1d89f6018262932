//! Prints how often the prose of a folder uses constructions that are not idiomatic English:
//! `cargo run -p burn-fsdp-architecture --example prose [FOLDER]`.

use std::path::PathBuf;

use burn_fsdp_architecture::prose::Prose;

fn main() {
    let folder = std::env::args_os().nth(1);
    let folder = folder.map_or_else(|| PathBuf::from("."), PathBuf::from);
    println!("{}", Prose::read(&folder));
}
