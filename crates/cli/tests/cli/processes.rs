//! Ranks as processes under `mpirun`, compared with the same ranks as threads.

use std::path::Path;
use std::process::{Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::command::{Folder, Run, bounded, is_long, last_report, send};
use crate::launcher;

/// Returns `mpirun -n PROCESSES burn-fsdp train ..`, or `None` if there is no `mpirun`.
fn mpirun(folder: &Folder, processes: usize, arguments: &str) -> Option<Command> {
    let mut command = launcher::mpirun(processes)?;
    let train = folder.train_command(arguments);
    command.arg(train.get_program()).args(train.get_args());
    command
        .current_dir(folder.path(""))
        .env_remove("BURN_FSDP_FAULT");
    Some(command)
}

/// Checks the processes' exit code, which the launcher should pass on.
///
/// Open MPI's launcher does. MPICH's launcher sometimes returns its own code, or the code of a process that it killed.
fn check_code(run: &Run, code: i32) {
    let is_open_mpi = std::env::var_os("BURN_FSDP_MPIRUN").is_none();
    let is_right = run.code == code || (!is_open_mpi && run.code != 0);
    assert!(is_right, "{} and not {code}: {}", run.code, run.stderr);
}

/// Runs it until it ends.
fn run(folder: &Folder, processes: usize, arguments: &str) -> Option<Run> {
    let command = mpirun(folder, processes, arguments)?;
    Some(bounded(command).expect("it ends"))
}

/// Returns the files of a step, by name.
fn files(folder: &Folder, step: &str) -> Vec<(String, Vec<u8>)> {
    let names = folder.names_in(step).into_iter();
    let read = |name: String| {
        let bytes = std::fs::read(folder.path(&format!("{step}/{name}"))).expect("a file");
        (name, bytes)
    };
    names.map(read).collect()
}

/// Returns the parts of a report that are equal for threads and processes.
fn comparable(report: &Value) -> Value {
    let mut report = report.clone();
    let object = report.as_object_mut().expect("an object");
    let of_the_machine = ["engine", "tokens_per_s", "step_ms", "flops_per_s"];
    for key in of_the_machine
        .into_iter()
        .chain(["peak_rss_bytes", "start_rss_bytes"])
    {
        object.remove(key);
    }
    report
}

#[test]
fn losses_and_saved_files_match_threads() {
    let steps = if is_long() { 30 } else { 8 };
    for (ranks, flags) in [
        (2, ""),
        (4, ""),
        (2, "--strategy shard-grad-op --prefetch 2"),
        (4, "--strategy no-shard"),
        (4, "--strategy hybrid-shard"),
        (2, "--precision bf16"),
        (2, "--precision f16 --clip-grad-norm 0.5 --accumulate 2"),
        (2, "--compile"),
        (4, "--compile --prefetch 1"),
        (2, "--compile --accumulate 2 --clip-grad-norm 0.5"),
        (4, "--compile --strategy hybrid-shard"),
        (2, "--compile --precision bf16"),
        (2, "--compile --precision f16"),
    ] {
        let arguments = format!(
            "{flags} --synthetic --warmup 0 --steps {steps} --checkpoint-dir steps --save-every 3"
        );
        let threads = Folder::new();
        // The default of processes.
        let early = if flags.contains("--prefetch") {
            ""
        } else {
            "--prefetch 1"
        };
        let expected = threads.report(&format!("--ranks {ranks} {early} {arguments}"));
        let processes = Folder::new();
        let Some(run) = run(&processes, ranks, &format!("{arguments} --json")) else {
            return;
        };
        assert_eq!(run.code, 0, "{flags}: {}", run.stderr);
        assert_eq!(
            run.stdout.lines().count(),
            1,
            "one rank prints: {}",
            run.stdout
        );
        let report = last_report(&run);
        assert_eq!(report["engine"], "mpi");
        assert_eq!(
            report["peak_rss_bytes"].as_array().map(Vec::len),
            Some(ranks)
        );
        assert_eq!(
            comparable(&report),
            comparable(&expected),
            "{ranks} {flags}"
        );
        let last = format!("steps/step-{steps:06}");
        assert_eq!(processes.names_in("steps"), threads.names_in("steps"));
        for (own, expected) in files(&processes, &last).iter().zip(files(&threads, &last)) {
            assert!(*own == expected, "{ranks} {flags}: {}", own.0);
        }
    }
}

#[test]
fn text_is_evaluated_sampled_and_resumed_with_other_ranks() {
    let folder = Folder::new();
    let text = "to be or not to be, that is the question. ".repeat(100);
    folder.write("text", text.as_bytes());
    let arguments = "--data text --eval-every 2 --warmup 0 --sample 20 --checkpoint-dir steps --resume --metrics lines \
                     --trace step.json";
    let Some(first) = run(&folder, 3, &format!("{arguments} --steps 4 --json")) else {
        return;
    };
    assert_eq!(first.code, 0, "{}", first.stderr);
    let second =
        run(&folder, 2, &format!("{arguments} --steps 6 --json")).expect("mpirun is there");
    assert_eq!(second.code, 0, "{}", second.stderr);
    let report = last_report(&second);
    assert_eq!(report["first_step"], 4);
    let alone = Folder::new();
    alone.write("text", text.as_bytes());
    alone.report(&format!("{arguments} --steps 4 --ranks 3"));
    let expected = alone.report(&format!("{arguments} --steps 6 --ranks 2 --prefetch 1"));
    assert_eq!(comparable(&report), comparable(&expected));
    assert_eq!(folder.read("lines").lines().count(), 6);
    let trace: Value = serde_json::from_str(&folder.read("step.json")).expect("JSON");
    let events = trace["traceEvents"]
        .as_array()
        .or(trace.as_array())
        .expect("events");
    let mut ranks: Vec<_> = events
        .iter()
        .map(|event| event["pid"].to_string())
        .collect();
    ranks.sort();
    ranks.dedup();
    assert!(ranks.len() >= 2, "{ranks:?}");
}

#[test]
fn differences_between_processes_are_named() {
    let folder = Folder::new();
    let Some(run) = run(&folder, 2, "--synthetic --steps 2 --ranks 3") else {
        return;
    };
    check_code(&run, 2);
    assert!(
        run.stderr.contains("3 ranks were requested"),
        "{}",
        run.stderr
    );
    // Two programs in one job. The second has another learning rate.
    let mut command = mpirun(&folder, 1, "--synthetic --steps 2").expect("mpirun is there");
    let other = folder.train_command("--synthetic --steps 2 --lr 0.5");
    command
        .args([":", "-n", "1"])
        .arg(other.get_program())
        .args(other.get_args());
    let run = bounded(command).expect("it ends");
    check_code(&run, 2);
    assert!(
        run.stderr.contains("--lr differs: 0.5 on rank 1"),
        "{}",
        run.stderr
    );
    // Different data under one name, and a folder that differs between processes.
    for (arguments, expected) in [
        ("--data text --steps 2", "the data differs"),
        (
            "--synthetic --steps 2 --checkpoint-dir steps",
            "rank 1 on machine",
        ),
    ] {
        let own = Folder::new();
        let elsewhere = Folder::new();
        own.write(
            "text",
            "to be or not to be, that is the question. ".repeat(100),
        );
        elsewhere.write(
            "text",
            "to be or not to be, this is the question. ".repeat(100),
        );
        let mut command = mpirun(&own, 1, arguments).expect("mpirun is there");
        let other = own.train_command(arguments);
        // Launchers use different options for the folder.
        command
            .args([":", "-n", "1", "env", "-C"])
            .arg(elsewhere.path(""));
        command.arg(other.get_program()).args(other.get_args());
        let run = bounded(command).expect("it ends");
        check_code(&run, 2);
        assert!(run.stderr.contains(expected), "{}", run.stderr);
    }
}

/// Returns the process ids of the ranks of a run in this folder.
fn processes_in(folder: &Path) -> Vec<u32> {
    let is_command = |id: &u32| {
        let program = std::fs::read_link(format!("/proc/{id}/exe")).ok();
        program.is_some_and(|program| program.ends_with("burn-fsdp"))
    };
    let mut ids = all_processes_in(folder);
    ids.retain(is_command);
    ids.sort_unstable();
    ids
}

/// Processes of any program that run in that folder.
fn all_processes_in(folder: &Path) -> Vec<u32> {
    let entries = std::fs::read_dir("/proc").expect("processes");
    let ids = entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse::<u32>().ok());
    let is_there = |id: &u32| {
        let of = std::fs::read_link(format!("/proc/{id}/cwd")).ok();
        of.as_deref() == Some(folder)
    };
    ids.filter(is_there).collect()
}

