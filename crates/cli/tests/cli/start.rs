//! The start of a training run, which does not depend on the number of ranks.

use serde_json::Value;

use crate::command::{Folder, losses, relative_difference};

const STEPS: &str = "--synthetic --warmup 2 --steps 8";
const TWENTY_STEPS: &str = "--synthetic --warmup 2 --steps 18";

#[test]
fn losses_do_not_depend_on_the_number_of_ranks() {
    let folder = Folder::new();
    let first = folder.report(&format!(
        "{TWENTY_STEPS} --ranks 1 --save-init init.safetensors"
    ));
    let want = losses(&first);
    assert_eq!(want.len(), 20);
    assert!(want[19] < want[0]);
    for ranks in 1..=4 {
        for strategy in ["full-shard", "shard-grad-op", "no-shard"] {
            let report = folder.report(&format!(
                "{TWENTY_STEPS} --init init.safetensors --ranks {ranks} --strategy {strategy}"
            ));
            let difference = relative_difference(&want, &losses(&report));
            assert!(
                difference < 1e-5,
                "{strategy} on {ranks} ranks: {difference:e}"
            );
        }
    }
}

#[test]
fn training_starts_from_the_weights_that_were_saved() {
    let folder = Folder::new();
    let saved = folder.report(&format!("{STEPS} --seed 7 --save-init init.safetensors"));
    let loaded = folder.report(&format!("{STEPS} --init init.safetensors"));
    assert_eq!(losses(&saved), losses(&loaded), "the same bits");
    let other = folder.report(&format!("{STEPS} --seed 8"));
    assert_ne!(losses(&saved), losses(&other));
}

#[test]
fn saving_loaded_weights_copies_them() {
    let folder = Folder::new();
    let none = "--synthetic --warmup 0 --steps 0";
    folder.report(&format!("{none} --save-init a.safetensors"));
    folder.report(&format!(
        "{none} --init a.safetensors --save-init b.safetensors"
    ));
    let (header, data) = folder.weights("a.safetensors");
    let (copied_header, copied_data) = folder.weights("b.safetensors");
    // Parsed, because the order of entries in the metadata is random.
    let parse = |header: &str| serde_json::from_str::<Value>(header).expect("a JSON header");
    assert_eq!(parse(&header), parse(&copied_header));
    assert!(data == copied_data, "the same bits");
    assert_eq!(
        folder.names(),
        ["a.safetensors", "b.safetensors"],
        "no curve without a step"
    );
}

#[test]
fn prefetching_does_not_change_results() {
    let folder = Folder::new();
    let with = |flags: &str| folder.report(&format!("{STEPS} {flags}"));
    let one = with("--prefetch 1");
    let want = losses(&one);
    let none = with("--prefetch 0");
    assert_eq!(losses(&none), want);
    assert_eq!(losses(&with("--prefetch 3")), want);
    // Threads gain nothing from prefetching, so by default they prefetch nothing.
    let peak = "unsharded_peak_bytes";
    assert_eq!(with("")[peak], none[peak]);
    assert_ne!(one[peak], none[peak]);
}
