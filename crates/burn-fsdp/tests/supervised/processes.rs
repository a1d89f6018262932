//! Burn's loop with ranks that are processes: each process runs this test again.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::time::Duration;

use burn::data::dataloader::DataLoaderBuilder;
use burn::module::RunningState;
use burn::optim::SgdConfig;
use burn::optim::momentum::MomentumConfig;
use burn::tensor::Tensor;
use burn::train::metric::LossMetric;
use burn::train::{Interrupter, LearningResult, SupervisedTraining};
use burn_fsdp::internals::collectives::processes;
use burn_fsdp::train::{FullySharded, Lent};
use burn_fsdp::{Error, LaunchConfig, ShardPolicy, launcher_ranks};

use crate::launcher::{played, scene};
use crate::network::{BATCH, Digitizer, Item, Net, Normalised, items, loader};
use crate::{
    AfterTwo, Watched, assert_close, device, folder, logged, optimizer, plain, rates, sharded,
    training, values,
};

/// The folder that all processes of a test see.
const FOLDER: &str = "BURN_FSDP_TEST_FOLDER";
/// The name by which Burn's renderer calls the training of all processes.
pub(crate) const LABEL: &str = "training of processes";

/// The way in which processes end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum End {
    Well,
    /// Their launch fails, as the test expects.
    Refused,
}

/// Runs the test of this name in this module, as [`played_in`] does.
fn play(processes: usize, test: &str, at: &Path, end: End) -> bool {
    played_in(processes, &format!("processes::{test}"), at, end)
}

/// Runs the test of this name in processes with the folder `at`. Returns false if processes are not
/// available.
pub(crate) fn played_in(processes: usize, test: &str, at: &Path, end: End) -> bool {
    let played = played(processes, test, |command| {
        command.env(FOLDER, at);
    });
    let Some(played) = played else {
        return false;
    };
    assert_eq!(played.succeeded, end == End::Well, "{}", played.said);
    match end {
        End::Well => played.assert_passed(processes),
        // The launcher ends the others when the first one has finished.
        End::Refused => assert!(
            (0..processes).all(|rank| passed(at, rank).exists()),
            "{}",
            played.said
        ),
    }
    // One of them reports the events, as Burn's renderer does.
    let told = played
        .said
        .matches("Starting training of processes")
        .count();
    assert_eq!(told, 1, "{}", played.said);
    true
}

/// The file by which a process reports that it has passed.
fn passed(at: &Path, rank: usize) -> PathBuf {
    at.join(format!("passed-{rank}"))
}

