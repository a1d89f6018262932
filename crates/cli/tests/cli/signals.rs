//! Signals to `launch`, and its death, with different processes between it and a training run.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::command::{Folder, hears_hangups, send};

/// A time that nothing takes here. After it, a test has failed, and ends the processes that it started.
const FAR_TOO_LONG: Duration = Duration::from_secs(120);

/// A time after which a signal counts as a new request, and not as another copy of the same one.
const LATER: Duration = Duration::from_millis(1500);

/// A training run below `launch`, in a folder of its own.
struct Launched {
    folder: Folder,
    child: Child,
}

/// The result of the training.
struct Ended {
    code: Option<i32>,
    out: String,
    err: String,
}

impl Launched {
    /// Starts `launch` with a script around the training, which is `$TRAIN`, and waits until it trains.
    fn start(script: &str) -> Self {
        Self::start_with(script, |_| {})
    }

    fn start_with(script: &str, change: impl Fn(&mut Command)) -> Self {
        let folder = Folder::new();
        let train = folder.train_command(
            "--synthetic --warmup 0 --steps 100000000 --checkpoint-dir steps --resume --metrics lines --json",
        );
        let words = std::iter::once(train.get_program()).chain(train.get_args());
        let words: Vec<_> = words.map(|word| word.to_string_lossy()).collect();
        let mut launch = folder.command("launch --max-restarts 1 -- bash -c");
        let file = |name| File::create(folder.path(name)).expect("a writable folder");
        launch
            .arg(script)
            .env("TRAIN", words.join(" "))
            .env("PROGRAM", env!("CARGO_BIN_EXE_burn-fsdp"))
            .stdin(Stdio::null())
            .stdout(file("out"))
            .stderr(file("err"));
        change(&mut launch);
        let child = launch.spawn().expect("it starts");
        let launched = Self { folder, child };
        let lines = launched.folder.path("lines");
        let trains = || fs::read_to_string(&lines).is_ok_and(|lines| lines.lines().count() > 3);
        launched.wait_until("it trains", trains);
        launched
    }

    fn wait_until(&self, what: &str, is_so: impl Fn() -> bool) {
        let until = Instant::now() + FAR_TOO_LONG;
        while !is_so() {
            if Instant::now() > until {
                self.kill_all();
                panic!("not in time: {what}: {}", self.folder.read("err"));
            }
            sleep(Duration::from_millis(20));
        }
    }

    /// Returns the processes of this program in the folder that have a word in their command line.
    fn own(&self, word: &str) -> Vec<u32> {
        let home = fs::canonicalize(self.folder.path("")).expect("a folder");
        let entries = fs::read_dir("/proc").expect("processes").flatten();
        let ids = entries.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
        let link = |id: &u32, name: &str| fs::read_link(format!("/proc/{id}/{name}")).ok();
        let is_own = |id: &u32| {
            let is_program = link(id, "exe").is_some_and(|exe| exe.ends_with("burn-fsdp"));
            let is_here = link(id, "cwd").is_some_and(|folder: PathBuf| folder == home);
            let words = fs::read(format!("/proc/{id}/cmdline")).unwrap_or_default();
            let mut words = words.split(|byte| *byte == 0);
            is_program && is_here && words.nth(1) == Some(word.as_bytes())
        };
        ids.filter(is_own).collect()
    }

    fn trainer(&self) -> u32 {
        let all = self.own("train");
        assert_eq!(all.len(), 1, "{all:?}");
        all[0]
    }

    fn kill_all(&self) {
        for id in self.own("launch").into_iter().chain(self.own("train")) {
            let _ = Command::new("kill")
                .args(["-KILL", &id.to_string()])
                .status();
        }
    }

    /// Waits for the end of `launch`, after which no training is left.
    fn end(mut self) -> (Folder, Ended) {
        let until = Instant::now() + FAR_TOO_LONG;
        let status = loop {
            if let Some(status) = self.child.try_wait().expect("a child") {
                break status;
            }
            if Instant::now() > until {
                self.kill_all();
                panic!("launch does not end: {}", self.folder.read("err"));
            }
            sleep(Duration::from_millis(20));
        };
        let left = self.own("train");
        self.kill_all();
        let ended = Ended {
            code: status.code(),
            out: self.folder.read("out"),
            err: self.folder.read("err"),
        };
        assert!(left.is_empty(), "{left:?} are left behind: {}", ended.err);
        let folder = std::mem::replace(&mut self.folder, Folder::new());
        (folder, ended)
    }
}

/// A failed test leaves no process running.
impl Drop for Launched {
    fn drop(&mut self) {
        self.kill_all();
    }
}