/// Starts an endless run, and waits until it trains.
fn endless(folder: &Folder, processes: usize, flags: &str) -> Option<std::process::Child> {
    let arguments =
        format!("--synthetic --warmup 0 --steps 1000000 --metrics lines --json {flags}");
    let mut command = mpirun(folder, processes, &arguments)?;
    command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let child = command.spawn().expect("mpirun starts");
    let lines = || std::fs::read_to_string(folder.path("lines")).unwrap_or_default();
    let until = Instant::now() + Duration::from_secs(60);
    while lines().lines().count() < 3 {
        assert!(Instant::now() < until, "no steps");
        sleep(Duration::from_millis(20));
    }
    Some(child)
}

#[test]
fn a_signal_to_mpirun_saves_and_ends_all() {
    let folder = Folder::new();
    let Some(child) = endless(&folder, 3, "--checkpoint-dir steps") else {
        return;
    };
    // A launcher that is told to end exits with a code other than 0, whatever its processes do. It passes this signal
    // on.
    send("-USR1", child.id());
    let run = Run::of(child.wait_with_output().expect("an end"));
    assert_eq!(run.code, 0, "{}", run.stderr);
    let report = last_report(&run);
    assert_eq!(report["interrupted"], true, "{}", run.stderr);
    let saved = report["saved_step"].as_u64().expect("a saved step");
    let step = format!("inspect steps/step-{saved:06}");
    assert_eq!(folder.run(&step).code, 0);
}

