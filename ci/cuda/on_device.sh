#!/bin/bash
# Runs the probe on a machine with a CUDA device and neither toolchain nor network:
#
#   on_device.sh PROBE [SECTION...]     PROBE: the program, or an archive bin.tar.xz that holds it
#
# Each section is a process with a time limit; all together take less than 240 s (SECONDS_IN_ALL). The lines of results
# come last, and are left in $OUT/probe.txt with everything else that was printed.
set -u
program=$1
shift
sections=${*:-products events shared nccl graph host memory}
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

limit_of() {
    case $1 in
    products) echo 90 ;;
    shared) echo 70 ;;
    *) echo 30 ;;
    esac
}

begin=$SECONDS
for section in $sections; do
    left=$((all - (SECONDS - begin)))
    limit=$(limit_of "$section")
    [ "$left" -lt "$limit" ] && limit=$left
    if [ "$limit" -lt 5 ]; then
        echo "RESULT $section SKIPPED: no time left" | tee -a "$log"
        continue
    fi
    started=$SECONDS
    timeout --kill-after=3 "$limit" "$program" "$section" >"$work/$section.txt" 2>&1
    code=$?
    echo "== $section: exit $code after $((SECONDS - started)) s (at $((SECONDS - begin)))" | tee -a "$log"
    grep -v '^RESULT' "$work/$section.txt" | cut -c1-400 | tail -25
    cat "$work/$section.txt" >>"$log"
    [ "$code" -ne 0 ] && echo "RESULT $section ended with code $code (124: out of time)" >>"$log"
done
echo "== results"
grep -a '^RESULT' "$log" | cut -c1-420