/// Waits until all processes have passed.
pub(crate) fn pass(at: &Path, rank: usize, ranks: usize) {
    std::fs::write(passed(at, rank), "").expect("the folder is there");
    for _ in 0..1_000 {
        if (0..ranks).all(|rank| passed(at, rank).exists()) {
            return;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Returns the number of processes, this process' number, and their folder, if the test has started this
/// process.
pub(crate) fn part() -> Option<(usize, usize, PathBuf)> {
    scene()?;
    let found = processes().unwrap_or_else(|error| panic!("{error}"))?;
    let at = std::env::var_os(FOLDER).expect("the test has set it");
    Some((found.size, found.rank, at.into()))
}

fn among(ranks: usize) -> FullySharded {
    FullySharded::new(LaunchConfig::new(ranks)).policy(ShardPolicy::new().units(["conv", "hidden"]))
}

fn run(
    ranks: usize,
    training: SupervisedTraining<Lent<Net>>,
) -> Result<LearningResult<Net>, Error> {
    among(ranks).launch_among_processes(training, Net::new(&device()), optimizer(), rates())
}

pub(crate) fn done<T>(result: Result<T, Error>) -> T {
    result.unwrap_or_else(|error| panic!("{error}"))
}

fn data(ranks: usize) -> (Vec<Item>, Vec<Item>) {
    // One rank has more batches than the others; another has no validation items.
    (items(11 * ranks - 1, 1), items(ranks - 1, 2))
}

#[test]
fn weights_and_metrics_match_one_device() {
    let Some((ranks, rank, at)) = part() else {
        for processes in [1, 2, 3] {
            let at = folder();
            let test = "weights_and_metrics_match_one_device";
            play(processes, test, at.path(), End::Well);
        }
        return;
    };
    // Each process has its own values, but only rank 0's count.
    let model = match rank {
        0 => Net::new(&device()),
        _ => Net::new(&device()).with_other_values(),
    };
    let ours = at.join("ours");
    let data = match ranks {
        1 => (items(11, 1), items(5, 2)),
        _ => data(ranks),
    };
    let training = training(&ours, data.clone(), BATCH).label(LABEL);
    // With one process, as with three, several batches make a step.
    let accumulates = ranks != 2;
    let training = if accumulates {
        training.grads_accumulation(2)
    } else {
        training
    };
    let result = among(ranks).launch_among_processes(training, model, optimizer(), rates());
    let result = done(result);
    assert!(result.error.is_none() && result.interrupted.is_none());
    let burns = folder();
    let expected = plain(burns.path(), data, ranks, |training| {
        if accumulates {
            training.grads_accumulation(2)
        } else {
            training
        }
    });
    // Every process has the whole model.
    assert_close(&result.model, &expected.model, 1e-5);
    if rank > 0 {
        return;
    }
    for epoch in 1..=3 {
        for split in ["train", "valid"] {
            let (got, counted) = logged(&ours, split, epoch, "Accuracy");
            let (expected, all) = logged(burns.path(), split, epoch, "Accuracy");
            assert_eq!(counted, all, "{ranks} ranks, {split}");
            assert!(
                (got - expected).abs() < 1e-3,
                "{split} {epoch}: {got}, {expected}"
            );
        }
    }
}

#[test]
fn every_process_gets_the_running_statistics_of_rank_0() {
    let Some((ranks, rank, at)) = part() else {
        let at = folder();
        let test = "every_process_gets_the_running_statistics_of_rank_0";
        if play(2, test, at.path(), End::Well) {
            let read = |rank: usize| {
                let file = at.path().join(format!("mean-{rank}"));
                std::fs::read_to_string(file).expect("the process has written it")
            };
            assert_eq!(read(0), read(1));
        }
        return;
    };
    let training = training(&at, (items(20, 1), items(6, 2)), BATCH).label(LABEL);
    let policy = ShardPolicy::new().units(["net"]);
    let sharded = FullySharded::new(LaunchConfig::new(ranks)).policy(policy);
    // A process may also have begun with other statistics.
    let mut model = Normalised::new(&device());
    if rank == 1 {
        let other = Tensor::from_floats([5.0], &device().inner());
        model.norm.running_mean = RunningState::new(other);
    }
    let result = done(sharded.launch_among_processes(training, model, optimizer(), rates()));
    let mean = result.model.norm.running_mean.value();
    let text = format!("{:?}", mean.into_data());
    std::fs::write(at.join(format!("mean-{rank}")), text).expect("the folder is there");
}

#[test]
fn a_checkpoint_moves_between_threads_and_processes() {
    let Some((ranks, rank, at)) = part() else {
        let at = folder();
        let data = || (items(20, 1), items(6, 2));
        let begun = sharded(at.path(), data(), 2, |training| {
            training.with_default_checkpointers().num_epochs(1)
        });
        done(begun);
        let test = "a_checkpoint_moves_between_threads_and_processes";
        if play(2, test, at.path(), End::Well) {
            let through = done(sharded(folder().path(), data(), 2, |training| training));
            let resumed = sharded(at.path(), data(), 2, |training| {
                training.with_default_checkpointers().checkpoint(2)
            });
            assert_eq!(values(&done(resumed).model), values(&through.model));
        }
        return;
    };
    let data = (items(20, 1), items(6, 2));
    let training = training(&at, data, BATCH).num_epochs(2).label(LABEL);
    let result = run(ranks, training.with_default_checkpointers().checkpoint(1));
    let result = done(result);
    assert!(result.error.is_none(), "rank {rank}: {:?}", result.error);
}

#[test]
fn an_early_end_or_an_interruption_stops_all() {
    let Some((ranks, rank, at)) = part() else {
        for scene in ["early", "interrupted", "failed"] {
            let at = folder();
            let at = at.path().join(scene);
            std::fs::create_dir(&at).expect("a folder");
            let test = "an_early_end_or_an_interruption_stops_all";
            play(2, test, &at, End::Well);
        }
        return;
    };
    let result = |interrupter: Option<Interrupter>| {
        let own = interrupter.clone().unwrap_or_default();
        // Rank 1 reads the second half: the event at its tenth item happens only there.
        let dataset = Watched {
            items: items(80, 1),
            read: AtomicUsize::new(if rank == 1 { 0 } else { 1_000 }),
            interrupter,
        };
        let builder = DataLoaderBuilder::new(Digitizer).batch_size(BATCH);
        let training =
            SupervisedTraining::new(&at, builder.build(dataset), loader(items(8, 1), BATCH))
                .metrics((LossMetric::new(),))
                .with_application_logger(None)
                .with_interrupter(own)
                .label(LABEL);
        done(run(ranks, training))
    };
    match at.file_name().and_then(|name| name.to_str()) {
        Some("early") => {
            let asked = Arc::new(AtomicUsize::new(0));
            let training = training(&at, (items(12, 1), items(6, 2)), BATCH).label(LABEL);
            done(run(ranks, training.early_stopping(AfterTwo(asked.clone()))));
            let asked = asked.load(std::sync::atomic::Ordering::Relaxed);
            assert_eq!(asked, if rank == 0 { 2 } else { 0 });
            if rank == 0 {
                assert!(!at.join("train/epoch-3").exists());
            }
        }
        Some("interrupted") => {
            let result = result(Some(Interrupter::new()));
            let reason = result
                .interrupted
                .and_then(|interrupted| interrupted.reason);
            assert_eq!(reason.as_deref(), Some("enough"), "rank {rank}");
        }
        _ => {
            let error = result(None)
                .error
                .expect("the loader of rank 1 failed")
                .to_string();
            assert!(error.contains("the disk is gone"), "rank {rank}: {error}");
        }
    }
}

#[test]
fn processes_that_are_about_to_train_something_else_are_refused() {
    const SCENES: [&str; 8] = [
        "epochs",
        "items",
        "clipping",
        "tensors",
        "rates",
        "optimizer",
        "accumulation",
        "replicas",
    ];
    let Some((ranks, rank, at)) = part() else {
        for scene in SCENES {
            let at = folder();
            let at = at.path().join(scene);
            std::fs::create_dir(&at).expect("a folder");
            let test = "processes_that_are_about_to_train_something_else_are_refused";
            play(2, test, &at, End::Refused);
        }
        return;
    };
    let scene = at
        .file_name()
        .and_then(|name| name.to_str())
        .expect("of SCENES");
    let differs = |of: &str| rank == 1 && scene == of;
    let count = if differs("items") { 12 } else { 16 };
    let training = training(&at, (items(count, 1), items(4, 2)), BATCH);
    let training = training.num_epochs(if differs("epochs") { 2 } else { 3 });
    let training = training.label(LABEL);
    let training = if differs("accumulation") {
        training.grads_accumulation(2)
    } else {
        training
    };
    let sharded = if differs("clipping") {
        among(ranks).clip_grad_norm(burn_fsdp::Clip::to(1.0))
    } else if differs("replicas") {
        among(ranks).replicas(2)
    } else {
        among(ranks)
    };
    let model = if differs("tensors") {
        Net::with_hidden(9, &device())
    } else {
        Net::new(&device())
    };
    let rate = if differs("rates") { 1e-3 } else { 1e-2 };
    let momentum = if differs("optimizer") { 0.8 } else { 0.9 };
    let momentum = MomentumConfig::new().with_momentum(momentum);
    let optimizer = SgdConfig::new().with_momentum(Some(momentum)).init();
    let refused = sharded.launch_among_processes(training, model, optimizer, rate);
    let refused = refused.err().expect("it is refused").to_string();
    let told = match scene {
        "items" => "the number of items",
        "tensors" => "the model's tensors",
        "optimizer" => "configure the same optimizer",
        "rates" => "the learning rates",
        other => other,
    };
    assert!(refused.contains(told), "rank {rank}: {refused}");
    pass(&at, rank, ranks);
}

#[test]
fn ranks_of_a_single_process_are_threads() {
    if scene().is_some() || launcher_ranks().is_some() {
        return;
    }
    let (ours, theirs) = (folder(), folder());
    let data = || (items(20, 1), items(6, 2));
    let result = done(run(2, training(ours.path(), data(), BATCH)));
    let expected = done(sharded(theirs.path(), data(), 2, |training| training));
    assert_eq!(values(&result.model), values(&expected.model));
}

#[test]
fn processes_of_another_launcher_train_nothing() {
    const PLAYED: &str = "BURN_FSDP_TEST_PLAYED";
    let test = "processes::processes_of_another_launcher_train_nothing";
    if std::env::var_os(PLAYED).is_none() {
        let mut command =
            std::process::Command::new(std::env::current_exe().expect("this program"));
        let torchrun = [("WORLD_SIZE", "2"), ("RANK", "1"), ("LOCAL_RANK", "1")];
        command
            .args(["--exact", test])
            .env(PLAYED, "")
            .envs(torchrun);
        let output = command.output().expect("it starts");
        let said = String::from_utf8_lossy(&output.stdout);
        assert!(
            output.status.success() && said.contains("1 passed"),
            "{said}"
        );
        return;
    }
    let at = folder();
    let data = || (items(20, 1), items(6, 2));
    let refused = [
        sharded(at.path(), data(), 2, |training| training).map(|_| ()),
        run(2, training(at.path(), data(), BATCH)).map(|_| ()),
    ];
    for refused in refused {
        let message = refused.expect_err("one of two").to_string();
        assert!(message.contains("WORLD_SIZE=2"), "{message}");
    }
}
