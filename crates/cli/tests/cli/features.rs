//! Flags that change the implementation of a step, but not the losses.

use crate::command::{Folder, losses};

fn losses_of(arguments: &str) -> Vec<f64> {
    let folder = Folder::new();
    losses(&folder.report(&format!("--synthetic --warmup 0 --steps 6 {arguments}")))
}

fn assert_close(got: &[f64], want: &[f64], tolerance: f64, arguments: &str) {
    assert_eq!(got.len(), want.len());
    for (step, (got, want)) in got.iter().zip(want).enumerate() {
        assert!(
            (got - want).abs() <= tolerance * want,
            "{arguments}, step {step}: {got} {want}"
        );
    }
}

#[test]
fn all_ways_to_compute_a_step_agree() {
    let want = losses_of("--ranks 1");
    for arguments in [
        "--ranks 2 --accumulate 3",
        "--ranks 2 --accumulate 3 --no-sync",
        "--ranks 4 --strategy hybrid-shard --replicate-size 2",
        "--ranks 4 --strategy hybrid-shard --replicate-size 2 --accumulate 3 --no-sync",
        "--ranks 2 --activation-checkpointing",
        "--ranks 2 --activation-checkpointing --accumulate 2 --no-sync",
        "--ranks 2 --unit-size 1000",
        "--ranks 2 --offload state",
        "--ranks 2 --clip-grad-norm 1000000",
    ] {
        assert_close(&losses_of(arguments), &want, 1e-5, arguments);
    }
    for (arguments, tolerance) in [
        ("--ranks 2 --precision bf16", 0.02),
        ("--ranks 2 --precision bf16 --reduce-dtype f32", 0.02),
        ("--ranks 2 --precision f16", 0.02),
        ("--ranks 2 --reduce-dtype bf16", 0.02),
        ("--ranks 2 --precision bf16 --compile", 0.02),
        (
            "--ranks 3 --precision bf16 --reduce-dtype f32 --compile",
            0.02,
        ),
        ("--ranks 2 --reduce-dtype bf16 --compile", 0.02),
        ("--ranks 2 --precision f16 --compile", 0.02),
        (
            "--ranks 3 --precision f16 --reduce-dtype f16 --compile --accumulate 2",
            0.02,
        ),
    ] {
        assert_close(&losses_of(arguments), &want, tolerance, arguments);
    }
    // A tight norm changes the losses, but equally for any number of ranks.
    let clipped = losses_of("--ranks 1 --clip-grad-norm 0.01");
    assert!(clipped != want);
    for arguments in [
        "--ranks 3 --clip-grad-norm 0.01",
        "--ranks 4 --clip-grad-norm 0.01 --strategy hybrid-shard --replicate-size 2",
        "--ranks 2 --clip-grad-norm 0.01 --strategy no-shard",
    ] {
        assert_close(&losses_of(arguments), &clipped, 1e-5, arguments);
    }
}
