#!/bin/bash
# Runs the probe on a machine with a CUDA device and neither toolchain nor network:
#
#   on_device.sh PROBE SECTION...     PROBE: the program, or an archive bin.tar.xz that holds it
#
# Sections: products events shared nccl graph host memory. Each is a process with a time limit; all together take less
# than 240 s (SECONDS_IN_ALL). Of one that runs out of time the stacks of its threads are written first. The lines of
# results come last, and are left in $OUT/probe.txt with everything else that was printed.
set -u
if [ $# -lt 2 ]; then
    sed -n '2,/^set/s/^# \{0,1\}//p' "$0" >&2
    exit 64
fi
program=$1
shift
sections=$*
out=${OUT:-.}
all=${SECONDS_IN_ALL:-235}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
log=$out/probe.txt
: >"$log"

case $program in
*.tar.xz) tar -xf "$program" -C "$work" && program=$work/probe ;;
esac

# At run time NVRTC wants CUDA's headers, and the loader its libraries, cuBLASLt's and NCCL's. A library is found by
# its plain name only: NCCL as packages bring it is libnccl.so.2, which nobody asks for.
export CUDA_PATH=${CUDA_PATH:-/usr/local/cuda}
mkdir -p "$work/lib"
packages=$(python3 -c 'import os, nvidia; print("\n".join(nvidia.__path__))' 2>/dev/null)
for name in nccl cublasLt nvrtc; do
    found=
    for file in "$CUDA_PATH"/lib64/lib$name.so $(for p in $packages; do echo "$p"/*/lib/lib$name.so.*; done) \
        /usr/lib/x86_64-linux-gnu/lib$name.so*; do
        [ -e "$file" ] && found=$file && break
    done
    echo "lib$name: ${found:-not found}" | tee -a "$log"
    [ -n "$found" ] && ln -sf "$found" "$work/lib/lib$name.so"
done
folders=$(for p in $packages; do ls -d "$p"/*/lib; done 2>/dev/null | tr '\n' ':')
export LD_LIBRARY_PATH=$work/lib:$CUDA_PATH/lib64:$folders${LD_LIBRARY_PATH:-}
{
    nvidia-smi --query-gpu=name,driver_version,memory.total,memory.used,clocks.sm --format=csv,noheader 2>&1
    ls -d "$CUDA_PATH/include" 2>&1
} | tee -a "$log"

# NCCL says what it does; not on the probe's own output.
export NCCL_DEBUG=${NCCL_DEBUG:-INFO} NCCL_DEBUG_FILE=${NCCL_DEBUG_FILE:-$work/nccl-debug.txt}

limit_of() {
    case $1 in
    products) echo 90 ;;
    shared) echo 70 ;;
    events | nccl) echo 60 ;;
    *) echo 30 ;;
    esac
}

# What the threads of a process are doing: states and used time, how busy the device is, and stacks where there is a
# debugger. Takes 20 s at most.
stacks() {
    local pid=$1 task debugger file
    echo "== threads of $pid: name, state, ticks in the program, ticks in the kernel, waiting in"
    for task in /proc/"$pid"/task/*; do
        echo "$(cat "$task/comm") $(sed 's/.*) //' "$task/stat" | cut -d' ' -f1,12,13) $(cat "$task/wchan" 2>/dev/null)"
    done
    timeout 5 nvidia-smi --query-gpu=utilization.gpu,utilization.memory,clocks.sm,power.draw --format=csv 2>&1
    for debugger in gdb cuda-gdb; do
        file=$(command -v $debugger || ls "$CUDA_PATH/bin/$debugger" 2>/dev/null) || continue
        echo "== $file"
        timeout --kill-after=1 14 "$file" -nx -p "$pid" -batch -ex "set pagination off" -ex "set width 250" \
            -ex "thread apply all bt 40" </dev/null 2>&1 | grep -av '^\[New\|^Reading symbols\|^warning:'
        return
    done
    echo "no debugger on this machine (gdb, cuda-gdb)"
}

begin=$SECONDS
for section in $sections; do
    left=$((all - (SECONDS - begin) - 20))
    limit=$(limit_of "$section")
    [ "$left" -lt "$limit" ] && limit=$left
    if [ "$limit" -lt 5 ]; then
        echo "RESULT $section SKIPPED: no time left" | tee -a "$log"
        continue
    fi
    started=$SECONDS
    printed=$work/$section.txt
    "$program" "$section" >"$printed" 2>&1 &
    pid=$!
    while kill -0 "$pid" 2>/dev/null && [ $((SECONDS - started)) -lt "$limit" ]; do sleep 0.1; done
    late=
    if kill -0 "$pid" 2>/dev/null; then
        late=yes
        stacks "$pid" >"$work/stacks.txt"
        kill "$pid" 2>/dev/null
        for _ in $(seq 30); do kill -0 "$pid" 2>/dev/null && sleep 0.1; done
        kill -9 "$pid" 2>/dev/null
    fi
    wait "$pid" 2>/dev/null
    code=$?
    echo "== $section: exit $code after $((SECONDS - started)) s (at $((SECONDS - begin)))" | tee -a "$log"
    grep -av '^RESULT' "$printed" | cut -c1-400 | tail -40
    cat "$printed" >>"$log"
    if [ -n "$late" ]; then
        head -c 60000 "$work/stacks.txt" >>"$log"
        # What is shown here is cut short; the log has all of it.
        cut -c1-180 "$work/stacks.txt" | head -60
        echo "RESULT $section ran out of its $limit s" >>"$log"
    elif [ "$code" -ne 0 ]; then
        echo "RESULT $section ended with code $code" >>"$log"
    fi
    if [ -s "$NCCL_DEBUG_FILE" ]; then
        echo "== what NCCL said" >>"$log"
        cat "$NCCL_DEBUG_FILE" >>"$log"
        rm -f "$NCCL_DEBUG_FILE"
    fi
done
echo "== results"
grep -a '^RESULT' "$log" | cut -c1-420
