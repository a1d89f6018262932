//! Compiled steps in Burn's loop, with ranks that are processes: each process runs this test again.

use std::path::Path;

use burn::optim::AdamWConfig;
use burn::tensor::Device;
use burn::train::{LearningResult, SupervisedTraining};
use burn_fsdp::train::{FullySharded, Lent};
use burn_fsdp::{Error, LaunchConfig, Strategy};

use crate::compiled::compiled;
use crate::network::{BATCH, Item, Net, Ordered, items};
use crate::processes::{End, LABEL, done, part, pass, played_in};
use crate::{assert_close, folder, logged, plain, rates, training, values};

fn play(processes: usize, test: &str, at: &Path, end: End) -> bool {
    played_in(processes, &format!("compiled_processes::{test}"), at, end)
}

/// Trains by compiled steps among processes. Only the initial values of rank 0 count.
fn among(
    (ranks, rank): (usize, usize),
    replicas: usize,
    training: SupervisedTraining<Lent<Net>>,
) -> Result<LearningResult<Net>, Error> {
    let init = move |device: &Device| match rank {
        0 => Net::on(device),
        _ => Net::on(device).with_other_values(),
    };
    let optimizer = AdamWConfig::new().with_weight_decay(0.1).with_epsilon(1e-3);
    let sharded = FullySharded::new(LaunchConfig::new(ranks)).replicas(replicas);
    sharded.launch_compiled_among_processes(
        training,
        (init, Net::classify),
        (optimizer.build(), rates()),
        (Strategy::FullShard, Default::default()),
    )
}

fn ordered(at: &Path) -> SupervisedTraining<Lent<Ordered>> {
    training(at, (items(16, 1), items(4, 2)), BATCH).label(LABEL)
}

fn data(ranks: usize) -> (Vec<Item>, Vec<Item>) {
    (items(10 * ranks, 1), items(2 * ranks, 2))
}

#[test]
fn weights_and_metrics_match_one_device() {
    let Some((ranks, rank, at)) = part() else {
        for processes in [1, 2, 3, 4] {
            let at = folder();
            let test = "weights_and_metrics_match_one_device";
            play(processes, test, at.path(), End::Well);
        }
        return;
    };
    let ours = at.join("ours");
    // With three processes, several batches make a step. Four processes are two replicas.
    let (accumulation, replicas) = (if ranks == 3 { 2 } else { 1 }, ranks.div_ceil(3));
    let training = training(&ours, data(ranks), BATCH).label(LABEL);
    let training = training.grads_accumulation(accumulation);
    let result = done(among((ranks, rank), replicas, training));
    assert!(result.error.is_none() && result.interrupted.is_none());
    let burns = folder();
    let expected = plain(burns.path(), data(ranks), ranks, |training| {
        training.grads_accumulation(accumulation)
    });
    // Every process has the whole model.
    assert_close(&result.model, &expected.model, 1e-5);
    if rank > 0 {
        return;
    }
    for epoch in 1..=3 {
        for split in ["train", "valid"] {
            let (got, counted) = logged(&ours, split, epoch, "Accuracy");
            let (want, all) = logged(burns.path(), split, epoch, "Accuracy");
            assert_eq!(counted, all, "{ranks} ranks, {split}");
            assert!((got - want).abs() < 1e-3, "{split} {epoch}: {got}, {want}");
        }
    }
}

#[test]
fn a_checkpoint_moves_between_threads_and_processes() {
    let by_threads = |at: &Path, change: fn(SupervisedTraining<_>) -> SupervisedTraining<_>| {
        let strategy = FullySharded::new(LaunchConfig::new(2));
        done(compiled(
            &strategy,
            Strategy::FullShard,
            at,
            data(2),
            change,
        ))
    };
    let Some((ranks, rank, at)) = part() else {
        let at = folder();
        by_threads(at.path(), |it| {
            it.with_default_checkpointers().num_epochs(1)
        });
        let test = "a_checkpoint_moves_between_threads_and_processes";
        if play(2, test, at.path(), End::Well) {
            let through = by_threads(folder().path(), |it| it);
            let resumed = by_threads(at.path(), |it| {
                it.with_default_checkpointers().checkpoint(2)
            });
            assert_eq!(values(&resumed.model), values(&through.model));
        }
        return;
    };
    let training = training(&at, data(2), BATCH).num_epochs(2).label(LABEL);
    let training = training.with_default_checkpointers().checkpoint(1);
    let result = done(among((ranks, rank), 1, training));
    assert!(result.error.is_none(), "rank {rank}: {:?}", result.error);
}

#[test]
fn processes_that_are_about_to_train_something_else_are_refused() {
    const SCENES: [&str; 7] = [
        "values",
        "epochs",
        "items",
        "tensors",
        "strategy",
        "optimizer",
        "rates",
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
    let scene = at.file_name().and_then(|name| name.to_str());
    let scene = scene.expect("of SCENES").to_owned();
    let differs = |of: &str| rank == 1 && scene == of;
    let count = if differs("items") { 12 } else { 16 };
    let training = training(&at, (items(count, 1), items(4, 2)), BATCH).label(LABEL);
    let training = training.num_epochs(if differs("epochs") { 2 } else { 3 });
    if scene == "values" {
        let (training, first) = (ordered(&at), rank as i32);
        let refused = FullySharded::new(LaunchConfig::new(ranks)).launch_compiled_among_processes(
            training,
            (
                move |device: &Device| Ordered::on(first, device),
                Ordered::classify,
            ),
            (AdamWConfig::new().build(), 1e-2),
            (Strategy::FullShard, Default::default()),
        );
        let refused = refused.err().expect("it is refused").to_string();
        let told = "the values of integer and boolean tensors";
        assert!(refused.contains(told), "rank {rank}: {refused}");
        return pass(&at, rank, ranks);
    }
    let hidden = if differs("tensors") { 9 } else { 8 };
    let init = move |device: &Device| Net::unseeded(hidden, device);
    let rate = if differs("rates") { 1e-3 } else { 1e-2 };
    let decay = if differs("optimizer") { 0.2 } else { 0.1 };
    let optimizer = AdamWConfig::new().with_weight_decay(decay).build();
    let strategy = if differs("strategy") {
        Strategy::NoShard
    } else {
        Strategy::FullShard
    };
    let sharded = FullySharded::new(LaunchConfig::new(ranks));
    let refused = sharded.launch_compiled_among_processes(
        training,
        (init, Net::classify),
        (optimizer, rate),
        (strategy, Default::default()),
    );
    let refused = refused.err().expect("it is refused").to_string();
    println!("{scene}, rank {rank}: {refused}");
    let told = match scene.as_str() {
        "items" => "the number of items",
        "tensors" => "the model's tensors",
        "rates" => "at learning rate 0.001",
        // A difference in the same model, batch and rate.
        "optimizer" => "both have \"0.images\" F32 [4, 1, 6, 6]",
        other => other,
    };
    assert!(refused.contains(told), "rank {rank}: {refused}");
    pass(&at, rank, ranks);
}
