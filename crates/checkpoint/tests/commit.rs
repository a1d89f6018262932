//! A step is there completely or not at all, at whichever point a save fails or dies.

mod common;

use std::num::NonZeroUsize;
use std::path::Path;
use std::sync::Arc;

use burn_fsdp_checkpoint::storage::{Memory, Storage};
use burn_fsdp_checkpoint::{
    Check, Checkpoints, Error, Existing, Layout, Region, Staging, TensorKind, TensorSpec,
    WritePlan, write_shard,
};
use common::Kind;
use common::faulty::{Fail, Faulty};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

const KEEP: NonZeroUsize = NonZeroUsize::new(2).expect("not zero");

fn checkpoints(storage: impl Storage + 'static) -> Checkpoints {
    Checkpoints::with_storage(Arc::new(storage), "run")
}

fn plan() -> Arc<WritePlan> {
    common::plan(&common::line(2), Kind::Flat)
}

/// Saves as two ranks one after the other, always in the same order of operations.
fn save_in_turns(checkpoints: &Checkpoints, step: u64, existing: Existing) -> Result<(), Error> {
    let plan = plan();
    let staging = Staging::create(checkpoints, step, existing)?;
    let mut receipts = Vec::new();
    for rank in [1, 0] {
        let ticket = staging.ticket();
        let receipt = write_shard(checkpoints, ticket, &plan, rank, &mut common::source)?;
        receipts.push(receipt);
    }
    let model = "a model".into();
    let committed = staging.commit(&plan, receipts, common::training(step), model)?;
    committed.keep_last(KEEP)?;
    Ok(())
}

/// Returns the names in the folder that readers do not see, except the lock.
fn hidden(memory: &Memory) -> Vec<String> {
    let entries = memory.list(Path::new("run")).expect("there");
    let names = entries.into_iter().map(|entry| entry.name);
    names.filter(|name| name.starts_with(".step")).collect()
}

/// Asserts that every step that a reader sees is whole.
fn assert_all_whole(memory: &Memory) -> Vec<u64> {
    let checkpoints = checkpoints(memory.clone());
    let steps = checkpoints.steps().expect("lists");
    for step in &steps {
        let open = checkpoints
            .open(*step)
            .expect("a step that is seen is whole");
        open.verify(|_| ()).expect("undamaged");
        assert_eq!(open.index().training.step, *step);
        common::assert_whole(&open, plan().tensors());
    }
    steps
}

/// Returns a folder with steps 1 and 2.
fn two_steps() -> Memory {
    let memory = Memory::new();
    for step in [1, 2] {
        let saved = save_in_turns(&checkpoints(memory.clone()), step, Existing::Refuse);
        saved.expect("saves");
    }
    memory
}

fn num_changes(step: u64, existing: Existing) -> usize {
    let counting = Arc::new(Faulty::new(two_steps(), Fail::Never));
    let checkpoints = Checkpoints::with_storage(counting.clone(), "run");
    save_in_turns(&checkpoints, step, existing).expect("saves");
    counting.num_changes()
}

#[test]
fn a_crash_at_any_operation_leaves_whole_steps() {
    let mut outcomes = std::collections::BTreeSet::new();
    for (step, existing) in [(3, Existing::Refuse), (2, Existing::Replace)] {
        let changes = num_changes(step, existing);
        assert!(changes > 40, "{changes} operations");
        for at in 0..=changes {
            // None of the unsynced data survives, all of it, or anything between.
            for luck in 0..12 {
                let memory = two_steps();
                let dying = checkpoints(Faulty::new(memory.clone(), Fail::From(at)));
                let saved = save_in_turns(&dying, step, existing);
                drop(dying);
                let mut random = StdRng::seed_from_u64(luck);
                memory.crash(|most| match luck {
                    0 => 0,
                    1 => most,
                    _ => random.random_range(0..=most),
                });
                let steps = assert_all_whole(&memory);
                outcomes.insert(steps.clone());
                assert!(steps.contains(&2) || existing == Existing::Replace);
                if saved.is_ok() {
                    assert!(steps.contains(&step), "a save that succeeded lasts");
                }
                // The next save succeeds, restores anything lost in between, and cleans up.
                let next = save_in_turns(&checkpoints(memory.clone()), 4, Existing::Refuse);
                next.expect("saves");
                let steps = assert_all_whole(&memory);
                assert!(
                    steps.ends_with(&[step, 4]) || steps.ends_with(&[2, 4]),
                    "{steps:?}"
                );
                assert_eq!(hidden(&memory), [""; 0]);
            }
        }
    }
    let expected = [vec![1], vec![1, 2], vec![1, 2, 3], vec![2, 3]];
    assert!(
        outcomes.into_iter().eq(expected),
        "every outcome occurs, and no other"
    );
}

