#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let _ = burn_fsdp_checkpoint::fuzzing::step(data);
});
