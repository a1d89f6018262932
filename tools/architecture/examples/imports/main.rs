//! Draws the imports inside each crate: one SVG per crate, with files on floors.
//!
//! `cargo run --release --example imports` writes `target/imports/*.svg`. A folder and names of crates may follow.

mod floors;
mod plan;
mod svg;

use std::error::Error;
use std::path::Path;
use std::{env, fs};

use burn_fsdp_architecture::imports::Imports;

fn main() -> Result<(), Box<dyn Error>> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let mut args = env::args().skip(1);
    let into = args
        .next()
        .map_or_else(|| root.join("target/imports"), Into::into);
    let asked: Vec<String> = args.collect();
    fs::create_dir_all(&into)?;
    let mut crates: Vec<_> = fs::read_dir(root.join("crates"))?.collect::<Result<_, _>>()?;
    crates.sort_by_key(fs::DirEntry::file_name);
    for folder in crates {
        let name = folder.file_name().to_string_lossy().into_owned();
        if !asked.is_empty() && !asked.contains(&name) {
            continue;
        }
        let imports = Imports::read(&folder.path().join("src"), &name);
        let file = into.join(format!("{name}.svg"));
        fs::write(&file, svg::draw(&name, &imports))?;
        println!("{}", file.display());
    }
    Ok(())
}
