#!/usr/bin/env bash
# Runs the tests of parity, offload and copies on Burn's wgpu, on Mesa's software device unless the machine has a better
# one. Installs the driver if it runs as root, and otherwise reports what it skipped.
#
#     ci/gpu.sh [TEST..]          FEATURES: the features of the build
set -euo pipefail
cd "$(dirname "$0")/.."

drivers() {
    ls /usr/share/vulkan/icd.d/*.json /etc/vulkan/icd.d/*.json 2>/dev/null
}

if [ -z "$(drivers)" ] && [ "$(id -u)" = 0 ]; then
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq mesa-vulkan-drivers >/dev/null
fi
if [ -z "$(drivers)" ]; then
    echo "skipped: there is no driver for Vulkan, and installing one needs root"
    exit 0
fi

# Drivers look for a window system in this folder.
XDG_RUNTIME_DIR="${XDG_RUNTIME_DIR:-$(mktemp -d)}"
export XDG_RUNTIME_DIR BURN_FSDP_TEST_DEVICE="${BURN_FSDP_TEST_DEVICE:-wgpu}"
if [ $# = 0 ]; then
    set -- parity offload staging on_device devices:: compiled_steps
fi
cargo test --locked --release --features "${FEATURES:-burn-fsdp-cli/wgpu,burn-fsdp-shard-tests/wgpu}" --test eager --test extras --test devices \
    --test supervised --test cli -- "$@"
