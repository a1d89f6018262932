//! Numbers that are not finite: the run stops, and no good step is lost.

use crate::command::{Folder, last_report};

const RUN: &str = "--synthetic --warmup 0 --checkpoint-dir steps --save-every 5 --keep-last 3";

/// Creates a folder with steps 10, 15 and 20.
fn saved() -> Folder {
    let folder = Folder::new();
    folder.report(&format!("{RUN} --steps 20"));
    assert_eq!(
        folder.names_in("steps"),
        ["step-000010", "step-000015", "step-000020"]
    );
    folder
}

#[test]
fn a_loss_that_is_not_finite_stops_the_run_and_removes_nothing() {
    for engine in ["", "--compile"] {
        let folder = saved();
        let before = folder.names_in("steps");
        let arguments = format!("{RUN} --steps 80 --lr 1e30 --resume --json {engine}");
        let run = folder.train(&arguments);
        assert_eq!(run.code, 3, "{}", run.stderr);
        assert!(
            run.stderr.contains("is NaN")
                || run.stderr.contains("is inf")
                || run.stderr.contains("not finite"),
            "{}",
            run.stderr
        );
        assert!(run.stderr.contains("--nan continue"), "{}", run.stderr);
        assert_eq!(folder.names_in("steps"), before, "{engine}");
        // The report still covers the trained steps.
        let report = last_report(&run);
        assert_eq!(report["first_step"], 20);
        assert!(!report["failures"].as_array().expect("a list").is_empty());
        assert!(report["losses"].as_array().expect("a list").len() < 10);
    }
}

#[test]
fn non_finite_steps_are_not_saved_before_the_loss_shows_it() {
    // Each step is saved as soon as it is complete, and only the newest is kept.
    let folder = saved();
    let each = "--synthetic --warmup 0 --checkpoint-dir steps --save-every 1 --keep-last 1";
    let run = folder.train(&format!("{each} --steps 80 --lr 1e38 --resume"));
    assert_eq!(run.code, 3, "{}", run.stderr);
    let left = folder.names_in("steps");
    // The newest step may have finite numbers but give a loss that is not finite. It was then saved.
    assert!(left.contains(&"step-000020".to_owned()), "{left:?}");
    let said = folder.run("generate steps/step-000020 --prompt a --bytes 2");
    assert_eq!(said.code, 0, "{}", said.stderr);
    let report = folder.report(&format!(
        "{each} --steps 22 --resume=newest-good --nan continue"
    ));
    assert!(report["first_step"].as_u64().is_some_and(|step| step >= 20));
}

#[test]
fn a_norm_that_is_not_finite_stops_before_the_step_is_taken() {
    for flags in ["", "--compile"] {
        let folder = saved();
        let run = folder.train(&format!(
            "{RUN} --steps 80 --lr 1e30 --resume --clip-grad-norm 1 {flags}"
        ));
        assert_eq!(run.code, 3, "{}", run.stderr);
        assert_eq!(
            folder.names_in("steps"),
            ["step-000010", "step-000015", "step-000020"]
        );
    }
}

#[test]
fn nan_continue_keeps_the_valid_steps() {
    let folder = saved();
    let report = folder.report(&format!(
        "{RUN} --steps 40 --lr 1e30 --resume --nan continue"
    ));
    assert_eq!(report["saved_step"], 40);
    let steps = folder.names_in("steps");
    for step in ["step-000010", "step-000015", "step-000020", "step-000040"] {
        assert!(steps.contains(&step.to_owned()), "{steps:?}");
    }
    let warnings = report["warnings"].to_string();
    for told in ["the loss of step", "is saved although"] {
        assert!(warnings.contains(told), "{told}: {report}");
    }
    let said = folder.run("generate steps --prompt a --bytes 2");
    assert_eq!(said.code, 3, "{}", said.stdout);
    assert!(
        said.stderr.contains("outputs are not finite"),
        "{}",
        said.stderr
    );
}
