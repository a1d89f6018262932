//! Runs that move between backends and engines, by checkpoints and in memory.

use std::path::Path;
use std::sync::Arc;

use burn::backend::Flex;
use burn::tensor::Device;
use burn_fsdp::checkpoint::Checkpoints;
use burn_fsdp::compile::load_compiled;
use burn_fsdp::internals::mesh::Region;
use burn_fsdp::internals::state::full_state;
use burn_fsdp::{Error, LaunchConfig, ProcessGroup, Strategy, launch};
use burn_fsdp_models::Gpt;
use serde_json::Value;

use crate::backends::Tested;
use crate::runs::{
    Division, Engine, Run, assert_close, batch, compiled_step, eager_model, mesh, plainly,
};

/// The place of a run.
#[derive(Debug, Clone, Copy)]
enum On {
    Flex,
    /// The backend under test.
    Tested,
}

/// The engines and places before and after a move.
const MOVES: [[(Engine, On); 2]; 4] = [
    [(Engine::Compiled, On::Tested), (Engine::Compiled, On::Flex)],
    [(Engine::Compiled, On::Flex), (Engine::Compiled, On::Tested)],
    [(Engine::Compiled, On::Tested), (Engine::Eager, On::Flex)],
    [(Engine::Eager, On::Tested), (Engine::Compiled, On::Tested)],
];

/// The numbers of ranks before and after a move.
const RANKS: [[usize; 2]; 4] = [[1, 4], [2, 3], [3, 2], [4, 1]];

fn run<B: Tested>(of: &Run, on: On) -> Vec<f32> {
    match on {
        On::Tested => of.on::<B>(),
        On::Flex => of.on::<Flex>(),
    }
}

/// Calls `check` with the two runs of each move, the first of which saves what the second resumes.
fn for_moves<B: Tested>(
    [middle, end]: [usize; 2],
    check: impl Fn(Division, [(&Run, On); 2], &Path),
) {
    for division in Division::all::<B>() {
        for [(first, was_on), (second, is_on)] in MOVES {
            for ranks in RANKS {
                let (_kept, path) = folder();
                let before = Run {
                    engine: first,
                    division,
                    ranks: ranks[0],
                    from: None,
                    steps: 0..middle,
                    to: Some(path.clone()),
                };
                let after = Run {
                    engine: second,
                    division,
                    ranks: ranks[1],
                    from: Some(path.clone()),
                    steps: middle..end,
                    to: None,
                };
                check(division, [(&before, was_on), (&after, is_on)], &path);
            }
        }
    }
}

/// Name and bytes of every whole tensor of a step, and the values other than tensors of the optimizer's state.
fn contents(folder: &Path) -> (Vec<(String, Vec<u8>)>, Value) {
    let step = Checkpoints::new(folder).newest().expect("saved");
    let tensors = step.index().tensors.iter().map(|tensor| {
        let all = Region::Flat(0..tensor.shape.iter().product());
        let bytes = step.read(&tensor.name, &all).expect("whole");
        (tensor.name.clone(), bytes)
    });
    let mut tensors: Vec<_> = tensors.collect();
    tensors.sort();
    // The eager optimizer also records the paths of its groups; here it has only one group.
    let mut optimizer = step.index().training.optimizer.clone();
    for kept in optimizer.as_object_mut().expect("an object").values_mut() {
        kept["group_path"] = Value::Null;
    }
    (tensors, optimizer)
}

fn folder() -> (tempfile::TempDir, Arc<Path>) {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().into();
    (folder, path)
}

/// On the same ranks, a resumed run has the bits of an uninterrupted one.
pub(crate) fn resume_bit_for_bit<B: Tested>() {
    for division in Division::all::<B>() {
        for ranks in 1..=4 {
            let (_kept, path) = folder();
            let whole = Run {
                engine: Engine::Compiled,
                division,
                ranks,
                from: None,
                steps: 0..4,
                to: None,
            };
            let expected = whole.on::<B>();
            let mut losses = Run {
                steps: 0..2,
                to: Some(path.clone()),
                ..whole.clone()
            }
            .on::<B>();
            losses.extend(
                Run {
                    steps: 2..4,
                    from: Some(path),
                    ..whole.clone()
                }
                .on::<B>(),
            );
            assert_eq!(losses, expected, "{whole:?}");
        }
    }
}

/// A step that is restored and saved again has the bits of the saved one, on any ranks.
pub(crate) fn restore_steps_of_others<B: Tested>() {
    for_moves::<B>([2, 2], |_, [before, after], from| {
        run::<B>(before.0, before.1);
        let (_kept, to) = folder();
        let again = Run {
            to: Some(to.clone()),
            ..after.0.clone()
        };
        run::<B>(&again, after.1);
        let (saved, again) = (contents(from), contents(&to));
        let is_state = |(name, _): &&(String, _)| name.starts_with("optimizer.");
        let num_states = saved.0.iter().filter(is_state).count();
        assert_eq!(3 * num_states, 2 * saved.0.len());
        assert!(saved == again, "{before:?}, then {after:?}");
    });
}

/// The losses of a run that moves are those of Burn's own loop on the CPU.
pub(crate) fn continue_runs_of_others<B: Tested>() {
    let plain = plainly(4, &Device::flex());
    for_moves::<B>([2, 4], |division, [before, after], _| {
        let mut losses = run::<B>(before.0, before.1);
        losses.extend(run::<B>(after.0, after.1));
        let what = format!("{before:?}, then {after:?}");
        assert_close(&losses, &plain, division.tolerance::<B>(), &what);
    });
}

/// Returns the whole tensors of a sharded model that rank 0 sees.
fn whole(model: &Gpt) -> Result<Vec<(String, Vec<u8>)>, Error> {
    let mut seen = Vec::new();
    full_state(model, |tensor| {
        seen.push((tensor.path.to_owned(), tensor.bytes.to_vec()));
    })?;
    Ok(seen)
}

/// Sharded models on the backend itself and on Flex take a step's weights, without a checkpoint.
pub(crate) fn pass_weights<B: Tested>() {
    for ranks in 1..=4 {
        for strategy in [Strategy::FullShard, Strategy::NoShard] {
            let division = Division {
                strategy,
                compute: None,
            };
            let body = move |world: ProcessGroup| -> Result<(), Error> {
                let mesh = mesh(&world)?;
                let mut step = compiled_step::<B>(division.mode(&world))?;
                let part = (world.rank(), world.size());
                for index in 0..2 {
                    step.step(1e-2, &batch(index, part, &B::device()))?;
                }
                let there = load_compiled(eager_model::<B>(&mesh, division)?, &mut step)?;
                let here = load_compiled(eager_model::<Flex>(&mesh, division)?, &mut step)?;
                let (there, here) = (whole(&there)?, whole(&here)?);
                assert_eq!(there.is_empty(), world.rank() != 0);
                assert!(there == here);
                for parameter in step.parameters().to_vec() {
                    let expected = step.parameter(&parameter.path)?;
                    let found = there.iter().find(|(path, _)| **path == *parameter.path);
                    let found = found.map(|(_, bytes)| bytes.as_slice());
                    let expected = (world.rank() == 0).then_some(expected.as_bytes());
                    assert_eq!(found, expected, "{}", parameter.path);
                }
                Ok(())
            };
            launch(LaunchConfig::new(ranks), body).unwrap_or_else(|error| panic!("{error}"));
        }
    }
}
