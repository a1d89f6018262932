#!/usr/bin/env bash
# Compares the instructions of one train step of the command with ci/instructions.txt. On machines that others use,
# times cannot be asserted, but numbers of instructions can. Fails if a step takes a fifth more, and prints a remark if
# it takes a tenth less.
#
#     ci/instructions.sh BURN_FSDP [write]
#
# Valgrind counts them. It does not support AVX-512, so the instructions are those for AVX2 on every x86-64. With one
# core, waiting threads do not count.
set -euo pipefail
cd "$(dirname "$0")/.."

program=$1
known=ci/instructions.txt
if [ "$(uname -m)" != x86_64 ]; then
    echo "skipped: the numbers are those of x86-64"
    exit 0
fi
if ! command -v valgrind >/dev/null && [ "$(id -u)" = 0 ]; then
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq valgrind >/dev/null
fi
if ! command -v valgrind >/dev/null; then
    echo "skipped: there is no valgrind, and installing it needs root"
    exit 0
fi

if ! valgrind --tool=none "$program" --version >/dev/null 2>&1; then
    echo "skipped: this valgrind does not run the program"
    exit 0
fi

# Prints the instructions of a whole run with this many steps.
run() {
    local steps=$1
    shift
    local log
    log=$(mktemp)
    taskset -c 0 valgrind --tool=callgrind --callgrind-out-file=/dev/null "$program" train --ranks 1 --layers 2 --dim 64 \
        --heads 2 --vocab 256 --seq 32 --batch 4 --synthetic --warmup 0 --steps "$steps" "$@" >"$log" 2>&1 ||
        { cat "$log" >&2; exit 1; }
    sed -n 's/.*Collected : \([0-9]*\)$/\1/p' "$log"
    rm -f "$log"
}

failed=0
measured=()
while read -r name flags; do
    # The first step traces and allocates. The difference between two runs contains only later steps.
    # shellcheck disable=SC2086
    few=$(run 2 $flags)
    # shellcheck disable=SC2086
    many=$(run 6 $flags)
    count=$(((many - few) / 4))
    measured+=("$name $count")
    expected=$(sed -n "s/^$name //p" "$known" 2>/dev/null || true)
    if [ "${2:-}" = write ]; then
        echo "$name: $count instructions a step"
    elif [ -z "$expected" ]; then
        echo "$name: $count instructions a step, and $known has none"
        failed=1
    else
        echo "$name: $count instructions a step, $((100 * count / expected)) % of those known"
        if [ $((5 * count)) -gt $((6 * expected)) ]; then
            echo "  that is a fifth more: find out why, or run ci/instructions.sh BURN_FSDP write"
            failed=1
        elif [ $((10 * count)) -lt $((9 * expected)) ]; then
            echo "  that is a tenth less: keep it by ci/instructions.sh BURN_FSDP write"
        fi
    fi
done <<'EOF'
eager
compiled --compile
compiled-bf16 --compile --precision bf16
EOF
if [ "${2:-}" = write ]; then
    printf '%s\n' "${measured[@]}" >"$known"
fi
exit $failed
