//! Optimizers of whole tensors without whole tensors: they are refused by name, and never wrong.

use burn_fsdp::Strategy as Sharding;
use proptest::prelude::*;
use proptest::sample::select;
use proptest::test_runner::{TestCaseError, TestCaseResult};

use super::case::{Case, Engines, cases};
use super::legs::{End, Engine, Ranks};
use super::optimizer::{OPTIMIZERS, Optimizer};
use super::precision::Halves;

/// Trainings in which an optimizer would have to step parts of matrices.
pub(crate) fn refused(engines: Engines) -> impl Strategy<Value = Case> {
    let optimizers: Vec<_> = OPTIMIZERS.into_iter().collect();
    let whole = optimizers.into_iter().filter(|of| of.needs_whole_tensors());
    let whole = whole.filter(move |of| engines == Engines::Eager || of.compiled() == *of);
    (
        cases(engines),
        select(whole.collect::<Vec<_>>()),
        2..5_usize,
    )
        .prop_map(|(mut case, optimizer, ranks)| {
            case.optimizer = optimizer;
            case.legs.truncate(1);
            for leg in &mut case.legs {
                leg.ranks = Ranks::Line(ranks);
                leg.end = End::Nothing;
                leg.switched = None;
                match &mut leg.engine {
                    Engine::Eager(eager) => {
                        eager.strategy = Sharding::FullShard;
                        eager.has_owners = false;
                        eager.whole_below = 0;
                        eager.halves = Halves::default();
                        eager.moves = false;
                    }
                    Engine::Compiled(compiled) => {
                        compiled.strategy = Sharding::FullShard;
                        compiled.has_owners = false;
                        compiled.halves = Halves::default();
                    }
                    Engine::Placed(placed) => placed.halves = Halves::default(),
                }
            }
            case
        })
}

/// Succeeds if the training ends with an error that names the optimizer's requirement.
pub(crate) fn is_refused(case: &Case) -> TestCaseResult {
    let ways_out = ["one_owner", "Strategy::NoShard"];
    match case.by_legs() {
        Err(error) if ways_out.iter().any(|way| error.contains(way)) => Ok(()),
        Err(error) => Err(TestCaseError::fail(error)),
        Ok(_) => Err(TestCaseError::fail("it was not refused")),
    }
}

/// Trainings by compiled steps with an optimizer that accepts only matrices, where nothing is cut.
pub(crate) fn matrices_alone() -> impl Strategy<Value = Case> {
    refused(Engines::Compiled).prop_map(|mut case| {
        case.optimizer = Optimizer::Matrices;
        case.clip = None;
        for leg in &mut case.legs {
            if let Engine::Compiled(compiled) = &mut leg.engine {
                compiled.strategy = Sharding::NoShard;
            }
        }
        case
    })
}

/// Succeeds if the training ends with an error that names the optimizer and a parameter, or is right.
pub(crate) fn is_refused_or_right(case: &Case) -> TestCaseResult {
    match case.by_legs() {
        Err(error) if error.contains("optimizer") && error.contains("parameter") => Ok(()),
        Err(error) => Err(TestCaseError::fail(error)),
        Ok(got) => match case.difference(&got, &case.plainly()) {
            Some(difference) => Err(TestCaseError::fail(difference)),
            None => Ok(()),
        },
    }
}