/// Starts `launch -- mpirun -n 3 burn-fsdp train ..`, or the same in a script, and waits until it trains.
fn endless_below_launch(folder: &Folder, is_script: bool) -> Option<std::process::Child> {
    let arguments = "--synthetic --warmup 0 --steps 1000000 --metrics lines --json --checkpoint-dir steps --resume";
    let mpirun = mpirun(folder, 3, arguments)?;
    let words = std::iter::once(mpirun.get_program()).chain(mpirun.get_args());
    let words: Vec<_> = words
        .map(|word| word.to_string_lossy().into_owned())
        .collect();
    let mut launch = folder.command("launch --max-restarts 1 --");
    if is_script {
        launch.args(["sh", "-c", &format!("{}; exit $?", words.join(" "))]);
    } else {
        launch.args(&words);
    }
    launch
        .stdin(Stdio::null())
        .stdout(std::fs::File::create(folder.path("out")).expect("a writable folder"))
        .stderr(std::fs::File::create(folder.path("err")).expect("a writable folder"));
    let child = launch.spawn().expect("it starts");
    let lines = || std::fs::read_to_string(folder.path("lines")).unwrap_or_default();
    let until = Instant::now() + Duration::from_secs(60);
    while lines().lines().count() < 3 {
        assert!(Instant::now() < until, "no steps: {}", folder.read("err"));
        sleep(Duration::from_millis(20));
    }
    Some(child)
}

