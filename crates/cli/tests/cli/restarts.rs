//! `launch`: restarts a failed command.

use crate::command::{Folder, last_report, losses, send};

#[test]
fn a_failed_run_is_restarted_and_resumes() {
    let whole = Folder::new();
    let arguments =
        "--synthetic --ranks 2 --warmup 0 --steps 8 --checkpoint-dir steps --save-every 2 --resume";
    let expected = whole.report(arguments);
    let folder = Folder::new();
    // The first start fails in step 5. Later starts do not have the fault.
    let train = folder.train_command(&format!("{arguments} --json"));
    let program = train.get_program().to_string_lossy().into_owned();
    let words: Vec<_> = train
        .get_args()
        .map(|word| word.to_string_lossy().into_owned())
        .collect();
    let script = format!(
        "if [ $BURN_FSDP_RESTART = 0 ]; then export BURN_FSDP_FAULT=rank:1,step:5,at:forward,how:error; fi; \
         exec {program} {}",
        words.join(" ")
    );
    let mut launch = folder.command("launch --max-restarts 2 -- sh -c");
    let output = launch.arg(&script).output().expect("it starts");
    let run = crate::command::Run::of(output);
    assert_eq!(run.code, 0, "{}", run.stderr);
    assert!(run.stderr.contains("start 2 of 3"), "{}", run.stderr);
    let report = last_report(&run);
    let first = report["first_step"].as_u64().expect("a number") as usize;
    assert!(first >= 2, "{report}");
    assert_eq!(losses(&report), losses(&expected)[first..]);
}

#[test]
fn launch_gives_up_after_the_allowed_restarts() {
    let folder = Folder::new();
    let mut launch = folder.command("launch --max-restarts 1 -- sh -c");
    let output = launch.arg("echo run >> runs; exit 7").output();
    let run = crate::command::Run::of(output.expect("it starts"));
    assert_eq!(run.code, 7, "{}", run.stderr);
    assert_eq!(folder.read("runs"), "run\nrun\n");
    assert!(
        run.stderr.contains("--max-restarts allows no more"),
        "{}",
        run.stderr
    );
    // An error in the input would occur again.
    let mut launch = folder.command("launch --max-restarts 5 -- sh -c");
    let output = launch.arg("echo run >> once; exit 2").output();
    assert_eq!(output.expect("it starts").status.code(), Some(2));
    assert_eq!(folder.read("once"), "run\n");
}

#[test]
fn each_start_has_its_number_of_ranks() {
    let folder = Folder::new();
    let mut launch = folder.command("launch --max-restarts 2 --ranks 4,3 -- sh -c");
    let output = launch
        .arg("echo {ranks} $BURN_FSDP_RESTART >> runs; exit 1")
        .output();
    assert_eq!(output.expect("it starts").status.code(), Some(1));
    assert_eq!(folder.read("runs"), "4 0\n3 1\n3 2\n");
}

#[test]
fn commands_that_cannot_be_restarted_are_rejected() {
    let folder = Folder::new();
    for (arguments, expected) in [
        (
            "launch -- mpirun -n 2 burn-fsdp train --steps 3",
            "--resume=newest-good",
        ),
        ("launch --ranks 2 -- true", "does not contain {ranks}"),
        ("launch -- echo {ranks}", "pass --ranks"),
        (
            "launch -- no-such-command-anywhere",
            "cannot run no-such-command-anywhere",
        ),
    ] {
        let run = folder.run(arguments);
        assert_eq!(run.code, 2, "{arguments}: {}", run.stderr);
        assert!(run.stderr.contains(expected), "{arguments}: {}", run.stderr);
    }
}

#[cfg(unix)]
#[test]
fn signals_are_forwarded_and_prevent_restarts() {
    let folder = Folder::new();
    let mut launch = folder.command("launch --max-restarts 3 -- sh -c");
    let script =
        "echo run >> runs; trap 'echo told >> runs; exit 9' TERM; while :; do sleep 0.05; done";
    let mut child = launch.arg(script).spawn().expect("it starts");
    while !folder.path("runs").exists() {
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    std::thread::sleep(std::time::Duration::from_millis(200));
    send("-TERM", child.id());
    let status = child.wait().expect("an end");
    assert_eq!(status.code(), Some(9));
    assert_eq!(folder.read("runs"), "run\ntold\n");
}
