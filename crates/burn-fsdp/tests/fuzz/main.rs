//! Random trainings of random models, by the eager engine, by compiled steps, by placements, and by these in turn,
//! against plain Burn on one rank.
//!
//! Short by default, 2,000 of each kind with `BURN_FSDP_LONG=1`. `BURN_FSDP_CASES=300` tries so many, `BURN_FSDP_SEED=7`
//! others: what differs is made smaller until nothing can be left out, and printed.

mod case;
mod model;
mod training;

use proptest::test_runner::{
    Config, RngAlgorithm, TestCaseError, TestCaseResult, TestRng, TestRunner,
};

use case::{Case, Engines, cases};

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
    let cases_by_default = match std::env::var_os("BURN_FSDP_LONG") {
        Some(_) => 2_000,
        None => 24,
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
    let found = runner.run(&cases(engines), |case| agrees(&case));
    found.unwrap_or_else(|error| panic!("{engines:?}, seed {seed}: {error:#}"));
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
