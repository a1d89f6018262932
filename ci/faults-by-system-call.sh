#!/usr/bin/env bash
# Kills a training or makes it fail at its system calls, one call at a time. Checks after each that every visible
# step is complete, and that the resumed run ends with the losses of an undisturbed run.
#
#   ci/faults-by-system-call.sh [BINARY] [PLACES]
#
# BINARY is built if it is not given. PLACES (default 6) is the number of calls of each kind that are hit, spread
# over the run. Needs strace. Without it, the script reports that it skipped the tests, and succeeds.
set -u
cd "$(dirname "$0")/.." || exit 1
places=${2:-6}

if ! command -v strace >/dev/null && [ "$(id -u)" = 0 ]; then
    apt-get install -y strace >/dev/null 2>&1
fi
if ! strace -o /dev/null true 2>/dev/null; then
    echo "skipped: faults by system call (no strace, or it may not trace here)"
    exit 0
fi
binary=${1:-}
if [ -z "$binary" ]; then
    cargo build --quiet -p burn-fsdp-cli || exit 1
    binary=target/debug/burn-fsdp
fi
binary=$(realpath "$binary") || exit 1
work=$(mktemp -d) || exit 1
trap 'rm -rf "$work"' EXIT
cd "$work" || exit 1

model=(train --synthetic --layers 1 --dim 16 --heads 2 --vocab 256 --seq 16 --batch 4 --ranks 2 --json
    --warmup 0 --steps 12 --checkpoint-dir steps --save-every 2 --keep-last 2 --resume
    --metrics metrics.jsonl)
# The documented exit codes of the command, 137 for a kill, and 127 for a loader that failed.
documented=" 0 1 2 3 137 127 "
failures=0
runs=0

losses() { sed -n 's/.*"step":\([0-9]*\),"loss":\([^,]*\),.*/\1 \2/p' metrics.jsonl; }
fail() { echo "FAILED: $1"; failures=$((failures + 1)); }

# Checks the conditions that must hold after every disturbed run, whatever its result.
check() {
    local what=$1 step
    for step in steps/step-*; do
        [ -e "$step" ] || continue
        "$binary" inspect "$step" >/dev/null 2>inspect.log || fail "$what: $(tail -1 inspect.log)"
    done
    "$binary" "${model[@]}" >/dev/null 2>resume.log || fail "$what: resuming: $(tail -1 resume.log)"
    losses >got
    cmp -s got want || fail "$what: other losses ($(wc -l <got) lines instead of $(wc -l <want))"
    [ -z "$(find steps -maxdepth 1 -name '.step-*')" ] || fail "$what: something is left over"
}

strike() {
    local what=$1 code
    shift
    rm -rf steps metrics.jsonl loss.svg
    strace -f -qq -o /dev/null "$@" "$binary" "${model[@]}" >/dev/null 2>run.log
    code=$?
    case "$documented" in *" $code "*) ;; *) fail "$what: exit code $code: $(tail -1 run.log)" ;; esac
    grep -q panicked run.log && fail "$what: $(grep -m1 panicked run.log)"
    check "$what"
    runs=$((runs + 1))
}

"$binary" "${model[@]}" >/dev/null 2>run.log || { cat run.log; exit 1; }
losses >want
rm -rf steps metrics.jsonl
calls="mkdir openat write fsync fdatasync rename unlink unlinkat rmdir flock ftruncate statx getdents64 close"
strace -f -qq -c -U calls,name -o counts "$binary" "${model[@]}" >/dev/null 2>&1
for call in $calls; do
    total=$(awk -v call="$call" '$2 == call { print $1 }' counts)
    [ -n "$total" ] || continue
    for ((place = 1; place <= places; place++)); do
        at=$(((total * place + places - 1) / places))
        strike "kill at $call $at" -e "trace=$call" -e "inject=$call:signal=SIGKILL:when=$at"
        [ "$call" = close ] && continue
        strike "EIO from $call $at" -e "trace=$call" -e "inject=$call:error=EIO:when=$at"
        strike "ENOSPC from $call $at" -e "trace=$call" -e "inject=$call:error=ENOSPC:when=$at"
    done
done

# A disk that takes longer than ranks wait for each other must not end a training.
rm -rf steps metrics.jsonl
strace -f -qq -o /dev/null -e trace=fsync -e inject=fsync:delay_enter=3000000:when=3 \
    "$binary" "${model[@]}" --deadline 2 >slow.json 2>run.log || fail "a slow disk: $(tail -1 run.log)"
losses >got
cmp -s got want || fail "a slow disk: other losses"
runs=$((runs + 1))

# A file system that cannot sync folders, and one without locks.
for odd in fsync:error=EINVAL flock:error=ENOSYS flock:error=EOPNOTSUPP; do
    rm -rf steps metrics.jsonl
    call=${odd%%:*}
    filter=()
    [ "$call" = fsync ] && filter=(-P "$work/steps" -P "$work/" -P steps)
    strace -f -qq -o /dev/null "${filter[@]}" -e "trace=$call" -e "inject=$odd" \
        "$binary" "${model[@]}" >/dev/null 2>run.log || fail "$odd: $(tail -1 run.log)"
    check "$odd"
    runs=$((runs + 1))
done

# A limit on the size of files: the write fails, and nothing is damaged.
rm -rf steps metrics.jsonl
(ulimit -f 16; "$binary" "${model[@]}" >/dev/null 2>run.log)
code=$?
case "$documented" in *" $code "*) ;; *) fail "ulimit -f: exit code $code" ;; esac
check "ulimit -f"
runs=$((runs + 1))

echo "faults by system call: $runs runs, $failures failures"
[ "$failures" = 0 ]