#[test]
fn a_failure_at_any_operation_is_an_error_and_leaves_whole_steps() {
    for (step, existing) in [(3, Existing::Refuse), (2, Existing::Replace)] {
        for at in 0..num_changes(step, existing) {
            let memory = two_steps();
            let failing = checkpoints(Faulty::new(memory.clone(), Fail::At(at)));
            let saved = save_in_turns(&failing, step, existing);
            let steps = assert_all_whole(&memory);
            assert!(steps.contains(&2), "{at}: {saved:?}");
            if saved.is_ok() {
                assert!(steps.contains(&step));
            }
            save_in_turns(&checkpoints(memory.clone()), 4, Existing::Refuse).expect("saves");
            assert_all_whole(&memory);
            assert_eq!(hidden(&memory), [""; 0]);
        }
    }
}

#[test]
fn a_failed_save_frees_its_space() {
    let memory = two_steps();
    let checkpoints = checkpoints(memory.clone());
    let staging = Staging::create(&checkpoints, 3, Existing::Refuse).expect("creates");
    assert_eq!(hidden(&memory).len(), 1);
    drop(staging);
    assert_eq!(hidden(&memory), [""; 0]);
}

#[test]
fn two_runs_cannot_save_into_one_folder_at_once() {
    let dir = tempfile::tempdir().expect("a folder");
    let first = Checkpoints::new(dir.path());
    let staging = Staging::create(&first, 1, Existing::Refuse).expect("creates");
    let second = Checkpoints::new(dir.path());
    let error = Staging::create(&second, 2, Existing::Refuse).expect_err("locked");
    assert!(matches!(error, Error::Locked { .. }), "{error}");
    drop(staging);
    save_in_turns(&second, 2, Existing::Refuse).expect("free again");
}

#[test]
fn an_existing_step_is_rejected_or_replaced() {
    let memory = two_steps();
    let checkpoints = checkpoints(memory.clone());
    let error = save_in_turns(&checkpoints, 2, Existing::Refuse).expect_err("there");
    assert!(matches!(error, Error::Exists { .. }), "{error}");
    save_in_turns(&checkpoints, 2, Existing::Replace).expect("replaces");
    assert_eq!(assert_all_whole(&memory), [1, 2]);
    assert_eq!(hidden(&memory), [""; 0]);
}

#[test]
fn keep_last_never_removes_the_newest_good_step() {
    let memory = Memory::new();
    let checkpoints = checkpoints(memory.clone());
    let plan = plan();
    for step in 1..=6 {
        common::save_step(&checkpoints, &plan, step);
    }
    // Step 6 is damaged, step 3 is truncated.
    let flip = |step: u64, cut: bool| {
        let path = checkpoints.path(step).join("rank-00001.safetensors");
        let mut bytes = memory.read(&path).expect("there");
        let last = bytes.len() - 1;
        if cut {
            bytes.truncate(last)
        } else {
            bytes[last] ^= 1
        }
        memory.write(&path, bytes).expect("in memory");
    };
    flip(6, false);
    flip(3, true);
    let good = checkpoints.newest_good(Check::Everything).expect("lists");
    let good = good.step.expect("some").index().training.step;
    assert_eq!(good, 5);
    let one = NonZeroUsize::new(1).expect("not zero");
    let three = NonZeroUsize::new(3).expect("not zero");
    assert_eq!(checkpoints.keep_last(three, good).expect("removes"), [1]);
    assert_eq!(checkpoints.steps().expect("lists"), [2, 3, 4, 5, 6]);
    assert_eq!(checkpoints.keep_last(one, good).expect("removes"), [2, 4]);
    assert_eq!(checkpoints.steps().expect("lists"), [3, 5, 6]);
    checkpoints
        .keep_last(one, 3)
        .expect_err("step 3 is not good");
    checkpoints
        .keep_last(one, 9)
        .expect_err("step 9 is not there");
    assert_eq!(checkpoints.steps().expect("lists"), [3, 5, 6]);
}

#[test]
fn other_files_in_the_folder_are_untouched() {
    let memory = two_steps();
    for name in [
        "notes.txt",
        "step-1/x",
        "step-latest/x",
        ".step-notes/x",
        ".git/x",
    ] {
        let path = Path::new("run").join(name);
        memory.write(&path, vec![1]).expect("in memory");
    }
    let checkpoints = checkpoints(memory.clone());
    assert_eq!(checkpoints.steps().expect("lists"), [1, 2]);
    save_in_turns(&checkpoints, 3, Existing::Refuse).expect("saves");
    for name in [
        "notes.txt",
        "step-1/x",
        "step-latest/x",
        ".step-notes/x",
        ".git/x",
    ] {
        assert!(
            memory.exists(&Path::new("run").join(name)).expect("asks"),
            "{name}"
        );
    }
}