/// Returns the only report in the text. Checks that one step is saved, and that it is complete.
fn saved_once(folder: &Folder, out: &str) -> Value {
    let reports: Vec<Value> = out
        .lines()
        .filter_map(|line| serde_json::from_str(line).ok())
        .filter(Value::is_object)
        .collect();
    assert_eq!(reports.len(), 1, "{out}");
    assert_eq!(reports[0]["interrupted"], true);
    let step = reports[0]["saved_step"].as_u64().expect("a saved step");
    assert_eq!(folder.names_in("steps"), [format!("step-{step:06}")]);
    let shown = folder.run("inspect steps");
    assert_eq!(shown.code, 0, "{}", shown.stderr);
    reports[0].clone()
}

/// Scripts that are not replaced by the training, and exit with its code.
const SCRIPTS: [(&str, &str); 13] = [
    ("script", "$TRAIN; exit $?"),
    // The training then ignores SIGINT.
    ("background", "$TRAIN & wait $!; exit $?"),
    ("pipeline", "set -o pipefail; $TRAIN | cat; exit $?"),
    (
        "nested shells",
        "bash -c 'bash -c \"$TRAIN; exit \\$?\"; exit $?'; exit $?",
    ),
    ("subshell", "(cd .; $TRAIN; exit $?); exit $?"),
    ("job control", "set -m; $TRAIN & wait $!; exit $?"),
    ("session", "setsid --wait $TRAIN; exit $?"),
    ("timeout", "timeout 1000 $TRAIN; exit $?"),
    ("nice and env", "nice env A=b $TRAIN; exit $?"),
    ("exec", "exec $TRAIN"),
    (
        "launch",
        "$PROGRAM launch --max-restarts 0 -- bash -c '$TRAIN; exit $?'; exit $?",
    ),
    // The script passes the signal on itself. If the training were told as well, it would get two signals.
    (
        "trap",
        "trap 'kill -TERM $pid; wait $pid; exit $?' TERM INT HUP; $TRAIN & pid=$!; wait $pid; exit $?",
    ),
    (
        "trap that waits",
        "trap 'echo told >told' TERM INT HUP; $TRAIN; exit $?",
    ),
];

#[test]
fn a_signal_to_launch_saves_once_through_any_script() {
    let hangup = if hears_hangups() { "-HUP" } else { "-TERM" };
    for (index, (name, script)) in SCRIPTS.into_iter().enumerate() {
        let signal = ["-TERM", "-INT", hangup, "-USR1"][index % 4];
        let launched = Launched::start(script);
        send(signal, launched.child.id());
        let (folder, ended) = launched.end();
        assert_eq!(ended.code, Some(0), "{name}, {signal}: {}", ended.err);
        saved_once(&folder, &ended.out);
    }
}

#[test]
fn a_script_continues_after_a_signaled_training() {
    let launched = Launched::start("$TRAIN; code=$?; sleep 1; echo code $code >after; exit 5");
    send("-TERM", launched.child.id());
    let (folder, ended) = launched.end();
    assert_eq!(ended.code, Some(5), "{}", ended.err);
    assert_eq!(folder.read("after"), "code 0\n");
    saved_once(&folder, &ended.out);
}

#[test]
fn a_script_that_outlives_the_training_is_ended() {
    let scripts = [
        "$TRAIN; sleep 1000; echo >after",
        // The shell is replaced by its last command.
        "$TRAIN; exec sleep 1000",
        "$TRAIN; while true; do sleep 0.1; done",
        "$TRAIN; setsid --wait sleep 1000; echo >after",
        "bash -c '$TRAIN; sleep 1000; echo >after'; echo >after",
    ];
    let all = scripts.map(|script| (script, Launched::start(script)));
    for (_, launched) in &all {
        send("-TERM", launched.child.id());
    }
    for (script, launched) in all {
        let (folder, ended) = launched.end();
        assert_eq!(ended.code, Some(143), "{script}: {}", ended.err);
        assert!(!folder.path("after").exists(), "{script}");
        saved_once(&folder, &ended.out);
    }
}

#[test]
fn commands_that_ignore_signals_are_killed_after_a_second_one() {
    let scripts = [
        "trap '' TERM; echo >ready; sleep 1000; echo >after",
        "trap 'echo told >>told' TERM; echo >ready; while :; do sleep 0.05; done",
        "trap '' TERM; echo >ready; setsid --wait sleep 1000; echo >after",
    ];
    for script in scripts {
        let folder = Folder::new();
        let mut launch = folder.command("launch --max-restarts 0 -- bash -c");
        let launch = launch.arg(script);
        launch.stdout(Stdio::null()).stderr(Stdio::null());
        let mut child = launch.spawn().expect("it starts");
        let until = Instant::now() + FAR_TOO_LONG;
        while !folder.path("ready").exists() && Instant::now() < until {
            sleep(Duration::from_millis(10));
        }
        send("-TERM", child.id());
        sleep(LATER);
        assert_eq!(child.try_wait().expect("a child"), None, "{script}");
        send("-TERM", child.id());
        let status = loop {
            if let Some(status) = child.try_wait().expect("a child") {
                break status;
            }
            if Instant::now() > until {
                child.kill().expect("a child");
                panic!("it waits for ever: {script}");
            }
            sleep(Duration::from_millis(20));
        };
        assert_eq!(status.code(), Some(137), "{script}");
        assert!(!folder.path("after").exists(), "{script}");
    }
}

