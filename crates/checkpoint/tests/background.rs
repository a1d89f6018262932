//! Saving in the background, and the errors of the other ranks when one fails.

mod common;

use std::num::NonZeroUsize;
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::Duration;

use burn_fsdp_checkpoint::storage::Memory;
use burn_fsdp_checkpoint::{
    Alone, BackgroundSaver, BoxError, Checkpoints, Error, Region, Rendezvous, Snapshot, TensorSpec,
    ThreadRendezvous, WritePlan, save,
};
use common::Kind;

const DEADLINE: Duration = Duration::from_secs(30);

fn checkpoints(memory: &Memory) -> Checkpoints {
    Checkpoints::with_storage(Arc::new(memory.clone()), "run")
}

fn snapshot(plan: &WritePlan, rank: usize) -> Snapshot {
    let mut snapshot = Snapshot::new();
    for part in plan.of_rank(rank) {
        let tensor = &plan.tensors()[part.tensor];
        let bytes = common::part_of(tensor, &part.region);
        snapshot.insert(&*tensor.name, part.region.clone(), bytes);
    }
    snapshot
}

#[test]
fn ranks_save_in_the_background_and_keep_the_last() {
    let memory = Memory::new();
    let plan = common::plan(&common::line(3), Kind::Flat);
    std::thread::scope(|scope| {
        for end in ThreadRendezvous::new(3, DEADLINE) {
            let (plan, memory) = (&plan, &memory);
            scope.spawn(move || {
                let rank = end.rank();
                let mut saver =
                    BackgroundSaver::new(checkpoints(memory), Box::new(end)).expect("a thread");
                assert_eq!(saver.wait().expect("nothing failed"), None);
                for step in 1..=5 {
                    let mut request = common::request(plan, step);
                    request.keep_last = NonZeroUsize::new(2);
                    let last = saver.start(request, snapshot(plan, rank)).expect("saves");
                    assert_eq!(last.map(|saved| saved.step), (step > 1).then(|| step - 1));
                    assert_eq!(saver.pending(), Some(step));
                }
                // The rendezvous has a deadline, so this ends.
                let saved = loop {
                    if let Some(saved) = saver.poll().expect("saves") {
                        break saved;
                    }
                    std::thread::yield_now();
                };
                assert_eq!(saved.path, checkpoints(memory).path(5));
                assert_eq!((saved.step, saved.removed), (5, vec![3]));
            });
        }
    });
    let checkpoints = checkpoints(&memory);
    assert_eq!(checkpoints.steps().expect("lists"), [4, 5]);
    common::assert_whole(&checkpoints.newest().expect("opens"), plan.tensors());
}

#[test]
fn a_failed_save_is_reported_on_every_rank_and_the_next_succeeds() {
    let memory = Memory::new();
    let plan = common::plan(&common::line(2), Kind::Flat);
    std::thread::scope(|scope| {
        for end in ThreadRendezvous::new(2, DEADLINE) {
            let (plan, memory) = (&plan, &memory);
            scope.spawn(move || {
                let rank = end.rank();
                let mut saver =
                    BackgroundSaver::new(checkpoints(memory), Box::new(end)).expect("a thread");
                let request = |step| common::request(plan, step);
                saver
                    .start(request(1), snapshot(plan, rank))
                    .expect("starts");
                // Rank 1 has lost its parts.
                let held = match rank {
                    0 => snapshot(plan, 0),
                    _ => Snapshot::new(),
                };
                saver.start(request(2), held).expect("step 1 is saved");
                let error = saver
                    .start(request(3), snapshot(plan, rank))
                    .expect_err("step 2 is not");
                match (rank, &error) {
                    (
                        0,
                        Error::PeerFailed {
                            step: 2,
                            rank: 1,
                            reason,
                        },
                    ) => {
                        assert!(reason.contains("not in the snapshot"), "{reason}");
                    }
                    (1, Error::Source { tensor, .. }) => assert!(!tensor.is_empty()),
                    _ => panic!("rank {rank}: {error}"),
                }
                assert_eq!(saver.pending(), None);
                saver
                    .start(request(3), snapshot(plan, rank))
                    .expect("starts");
                // A dropped saver still finishes its save.
            });
        }
    });
    assert_eq!(checkpoints(&memory).steps().expect("lists"), [1, 3]);
}

