#!/usr/bin/env bash
# Runs the tests of ranks that are processes, built and started by MPICH instead of Open MPI.
set -euo pipefail
cd "$(dirname "$0")/.."

if ! command -v mpicc.mpich >/dev/null; then
    echo "skipped: there is no mpicc.mpich (Debian: libmpich-dev mpich)"
    exit 0
fi
export CARGO_TARGET_DIR="${CARGO_TARGET_DIR:-target}"
# The build script of the bindings detects MPI when it runs, and does not run again for another MPI.
again() { cargo clean --release --quiet -p mpi-sys; }
again
trap again EXIT

MPICC=mpicc.mpich BURN_FSDP_MPIRUN=mpirun.mpich \
    cargo test --locked --release --features burn-fsdp-cli/mpi --test mpi --test cli --test eager --test spmd -- processes