/// Checks that a run was told to end once, and saved one complete step, before its last.
fn saved_once(folder: &Folder) {
    let out = folder.read("out");
    let reports: Vec<Value> = out
        .lines()
        .filter_map(|line| serde_json::from_str(line).ok())
        .collect();
    assert_eq!(reports.len(), 1, "{out}{}", folder.read("err"));
    assert_eq!(reports[0]["interrupted"], true);
    let step = reports[0]["saved_step"].as_u64().expect("a saved step");
    assert_eq!(folder.names_in("steps"), [format!("step-{step:06}")]);
    assert_eq!(folder.run("inspect steps").code, 0);
}

#[test]
fn a_signal_to_launch_saves_once_and_mpirun_ends_well() {
    for (is_script, signal) in [(false, "-TERM"), (true, "-INT"), (true, "-USR1")] {
        let folder = Folder::new();
        let Some(mut child) = endless_below_launch(&folder, is_script) else {
            return;
        };
        send(signal, child.id());
        let status = child.wait().expect("an end");
        assert_eq!(status.code(), Some(0), "{signal}: {}", folder.read("err"));
        saved_once(&folder);
    }
}

#[test]
fn a_rank_takes_signals_of_a_scheduler_and_of_launch_as_one() {
    let folder = Folder::new();
    let Some(mut child) = endless_below_launch(&folder, false) else {
        return;
    };
    let ids = processes_in(&std::fs::canonicalize(folder.path("")).expect("a folder"));
    // Launch and three ranks, each of which is told twice.
    assert_eq!(ids.len(), 4);
    for id in &ids {
        let _ = Command::new("kill")
            .args(["-TERM", &id.to_string()])
            .status();
    }
    let status = child.wait().expect("an end");
    assert_eq!(status.code(), Some(0), "{}", folder.read("err"));
    saved_once(&folder);
}

#[test]
fn ranks_save_and_end_when_launch_is_killed() {
    let folder = Folder::new();
    let Some(mut child) = endless_below_launch(&folder, true) else {
        return;
    };
    send("-KILL", child.id());
    child.wait().expect("an end");
    let home = std::fs::canonicalize(folder.path("")).expect("a folder");
    let until = Instant::now() + Duration::from_secs(60);
    // `mpirun` forwards what the ranks have printed after they have ended.
    while !all_processes_in(&home).is_empty() {
        assert!(
            Instant::now() < until,
            "ranks go on: {}",
            folder.read("err")
        );
        sleep(Duration::from_millis(20));
    }
    let said = folder.read("err");
    assert_eq!(
        said.matches("`burn-fsdp launch` has ended").count(),
        1,
        "{said}"
    );
    saved_once(&folder);
}

#[test]
fn a_rank_that_stops_is_named_and_all_others_end() {
    let folder = Folder::new();
    let Some(child) = endless(&folder, 3, "--deadline 2") else {
        return;
    };
    let ids = processes_in(&std::fs::canonicalize(folder.path("")).expect("a folder"));
    assert_eq!(ids.len(), 3);
    send("-STOP", ids[1]);
    let began = Instant::now();
    // The launcher kills the stopped process when the others have failed.
    let run = Run::of(child.wait_with_output().expect("an end"));
    assert!(began.elapsed() < Duration::from_secs(60));
    check_code(&run, 3);
    assert!(run.stderr.contains("for ranks [1]"), "{}", run.stderr);
}

