//! The contract of engines, on ranks that are threads of one process.

#[test]
fn local() {
    burn_fsdp_engine_tests::check(|engine, _| engine);
}
