//! Random training runs of random models, by the eager engine, by compiled steps, by placements, and by these in turn,
//! compared with plain Burn on one rank.
//!
//! Short by default, 2,000 of each kind with `BURN_FSDP_LONG=1`. `BURN_FSDP_CASES=300` sets the number,
//! `BURN_FSDP_SEED=7` chooses others. A differing case is shrunk until nothing can be removed, and printed.

mod arrival;
mod base;
mod batch;
#[path = "../halves/by_hand.rs"]
mod by_hand;
mod case;
mod compiled;
mod eager;
mod histogram;
mod layer;
mod legs;
mod model;
mod optimizer;
mod outcome;
mod plain;
mod precision;
mod refusals;
#[path = "../../../shard/tests/extras/rounding.rs"]
mod rounding;
mod run;
mod saving;
mod training;
mod values;
mod wild;

use std::cell::RefCell;

use proptest::strategy::{Strategy, ValueTree};
use proptest::test_runner::{
    Config, RngAlgorithm, TestCaseError, TestCaseResult, TestRng, TestRunner,
};

use case::{Case, Engines, cases};
use histogram::Histogram;
use outcome::tightness;
use refusals::{is_refused, is_refused_or_right, matrices_alone, refused};

/// Returns a number that the user of the test may set.
fn chosen(name: &str, default: u32) -> u32 {
    let number = std::env::var(name).ok().and_then(|text| text.parse().ok());
    number.unwrap_or(default)
}

fn agrees(case: &Case) -> TestCaseResult {
    let want = case.plainly();
    let got = case.by_legs().map_err(TestCaseError::fail)?;
    match case.difference(&got, &want) {
        Some(difference) => Err(TestCaseError::fail(difference)),
        None => Ok(()),
    }
}

/// Returns a runner for the chosen seed with `cases` cases, or with the chosen number.
fn runner(cases: u32) -> TestRunner {
    runner_of(seed(), cases)
}

fn runner_of(seed: u32, cases: u32) -> TestRunner {
    let config = Config {
        cases: chosen("BURN_FSDP_CASES", cases),
        failure_persistence: None,
        max_shrink_iters: 300,
        ..Config::default()
    };
    let mut bytes = [0; 32];
    bytes[..4].copy_from_slice(&seed.to_le_bytes());
    let rng = TestRng::from_seed(RngAlgorithm::ChaCha, &bytes);
    TestRunner::new_with_rng(config, rng)
}

fn seed() -> u32 {
    chosen("BURN_FSDP_SEED", 0)
}

fn is_long() -> bool {
    std::env::var_os("BURN_FSDP_LONG").is_some()
}

fn fuzz(engines: Engines) {
    let mut runner = runner(if is_long() { 2_000 } else { 24 });
    if std::env::var_os("BURN_FSDP_SURVEY").is_some() {
        return survey(engines, &mut runner);
    }
    let histogram = RefCell::new(Histogram::default());
    let found = runner.run(&cases(engines), |case| {
        histogram.borrow_mut().add(&case);
        agrees(&case)
    });
    found.unwrap_or_else(|error| panic!("{engines:?}, seed {}: {error:#}", seed()));
    if is_long() {
        println!("{engines:?}, seed {}: {}", seed(), tightness());
        histogram.borrow().print();
    }
}

/// Returns the problem with a case, if there is one.
fn problem(case: &Case) -> Option<String> {
    match std::panic::catch_unwind(|| agrees(case)) {
        Ok(agrees) => agrees.err().map(|error| error.to_string()),
        Err(panic) => Some(match panic.downcast::<String>() {
            Ok(text) => *text,
            Err(_) => "a panic".to_owned(),
        }),
    }
}

/// Tries all cases whatever their results, and prints those that differ as they were drawn, one per line. If
/// `BURN_FSDP_ONLY` is set, only the case of that number is tried, and made smaller.
fn survey(engines: Engines, runner: &mut TestRunner) {
    let strategy = cases(engines);
    let only = chosen("BURN_FSDP_ONLY", u32::MAX);
    let mut histogram = Histogram::default();
    for number in 0..runner.config().cases {
        let tree = strategy.new_tree(runner).expect("a case");
        let is_only = only == number;
        if only != u32::MAX && !is_only {
            continue;
        }
        let case = tree.current();
        histogram.add(&case);
        if let Some(problem) = problem(&case) {
            println!("{engines:?} {number}: {problem}\n    {case:?}");
            if is_only {
                shrink(tree, &problem);
            }
        }
    }
    println!("{engines:?}: {}", tightness());
    histogram.print();
}

/// Makes a case smaller as long as the difference stays the same.
fn shrink(mut tree: impl ValueTree<Value = Case>, first: &str) {
    let kind = |problem: &str| problem.split([':', '[']).take(2).collect::<String>();
    let mut smallest = (first.to_owned(), tree.current());
    let mut moved = tree.simplify();
    for _ in 0..300 {
        if !moved {
            break;
        }
        let case = tree.current();
        moved = match problem(&case) {
            Some(problem) if kind(&problem) == kind(first) => {
                smallest = (problem, case);
                tree.simplify()
            }
            _ => tree.complicate(),
        };
    }
    println!("smallest: {}\n    {:?}", smallest.0, smallest.1);
}

#[test]
fn random_trainings_of_the_eager_engine() {
    fuzz(Engines::Eager);
}

#[test]
fn random_trainings_of_compiled_steps() {
    fuzz(Engines::Compiled);
}

#[test]
fn random_trainings_by_placements() {
    fuzz(Engines::Placed);
}

#[test]
fn random_trainings_that_move_between_the_engines() {
    fuzz(Engines::All);
}

/// Cases in which a tensor with another memory order was given to a collective, and its seal was taken for its copy's.
#[test]
fn past_failures_stay_fixed() {
    for (engines, seed, number) in [(Engines::Placed, 401, 0), (Engines::Placed, 401, 23)] {
        let (strategy, runner) = (cases(engines), &mut runner_of(seed, 1));
        let trees = (0..=number).map(|_| strategy.new_tree(runner).expect("a case"));
        let case = trees.last().expect("a case").current();
        let found = agrees(&case);
        found.unwrap_or_else(|error| panic!("{engines:?}, seed {seed}, {number}: {error}"));
    }
}

#[test]
fn random_optimizers_of_whole_tensors_are_refused_on_shards() {
    for engines in [Engines::Eager, Engines::Compiled] {
        let mut runner = runner(if is_long() { 300 } else { 8 });
        let found = runner.run(&refused(engines), |case| is_refused(&case));
        found.unwrap_or_else(|error| panic!("{engines:?}, seed {}: {error:#}", seed()));
    }
    let mut runner = runner(if is_long() { 300 } else { 8 });
    let found = runner.run(&matrices_alone(), |case| is_refused_or_right(&case));
    found.unwrap_or_else(|error| panic!("matrices alone, seed {}: {error:#}", seed()));
}