#[test]
fn a_run_that_is_killed_is_started_again() {
    let kills = if is_long() { 10 } else { 2 };
    let folder = Folder::new();
    let arguments = "--layers 2 --dim 64 --heads 2 --seq 64 --synthetic --warmup 0 --steps 300 --checkpoint-dir steps \
                     --save-every 5 --keep-last 3 --resume=newest-good --metrics lines --json";
    let Some(mpirun) = mpirun(&folder, 3, arguments) else {
        return;
    };
    let mut launch = folder.command(&format!("launch --max-restarts {} --", 2 * kills));
    launch.arg(mpirun.get_program()).args(mpirun.get_args());
    launch
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let mut child = launch.spawn().expect("it starts");
    let home = std::fs::canonicalize(folder.path("")).expect("a folder");
    let mut killed = 0;
    let mut seen = 0;
    while killed < kills && child.try_wait().expect("asks").is_none() {
        let lines = std::fs::read_to_string(folder.path("lines")).unwrap_or_default();
        let count = lines.lines().count();
        let ranks: Vec<_> = processes_in(&home);
        // A few steps after the last time.
        if count >= seen + 8 && ranks.len() > 3 {
            send("-KILL", ranks[1 + killed % 3]);
            killed += 1;
            seen = count.saturating_sub(8);
            sleep(Duration::from_millis(300));
        }
        sleep(Duration::from_millis(10));
    }
    let run = Run::of(child.wait_with_output().expect("an end"));
    assert_eq!(run.code, 0, "{}", run.stderr);
    assert_eq!(killed, kills, "{}", run.stderr);
    let whole = Folder::new();
    whole.report(&format!("--ranks 3 {}", arguments.replace("--json", "")));
    assert_eq!(
        files(&folder, "steps/step-000300"),
        files(&whole, "steps/step-000300")
    );
}

/// Warnings about tokens belong to the run, so only one process prints them.
#[test]
fn a_generation_warns_once() {
    let folder = crate::foreign::folders();
    let Some(mut command) = launcher::mpirun(2) else {
        return;
    };
    command.arg(env!("CARGO_BIN_EXE_burn-fsdp"));
    command.args("generate --init gpt2 --prompt a --tokens 2".split(' '));
    command.current_dir(folder.path(""));
    let run = bounded(command).expect("it ends");
    assert_eq!(run.code, 0, "{}", run.stderr);
    let warnings = run.stderr.matches("has 300 tokens and no tokenizer");
    assert_eq!(warnings.count(), 1, "{}", run.stderr);
}

/// Each process continues a part of the prompts, and the first prints all texts.
#[test]
fn prompts_are_divided_among_processes() {
    let folder = crate::foreign::folders();
    folder.write("prompts.txt", "a\nto be or\nnot\nthat is the\nq\n");
    let arguments =
        "generate --init gpt2 --tokenizer bytes --prompts prompts.txt --tokens 7 --batch 3";
    for weights in ["whole", "sharded", "placed"] {
        let Some(mut command) = launcher::mpirun(2) else {
            return;
        };
        command.arg(env!("CARGO_BIN_EXE_burn-fsdp"));
        command
            .args(arguments.split(' '))
            .args(["--weights", weights]);
        command.current_dir(folder.path(""));
        let run = bounded(command).expect("it ends");
        assert_eq!(run.code, 0, "{}", run.stderr);
        assert_eq!(run.stdout, folder.run(arguments).stdout);
        assert_eq!(run.stderr.matches("tokens/s").count(), 1, "{}", run.stderr);
    }
}

/// The launcher writes the ranks' output to files, which are not text for any rank.
#[test]
fn output_of_other_ranks_in_the_text_folder_is_skipped() {
    let folder = Folder::new();
    let text = "to be or not to be, that is the question. ".repeat(100);
    std::fs::create_dir(folder.path("text")).expect("a writable folder");
    folder.write("text/a", &text);
    if std::env::var_os("BURN_FSDP_MPIRUN").is_some() {
        // Only Open MPI has this option.
        return;
    }
    let Some(mut command) = launcher::mpirun(2) else {
        return;
    };
    let train =
        folder.train_command("--data text --steps 2 --warmup 0 --sample 0 --eval-batches 0 --json");
    command.args(["--output-filename", "text/out"]);
    let script = "head -c 3000 text/a; echo; sleep 1; exec \"$@\"";
    command.args(["bash", "-c", script, "bash"]);
    command.arg(train.get_program()).args(train.get_args());
    command.current_dir(folder.path(""));
    let run = bounded(command).expect("it ends");
    assert_eq!(run.code, 0, "{}", run.stderr);
    let report = last_report(&run);
    let data = report["data"].as_str().unwrap_or_default();
    assert!(
        data.contains(&format!("{} bytes of text in 1 files", text.len())),
        "{data}"
    );
}
