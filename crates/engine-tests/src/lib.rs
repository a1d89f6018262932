//! The contract of burn-fsdp's engines, as tests that run on any engine.
//!
//! An engine that meets the contract passes [`check`], which runs all [`CASES`] on ranks that are threads. To test an
//! engine between processes, run the cases in the body of a launch.
//!
//! ```
//! // Create your own engine here, from the launch's engine.
//! burn_fsdp_engine_tests::check(|engine, _| engine);
//! ```

mod cases;

use std::sync::Arc;
use std::time::Duration;

use burn_fsdp_collectives::engine::{Engine, Subgroup};
use burn_fsdp_collectives::{Check, LaunchConfig, launch};

pub use cases::{CASES, Case};

/// Runs every case on groups of 1 to 4 ranks on an engine, with and without the comparison of bytes. Each rank calls
/// `make`, as in [`ProcessGroup::on_engine`](burn_fsdp_collectives::ProcessGroup::on_engine).
///
/// # Panics
///
/// If the engine violates the contract. The message names the case, the number of ranks and what is wrong.
#[track_caller]
pub fn check(make: impl Fn(Box<dyn Engine>, &Subgroup) -> Box<dyn Engine> + Send + Sync + 'static) {
    let make = Arc::new(make);
    for (name, case) in CASES {
        for (ranks, check) in (1..=4).flat_map(|n| [(n, Check::Calls), (n, Check::Agreement)]) {
            let config = LaunchConfig::new(ranks)
                .deadline(Duration::from_secs(30))
                .check(check);
            let make = make.clone();
            let result = launch(config, move |world| {
                case(&world.on_engine("checked", |engine, group| make(engine, group))?)
            });
            assert!(
                result.is_ok(),
                "{name} on {ranks} ranks, {check:?}: {result:?}"
            );
        }
    }
}
