//! Runs that are killed without warning during saves, and then resumed.

use std::path::Path;
use std::process::Stdio;
use std::thread::sleep;
use std::time::Duration;

use crate::checkpoints::{DIR, metrics};
use crate::command::{Folder, Random};
use crate::skipped::skipped;

/// Returns true if a save is in progress, or was when the process died.
fn is_saving(folder: &Path) -> bool {
    let Ok(entries) = std::fs::read_dir(folder) else {
        return false;
    };
    let names = entries.filter_map(|entry| Some(entry.ok()?.file_name()));
    let names = names.map(|name| name.to_string_lossy().into_owned());
    // At its start, a run tests the folder with step 0.
    let mut names = names.filter(|name| !name.contains("step-000000"));
    names.any(|name| name.contains(".partial-"))
}

/// Kills a run `kills` times, each time while it saves, and expects the final result to be as if nothing had happened.
/// Returns the number of kills that interrupted a save.
fn kill_in_saves(arguments: &str, last_step: usize, kills: usize, seed: u64) -> usize {
    let whole = Folder::new();
    whole.report(&format!("{DIR} {arguments} --resume"));
    let folder = Folder::new();
    let steps = folder.path("steps");
    let mut random = Random::new(seed);
    let mut struck = 0;
    let mut killed = 0;
    // A fast machine may finish before all kills have happened.
    while killed < kills && !folder.path(&format!("steps/step-{last_step:06}")).exists() {
        let mut child = folder
            .train_command(&format!("{DIR} {arguments} --resume --json"))
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("a process");
        // After the start, at a random moment of a save.
        sleep(Duration::from_millis(random.below(30)));
        while !is_saving(&steps) && child.try_wait().expect("asks").is_none() {
            sleep(Duration::from_micros(100));
        }
        sleep(Duration::from_micros(random.below(4000)));
        child.kill().expect("kill");
        child.wait().expect("an end");
        killed += 1;
        struck += usize::from(is_saving(&steps));
    }
    let report = folder.report(&format!("{DIR} {arguments} --resume"));
    println!(
        "{arguments}: killed {killed} times, {struck} of them in a save, resumed last from step {}",
        report["first_step"]
    );
    assert_eq!(metrics(&folder), metrics(&whole), "{arguments}");
    assert!(!is_saving(&steps), "the last run cleans up");
    let name = format!("steps/step-{last_step:06}");
    for file in whole.names_in(&name) {
        let read = |folder: &Folder| std::fs::read(folder.path(&format!("{name}/{file}"))).ok();
        assert!(read(&folder) == read(&whole), "{arguments}: {file}");
    }
    struck
}

#[test]
fn a_repeatedly_killed_run_matches_an_undisturbed_one() {
    let arguments = "--layers 2 --dim 64 --heads 2 --seq 64 --ranks 2 --warmup 0 --steps 40 \
                     --save-every 1 --keep-last 3";
    let struck = kill_in_saves(arguments, 40, 6, 1);
    assert!(struck >= 2, "only {struck} kills struck a save");
}

/// More kills, shards of more than 16 MiB, one rank with several threads, and every sharding strategy.
#[test]
fn kills_of_every_kind_of_run() {
    if !crate::command::is_long() {
        skipped("BURN_FSDP_LONG=1 runs it");
        return;
    }
    let sized = "--layers 2 --dim 64 --heads 2 --seq 64 --warmup 0 --steps 40 --save-every 1";
    let large = "--layers 1 --dim 256 --heads 2 --seq 16 --vocab 40000 --warmup 0 --steps 8 \
                 --save-every 1 --keep-last 2";
    let mut struck = 0;
    let mut num_kinds = 0;
    for (arguments, last_step, kills) in [
        (format!("{sized} --ranks 2 --keep-last 3"), 40, 25),
        (format!("{sized} --ranks 1 --keep-last 1"), 40, 15),
        (format!("{sized} --ranks 3 --keep-last 2 --compile"), 40, 15),
        (format!("{sized} --ranks 4 --strategy hybrid-shard"), 40, 10),
        (
            format!("{sized} --ranks 2 --strategy no-shard --keep-last 1"),
            40,
            10,
        ),
        (
            format!("{sized} --ranks 2 --precision f16 --accumulate 3 --clip-grad-norm 1"),
            40,
            10,
        ),
        (format!("{large} --ranks 2"), 8, 10),
        (format!("{large} --ranks 1"), 8, 10),
    ] {
        let of_kind = kill_in_saves(&arguments, last_step, kills, kills as u64);
        assert!(of_kind > 0, "no kill struck a save of {arguments}");
        struck += of_kind;
        num_kinds += 1;
    }
    println!("{struck} kills struck saves of {num_kinds} kinds of runs");
}
