#!/usr/bin/env bash
# The long forms of the tests of files and runs: kills in saves, arguments, corruption, fuzzing, and faults
# by system call. Takes some tens of minutes; for a nightly run. Prints the counts of each.
set -eu
cd "$(dirname "$0")/.."
BURN_FSDP_LONG=1 cargo test -p burn-fsdp-cli --test cli -- --nocapture --test-threads 2 \
    kill:: arguments:: corruption::
FUZZ_CASES=${FUZZ_CASES:-20000} cargo test -p burn-fsdp-checkpoint --test fuzz_corpus
cargo build -p burn-fsdp-cli
ci/faults-by-system-call.sh target/debug/burn-fsdp 12
