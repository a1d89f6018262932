//! The engine satisfies the contract of all engines.

use shelf_engine::{ShelfEngine, Shelves};

#[test]
fn the_engine_keeps_the_contract() {
    let shelves = Shelves::default();
    burn_fsdp_engine_tests::check(move |engine, group| ShelfEngine::end(engine, group, &shelves));
}
