//! Random trainings of random models, by the eager engine, by compiled steps, by placements, and by these in turn,
//! against plain Burn on one rank.
//!
//! Short by default, 2,000 of each kind with `BURN_FSDP_LONG=1`. `BURN_FSDP_CASES=300` tries so many, `BURN_FSDP_SEED=7`
//! others: what differs is made smaller until nothing can be left out, and printed.

mod batch;
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

/// Returns a number that the caller of the test may choose.
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

fn fuzz(engines: Engines) {
    let seed = chosen("BURN_FSDP_SEED", 0);
    let is_long = std::env::var_os("BURN_FSDP_LONG").is_some();
    let cases_by_default = match is_long {
        true => 2_000,
        false => 24,
    };
    let config = Config {
        cases: chosen("BURN_FSDP_CASES", cases_by_default),
        failure_persistence: None,
        max_shrink_iters: 300,
        ..Config::default()
    };
    let mut bytes = [0; 32];
    bytes[..4].copy_from_slice(&seed.to_le_bytes());
    let rng = TestRng::from_seed(RngAlgorithm::ChaCha, &bytes);
    let mut runner = TestRunner::new_with_rng(config, rng);
    if std::env::var_os("BURN_FSDP_SURVEY").is_some() {
        return survey(engines, &mut runner);
    }
    let histogram = RefCell::new(Histogram::default());
    let found = runner.run(&cases(engines), |case| {
        histogram.borrow_mut().add(&case);
        agrees(&case)
    });
    found.unwrap_or_else(|error| panic!("{engines:?}, seed {seed}: {error:#}"));
    if is_long {
        println!("{engines:?}, seed {seed}: {}", tightness());
        histogram.borrow().print();
    }
}

/// Tries all cases, or the one of the number `BURN_FSDP_ONLY`, whatever comes of them, and prints those that differ in a line each, as they were drawn.
fn survey(engines: Engines, runner: &mut TestRunner) {
    let strategy = cases(engines);
    let only = chosen("BURN_FSDP_ONLY", u32::MAX);
    for number in 0..runner.config().cases {
        let case = strategy.new_tree(runner).expect("a case").current();
        if only != u32::MAX && only != number {
            continue;
        }
        let tried = std::panic::catch_unwind(|| agrees(&case));
        let problem = match tried {
            Ok(Ok(())) => continue,
            Ok(Err(problem)) => problem.to_string(),
            Err(panic) => match panic.downcast::<String>() {
                Ok(text) => *text,
                Err(_) => "a panic".to_owned(),
            },
        };
        println!("{engines:?} {number}: {problem}\n    {case:?}");
    }
    println!("{engines:?}: {}", tightness());
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
