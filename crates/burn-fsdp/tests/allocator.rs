//! The memory that a process keeps. The setting is for the whole process, so this program has only one test.
#![cfg(all(target_os = "linux", target_env = "gnu"))]

#[path = "../../collectives/tests/skipped/mod.rs"]
mod skipped;

use std::hint::black_box;

use skipped::skipped;

const BYTES: usize = 48 << 20;
const PAGES: u64 = (BYTES / 4096) as u64;

/// Page faults of the process so far that needed no disk access.
fn faults() -> u64 {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap();
    // The fields follow the name, which is in parentheses and may contain spaces.
    let (_, fields) = stat.rsplit_once(')').unwrap();
    fields.split_whitespace().nth(7).unwrap().parse().unwrap()
}

/// Page faults during a tensor's lifetime.
fn of_a_tensor() -> u64 {
    let before = faults();
    let mut tensor = vec![1u8; BYTES];
    tensor[BYTES / 2] = 2;
    drop(black_box(tensor));
    faults() - before
}

#[test]
fn freed_memory_is_reused_without_page_faults() {
    // The largest tensor that glibc's own setting may keep is smaller.
    of_a_tensor();
    if of_a_tensor() < PAGES / 2 {
        skipped("the system's pages are so large that there is nothing to save");
        return;
    }
    assert!(burn_fsdp::allocator::keep_freed_memory());
    of_a_tensor();
    let again = of_a_tensor();
    assert!(again < PAGES / 100, "{again} faults of {PAGES} pages");
    let elsewhere = std::thread::spawn(|| {
        of_a_tensor();
        of_a_tensor()
    });
    let again = elsewhere.join().unwrap();
    assert!(
        again < PAGES / 100,
        "on another thread: {again} faults of {PAGES} pages"
    );
}
