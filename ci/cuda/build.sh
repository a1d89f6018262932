#!/bin/bash
# Builds for CUDA without LLVM: kernels go through NVRTC. What it needs is a Rust toolchain; no GPU, no CUDA toolkit.
#
#   ci/cuda/build.sh probe     the probe of the ways into CubeCL (ci/cuda/probe)
#   ci/cuda/build.sh command   the command burn-fsdp with feature cuda
#
# The program is left in target/cuda, the command stripped, the probe with the names of its functions and its own lines:
# where it hangs, a debugger shows its stacks. CubeCL builds two compilers of kernels; the one over LLVM downloads a
# bundle when it is built, so a stand-in takes its place (ci/cuda/cubecl-llvm). The stand-in changes the lock file.
# So the probe has one of its own, and the command is built from a copy: nothing that git tracks is changed.
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
built=$root/target/cuda
export CARGO_TARGET_DIR=${CARGO_TARGET_DIR:-$built/target}
# Symbols of a newer driver than CUDA 13.0's are not asked for.
export CUDARC_CUDA_VERSION=${CUDARC_CUDA_VERSION:-13000}
export CARGO_PROFILE_RELEASE_STRIP=symbols
jobs=${JOBS:-$(nproc)}
mkdir -p "$built"

case ${1:-} in
probe)
    # Only what links the probe is told so: what it depends on is built once for both.
    cargo rustc --release --locked --jobs "$jobs" --manifest-path "$root/ci/cuda/probe/Cargo.toml" -- \
        -C strip=none -C debuginfo=line-tables-only
    cp "$CARGO_TARGET_DIR/release/probe" "$built/probe"
    echo "$built/probe"
    ;;
command)
    copy=$built/source
    mkdir -p "$copy"
    # What git tracks or would track; times are kept, so that a second build is short.
    git -C "$root" ls-files --cached --others --exclude-standard -z |
        tar -C "$root" --null --ignore-failed-read --warning=no-failed-read --files-from=- -cf - | tar -xf - -C "$copy"
    # NVRTC is a feature of cubecl-cuda that Burn does not pass on.
    sed -i '0,/^\[dependencies\]$/s//[dependencies]\ncubecl-cuda = { version = "=0.11.3", default-features = false, features = ["cpp"] }/' "$copy/crates/cli/Cargo.toml"
    sed -i '0,/^members = .*/s//&\nexclude = ["ci"]/' "$copy/Cargo.toml"
    printf '\n[patch.crates-io]\ncubecl-llvm = { path = "ci/cuda/cubecl-llvm" }\n' >>"$copy/Cargo.toml"
    cargo build --release --jobs "$jobs" --manifest-path "$copy/crates/cli/Cargo.toml" --features cuda
    cp "$CARGO_TARGET_DIR/release/burn-fsdp" "$built/burn-fsdp"
    echo "$built/burn-fsdp"
    ;;
*)
    sed -n '2,/^set/s/^# \{0,1\}//p' "$0" >&2
    exit 64
    ;;
esac