#[test]
fn the_next_save_waits_for_the_last() {
    let memory = Memory::new();
    let plan = common::plan(&common::line(1), Kind::Flat);
    let mut saver =
        BackgroundSaver::new(checkpoints(&memory), Box::new(Gated::new())).expect("a thread");
    let gate = GATE.lock().expect("no panic").take().expect("made");
    saver
        .start(common::request(&plan, 1), snapshot(&plan, 0))
        .expect("starts");
    assert_eq!(saver.poll().expect("no failure"), None, "still at the gate");
    let waited = saver.wait_for(Duration::from_millis(1));
    assert_eq!(waited.expect("no failure"), None, "still at the gate");
    assert_eq!(saver.pending(), Some(1));
    let opener = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(50));
        (0..2).for_each(|_| gate.send(()).expect("waited for"));
    });
    let last = saver
        .start(common::request(&plan, 2), snapshot(&plan, 0))
        .expect("step 1 is saved");
    assert_eq!(last.map(|saved| saved.step), Some(1));
    assert_eq!(
        saver.wait().expect("saves").map(|saved| saved.step),
        Some(2)
    );
    opener.join().expect("no panic");
}

/// A rendezvous of one rank in which each gather waits for permission to continue.
struct Gated(std::sync::mpsc::Receiver<()>);

static GATE: std::sync::Mutex<Option<std::sync::mpsc::Sender<()>>> = std::sync::Mutex::new(None);

impl Gated {
    fn new() -> Self {
        let (sender, receiver) = channel();
        *GATE.lock().expect("no panic") = Some(sender);
        Self(receiver)
    }
}

impl Rendezvous for Gated {
    fn rank(&self) -> usize {
        0
    }

    fn world_size(&self) -> usize {
        1
    }

    fn gather(&mut self, bytes: Vec<u8>) -> Result<Option<Vec<Vec<u8>>>, BoxError> {
        self.0.recv_timeout(DEADLINE)?;
        Alone.gather(bytes)
    }

    fn broadcast(&mut self, bytes: Option<Vec<u8>>) -> Result<Vec<u8>, BoxError> {
        Alone.broadcast(bytes)
    }
}

#[test]
fn a_source_that_panics_or_gives_padding_fails_the_save() {
    let plan = common::plan(&common::line(1), Kind::Flat);
    let memory = Memory::new();
    let request = common::request(&plan, 1);
    let mut panics = |_: &TensorSpec, _: &Region| -> Result<Vec<u8>, BoxError> { panic!("oh") };
    let error = save(&checkpoints(&memory), &request, &mut panics, &mut Alone);
    let error = error.expect_err("panicked");
    assert!(
        matches!(&error, Error::Panicked { step: 1, reason } if reason == "oh"),
        "{error}"
    );
    let mut pads = |tensor: &TensorSpec, region: &Region| -> Result<Vec<u8>, BoxError> {
        let mut part = common::part_of(tensor, region);
        part.push(0);
        Ok(part)
    };
    let error = save(&checkpoints(&memory), &request, &mut pads, &mut Alone);
    assert!(matches!(error, Err(Error::Length { .. })));
    assert!(checkpoints(&memory).steps().expect("lists").is_empty());
}

#[test]
fn a_missing_rank_is_an_error() {
    let plan = common::plan(&common::line(2), Kind::Flat);
    let memory = Memory::new();
    let request = common::request(&plan, 1);
    let mut ends = ThreadRendezvous::new(2, Duration::from_millis(50));
    let mut missing = ends.pop().expect("rank 1");
    let mut root = ends.pop().expect("rank 0");
    let error = save(
        &checkpoints(&memory),
        &request,
        &mut common::source,
        &mut root,
    );
    let error = error.expect_err("nobody came").to_string();
    assert!(error.contains("rank 1 did not arrive in time"), "{error}");
    assert!(checkpoints(&memory).steps().expect("lists").is_empty());
    // The remaining messages of the failed save cannot be mistaken for another save.
    let error = root
        .gather(Vec::new())
        .expect_err("failed before")
        .to_string();
    assert!(error.contains("an earlier call failed"), "{error}");
    drop(root);
    missing.broadcast(None).expect("it was told the folder");
    let error = missing
        .broadcast(None)
        .expect_err("rank 0 has gone")
        .to_string();
    assert!(error.contains("rank 0 has left"), "{error}");
}

#[test]
fn plans_must_be_for_the_ranks_that_save() {
    let plan = common::plan(&common::line(2), Kind::Flat);
    let request = common::request(&plan, 1);
    let memory = Memory::new();
    let error = save(
        &checkpoints(&memory),
        &request,
        &mut common::source,
        &mut Alone,
    );
    assert!(matches!(error, Err(Error::Argument { .. })));
}
