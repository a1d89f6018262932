#!/usr/bin/env bash
# The long forms of the tests of files and runs: kills in saves, arguments, corruption, fuzzing, and faults
# by system call. Takes some tens of minutes; for a nightly run. Prints the counts of each.
set -eu
cd "$(dirname "$0")/.."
target=${CARGO_TARGET_DIR:-target}
# Selected from the root and not by package: the features, and so the dependencies, are then those of all tests.
BURN_FSDP_LONG=1 cargo test --locked --release --test cli -- --nocapture --test-threads 2 \
    kill:: arguments:: corruption::
FUZZ_CASES=${FUZZ_CASES:-20000} cargo test --locked --release --test fuzz_corpus
ci/faults-by-system-call.sh "$target/release/burn-fsdp" 12
