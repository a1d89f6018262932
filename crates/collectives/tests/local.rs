//! The contract of engines, on ranks that are threads of one process.

mod contract;

use std::time::Duration;

use burn_fsdp_collectives::{LaunchConfig, launch};

#[test]
fn local() {
    for (name, case) in contract::CASES {
        for ranks in 1..=4 {
            let config = LaunchConfig::new(ranks).deadline(Duration::from_secs(30));
            let result = launch(config, move |world| case(&world));
            assert!(result.is_ok(), "{name} on {ranks} ranks: {result:?}");
        }
    }
}