#[test]
fn a_script_that_trains_again_and_again_is_ended_as_well() {
    let launched = Launched::start("while true; do $TRAIN; sleep 0.01; done");
    send("-TERM", launched.child.id());
    // Any exit code is fine.
    let (folder, ended) = launched.end();
    assert!(!ended.err.contains("start 2 of 2"), "{}", ended.err);
    let shown = folder.run("inspect steps");
    assert_eq!(shown.code, 0, "{}", shown.stderr);
}

#[test]
fn duplicate_signals_count_once() {
    // A scheduler signals each process of a job.
    let each = |launched: &Launched| {
        let trainer = launched.trainer();
        send("-TERM", trainer);
        send("-TERM", launched.child.id());
        sleep(Duration::from_millis(50));
        if Path::new(&format!("/proc/{trainer}")).exists() {
            let _ = Command::new("kill")
                .args(["-TERM", &trainer.to_string()])
                .status();
        }
    };
    // `timeout` signals its command, and then its whole group.
    let twice = |launched: &Launched| {
        send("-TERM", launched.child.id());
        send("-INT", launched.child.id());
    };
    // If a training run ends before `launch` gets the signal, only the script is left, which is then told.
    let tell: [&dyn Fn(&Launched); 2] = [&each, &twice];
    for (tell, codes) in tell.into_iter().zip([&[0, 143][..], &[0]]) {
        let launched = Launched::start("timeout 1000 nice $TRAIN; exit $?");
        tell(&launched);
        let (folder, ended) = launched.end();
        let code = ended.code.unwrap_or(-1);
        assert!(codes.contains(&code), "{code}: {}", ended.err);
        saved_once(&folder, &ended.out);
    }
}

#[test]
fn two_simultaneous_signals_to_a_training_count_once() {
    let folder = Folder::new();
    let train = folder.train_command(
        "--synthetic --warmup 0 --steps 100000000 --checkpoint-dir steps --json --metrics lines",
    );
    // `timeout` signals its command, and then its own group, which contains the command.
    let script = "\"$@\" & trainer=$!; until [ $(wc -l <lines) -gt 2 ]; do sleep 0.05; done; \
                  kill -TERM $trainer; kill -USR1 $trainer; wait $trainer";
    let mut command = Command::new("bash");
    command
        .args(["-c", script, "bash"])
        .arg(train.get_program());
    command.args(train.get_args()).current_dir(folder.path(""));
    let output = command.output().expect("bash runs");
    let err = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{err}");
    saved_once(&folder, &String::from_utf8_lossy(&output.stdout));
}

/// Makes a training run never end in good order, because one of its ranks waits forever.
fn stalled(launch: &mut Command) {
    launch.env("BURN_FSDP_FAULT", "rank:1,step:4,at:forward,how:stall");
}

/// Starts such a training run, and waits until it reaches the step with the fault. Before that, one signal would end
/// it.
fn start_stalled(script: &str) -> Launched {
    let launched = Launched::start_with(script, stalled);
    sleep(Duration::from_millis(500));
    launched
}

#[test]
fn a_later_signal_to_launch_ends_all_at_once() {
    // The script also receives the signal, possibly before it sees the end of the training.
    let cases: [(&str, &str, &[i32]); 3] = [
        ("exec $TRAIN", "-TERM", &[1]),
        ("setsid --wait $TRAIN; exit 7", "-INT", &[7, 130]),
        ("$PROGRAM launch --max-restarts 0 -- $TRAIN", "-TERM", &[1]),
    ];
    for (script, signal, codes) in cases {
        let launched = start_stalled(script);
        send(signal, launched.child.id());
        sleep(LATER);
        let is_there = || launched.own("train").len() == 1;
        assert!(
            is_there(),
            "{script}: one signal ends it in good order, which takes for ever"
        );
        send(signal, launched.child.id());
        let (folder, ended) = launched.end();
        assert!(
            codes.contains(&ended.code.expect("a code")),
            "{script}: {:?}",
            ended.code
        );
        assert!(!folder.path("steps/step-000004").exists());
    }
}