#[test]
fn receipts_must_match_the_save_and_the_plan() {
    let memory = Memory::new();
    let checkpoints = checkpoints(memory);
    let plan = plan();
    let begin = |step| Staging::create(&checkpoints, step, Existing::Refuse).expect("creates");
    let write = |staging: &Staging, plan: &WritePlan, rank| {
        let ticket = staging.ticket();
        write_shard(&checkpoints, ticket, plan, rank, &mut common::source).expect("writes")
    };
    let refused = |staging: Staging, receipts, expected: &str| {
        let step = staging.ticket().step();
        let error = staging
            .commit(&plan, receipts, common::training(step), ().into())
            .expect_err(expected);
        assert!(error.to_string().contains(expected), "{error}");
        assert!(checkpoints.steps().expect("lists").is_empty());
    };
    let staging = begin(1);
    let lone = write(&staging, &plan, 0);
    refused(staging, vec![lone.clone()], "ranks [0]");
    let staging = begin(1);
    let both = vec![lone, write(&staging, &plan, 1)];
    refused(staging, both, "rank 0 for .step-000001.partial");
    let staging = begin(1);
    let other = common::plan(&common::line(2), Kind::Replicated);
    let both = vec![write(&staging, &plan, 0), write(&staging, &other, 1)];
    refused(staging, both, "rank 1 for other tensors");
    let staging = begin(1);
    let both = vec![write(&staging, &plan, 0), write(&staging, &plan, 1)];
    let error = staging
        .commit(&plan, both, common::training(2), ().into())
        .expect_err("another step");
    assert!(matches!(error, Error::Argument { .. }), "{error}");
}

#[test]
fn unloadable_steps_are_not_committed() {
    let mesh = common::line(2);
    let layout = Layout::flat(&mesh, "shard").expect("an axis");
    let tensor = TensorSpec::new(
        "t",
        [10],
        burn_fsdp_checkpoint::Dtype::U8,
        TensorKind::Buffer,
        layout,
    );
    // The ranks omit element 4.
    let regions = vec![vec![Region::Flat(0..4), Region::Flat(5..10)]];
    let plan = WritePlan::of_regions(&mesh, vec![tensor], regions).expect("inside");
    let memory = Memory::new();
    let saved = common::save_all(
        &checkpoints(memory.clone()),
        &common::request(&Arc::new(plan), 1),
    );
    let errors: Vec<_> = saved
        .into_iter()
        .map(|saved| saved.expect_err("a gap").to_string())
        .collect();
    assert!(
        errors[0].contains("hold elements up to 4 and then from 5"),
        "{}",
        errors[0]
    );
    assert!(errors[1].contains("rank 0 failed"), "{}", errors[1]);
    let mut request = common::request(&self::plan(), 1);
    request.training.loss_scale = Some(burn_fsdp_checkpoint::LossScale {
        scale: f64::INFINITY,
        good_steps: 0,
    });
    for saved in common::save_all(&checkpoints(memory.clone()), &request) {
        saved.expect_err("not finite");
    }
    assert!(
        checkpoints(memory.clone())
            .steps()
            .expect("lists")
            .is_empty()
    );
    assert_eq!(hidden(&memory), [""; 0]);
}

#[test]
fn tensors_that_cannot_be_saved_are_refused() {
    use burn_fsdp_checkpoint::{Dtype, Placement};
    let mesh = common::line(2);
    let spec = |name: &str, shape: &[usize], dtype, layout: &Layout| {
        TensorSpec::new(name, shape, dtype, TensorKind::Parameter, layout.clone())
    };
    let flat = Layout::flat(&mesh, "shard").expect("an axis");
    let of = |placements: Vec<Placement>, cut| Layout {
        placements,
        cut,
        owner: None,
    };
    let partial = Placement::Partial(burn_fsdp_mesh::ReduceOp::Sum);
    use burn_fsdp_checkpoint::Cut::{Dims, Elements};
    for (tensors, expected) in [
        (
            vec![spec("a", &[1], Dtype::U8, &flat); 2],
            "two tensors have this name",
        ),
        (vec![spec("", &[1], Dtype::U8, &flat)], "name must be"),
        (vec![spec("a", &[1], Dtype::F4, &flat)], "whole bytes"),
        (
            vec![spec("a", &[usize::MAX, 2], Dtype::U8, &flat)],
            "more elements",
        ),
        (
            vec![spec("a", &[1 << 62, 2], Dtype::F32, &flat)],
            "too large",
        ),
        (
            vec![spec("a", &[4], Dtype::U8, &of(vec![], Dims))],
            "one placement",
        ),
        (
            vec![spec("a", &[4], Dtype::U8, &of(vec![partial], Dims))],
            "reduce the tensor first",
        ),
        (
            vec![spec(
                "a",
                &[4],
                Dtype::U8,
                &of(vec![Placement::Shard(1)], Dims),
            )],
            "1 dims",
        ),
        (
            vec![spec(
                "a",
                &[4],
                Dtype::U8,
                &of(vec![Placement::Shard(1)], Elements),
            )],
            "shard(0)",
        ),
    ] {
        let error = WritePlan::new(&mesh, tensors).expect_err(expected);
        assert!(error.to_string().contains(expected), "{error}");
    }
    assert!(Layout::flat(&mesh, "none").is_err());
}
