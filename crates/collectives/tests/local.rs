//! The contract of engines, on ranks that are threads of one process.

use std::time::Duration;

use burn_fsdp_collectives::{Check, LaunchConfig, launch};
use burn_fsdp_engine_tests::CASES;

#[test]
fn local() {
    for (name, case) in CASES {
        for (ranks, check) in (1..=4).flat_map(|n| [(n, Check::Calls), (n, Check::Agreement)]) {
            let config = LaunchConfig::new(ranks)
                .deadline(Duration::from_secs(30))
                .check(check);
            let result = launch(config, move |world| case(&world));
            assert!(
                result.is_ok(),
                "{name} on {ranks} ranks, {check:?}: {result:?}"
            );
        }
    }
}

#[test]
fn local_as_an_engine_from_outside() {
    burn_fsdp_engine_tests::check(|engine, _| engine);
}