#[test]
fn sigquit_ends_a_training_at_once() {
    // Processes that a shell starts in the background ignore SIGQUIT, unless they have a handler for it.
    let launched = start_stalled("$TRAIN & wait $!; exit $?");
    send("-QUIT", launched.trainer());
    let says = |text: &str| launched.folder.read("err").contains(text);
    launched.wait_until("the next start", || says("start 2 of 2"));
    // It does not matter whether the shutdown has started.
    send("-QUIT", launched.child.id());
    let (folder, _) = launched.end();
    assert!(!folder.path("steps/step-000004").exists());
}

#[test]
fn a_training_saves_and_ends_when_launch_is_killed() {
    // This is what `mpirun` does.
    let closing = "for file in /proc/$$/fd/*; do file=${file##*/}; [ $file -gt 2 ] && eval \"exec $file<&-\"; done; $TRAIN";
    for script in [
        "$TRAIN; exit $?",
        "exec $TRAIN",
        "setsid $TRAIN",
        "timeout 1000 $TRAIN | cat",
        closing,
    ] {
        let mut launched = Launched::start(script);
        send("-KILL", launched.child.id());
        launched.child.wait().expect("an end");
        launched.wait_until("the training has ended", || {
            launched.own("train").is_empty()
        });
        // Another process may still have to write it.
        launched.wait_until("the report", || launched.folder.read("out").ends_with('\n'));
        let (out, err) = (launched.folder.read("out"), launched.folder.read("err"));
        assert!(
            err.contains("`burn-fsdp launch` has ended"),
            "{script}: {err}"
        );
        saved_once(&launched.folder, &out);
    }
}

/// `setsid` leaves a process behind that only later becomes the training.
#[test]
fn a_training_that_starts_after_the_command_ended_is_awaited() {
    let late = "(sleep 0.3; exec $TRAIN) & exit 0";
    let launched = Launched::start(late);
    send("-TERM", launched.child.id());
    let (folder, ended) = launched.end();
    assert_eq!(ended.code, Some(0), "{}", ended.err);
    assert_eq!(folder.names_in("steps").len(), 1);
}

#[test]
fn a_nested_launch_ends_its_training_if_the_outer_is_killed() {
    let mut launched =
        Launched::start("$PROGRAM launch --max-restarts 3 -- bash -c '$TRAIN; exit $?'; exit $?");
    send("-KILL", launched.child.id());
    launched.child.wait().expect("an end");
    let is_over = || launched.own("train").is_empty() && launched.own("launch").is_empty();
    launched.wait_until("all have ended", is_over);
    saved_once(&launched.folder, &launched.folder.read("out"));
}

#[test]
fn leftovers_of_a_failed_command_do_not_block_a_restart() {
    let script = "if [ $BURN_FSDP_RESTART = 0 ]; then $TRAIN & while [ ! -s lines ]; do sleep 0.05; done; exit 9; fi; \
                  $TRAIN";
    let launched = Launched::start(script);
    let says = |text: &str| launched.folder.read("err").contains(text);
    launched.wait_until("the next start", || says("start 2 of 2"));
    assert!(
        says("left 1 processes behind"),
        "{}",
        launched.folder.read("err")
    );
    launched.wait_until("the next training", || launched.own("train").len() == 1);
    let steps = || launched.folder.names_in("steps").len();
    assert_eq!(steps(), 1, "the first has saved");
    let lines = || launched.folder.read("lines").lines().count();
    let before = lines();
    launched.wait_until("it trains", || lines() > before);
    send("-TERM", launched.child.id());
    let (folder, ended) = launched.end();
    assert_eq!(ended.code, Some(0), "{}", ended.err);
    assert_eq!(folder.names_in("steps").len(), 2);
}

#[test]
fn foreign_groups_and_orphans_receive_the_signal() {
    let folder = Folder::new();
    let mut launch = folder.command("launch --max-restarts 0 -- bash -c");
    // Another session, whose parent is a shell that is killed by the signal.
    let script = "setsid --fork bash -c 'trap \"echo told >>told; exit\" TERM; echo $$ >ready; while :; do sleep 0.05; done'; \
                  sleep 1000; echo after >after";
    let mut child = launch.arg(script).spawn().expect("it starts");
    let until = Instant::now() + FAR_TOO_LONG;
    while !folder.path("ready").exists() && Instant::now() < until {
        sleep(Duration::from_millis(10));
    }
    sleep(Duration::from_millis(100));
    send("-TERM", child.id());
    let status = child.wait().expect("an end");
    assert_eq!(status.code(), Some(143));
    assert_eq!(folder.read("told"), "told\n");
    assert!(!folder.path("after").exists());
}
