#!/usr/bin/env bash
# Runs the long variants of the tests of files and runs: kills during saves, arguments, corruption, fuzzing, and faults
# by system call. Takes tens of minutes, for a nightly run. Prints the counts of each.
set -eu
cd "$(dirname "$0")/.."
target=${CARGO_TARGET_DIR:-target}
# Selected from the root instead of by package, so features and dependencies are the same as for all tests.
BURN_FSDP_LONG=1 cargo test --locked --release --test cli -- --nocapture --test-threads 2 \
    kill:: arguments:: corruption::
FUZZ_CASES=${FUZZ_CASES:-20000} cargo test --locked --release --test fuzz_corpus
ci/faults-by-system-call.sh "$target/release/burn-fsdp" 12
