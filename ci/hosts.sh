#!/usr/bin/env bash
# Simulates several hosts on one machine: network namespaces with separate addresses, joined by a bridge, with ranks
# under Open MPI's mpirun on each. They train, and must agree with threads of one process. One host is cut off in the
# middle of a step, and links are made slow and lossy. Leaves nothing behind, even on failure.
#
# Needs root, iproute2, Open MPI and a `burn-fsdp` with the feature `mpi`:
#     ci/hosts.sh target/release/burn-fsdp [HOSTS..]          CUTS: number of times a host is cut off
set -euo pipefail

program=$(realpath "${1:?the burn-fsdp program, built with the feature mpi}")
shift
sizes=("${@:-2 3}")
# shellcheck disable=SC2128,SC2206
sizes=(${sizes[*]})

if [ "$(id -u)" != 0 ] || ! command -v ip >/dev/null || ! command -v mpirun >/dev/null; then
    echo "skipped: hosts need root, ip (iproute2) and mpirun"
    exit 0
fi
if ! ip netns add bf-try 2>/dev/null; then
    echo "skipped: this machine allows no network namespaces"
    exit 0
fi
ip netns del bf-try

work=$(mktemp -d)
down() {
    local space
    for space in $(ip netns list | awk '{print $1}' | grep -E '^bf-(switch|host[0-9]+)$'); do
        ip netns pids "$space" | xargs -r kill -KILL 2>/dev/null || true
        ip netns del "$space"
    done
}
trap 'down; rm -rf "$work"' EXIT

# Creates hosts 0 to N-1 with the addresses 10.77.0.1 to 10.77.0.N.
up() {
    local hosts=$1 i
    ip netns add bf-switch
    ip -n bf-switch link add bridge type bridge
    ip -n bf-switch link set bridge up
    for ((i = 0; i < hosts; i++)); do
        ip netns add "bf-host$i"
        ip link add "port$i" netns bf-switch type veth peer name eth0 netns "bf-host$i"
        ip -n bf-switch link set "port$i" master bridge up
        ip -n "bf-host$i" addr add "10.77.0.$((i + 1))/24" dev eth0
        ip -n "bf-host$i" link set eth0 up
        ip -n "bf-host$i" link set lo up
    done
}

# Replaces ssh. It is called with options, a host and a command.
cat >"$work/agent" <<'AGENT'
#!/bin/sh
while [ "${1#-}" != "$1" ]; do shift; done
i=$((${1##*.} - 1))
shift
exec ip netns exec "bf-host$i" unshare --uts sh -c "hostname host$i; $*"
AGENT
chmod +x "$work/agent"

# across HOSTS SLOTS ARGUMENTS..: trains with SLOTS ranks on each host.
across() {
    local hosts=$1 slots=$2 list="" i
    shift 2
    for ((i = 1; i <= hosts; i++)); do list="$list,10.77.0.$i:$slots"; done
    (cd "$work" && ip netns exec bf-host0 unshare --uts sh -c 'hostname host0; exec "$@"' host0 \
        mpirun --allow-run-as-root --mca plm_rsh_agent "$work/agent" --mca orte_keep_fqdn_hostnames 1 \
        --bind-to none --map-by slot --mca mpi_yield_when_idle 1 --mca btl tcp,self --mca btl_tcp_if_include 10.77.0.0/24 \
        --mca oob_tcp_if_include 10.77.0.0/24 -H "${list#,}" -n $((hosts * slots)) "$program" train "$@")
}

# make_slow HOSTS LINK: limits the rate of each host, and drops one packet in a hundred if LINK contains "loss".
make_slow() {
    local i
    for ((i = 0; i < $1; i++)); do
        ip netns exec "bf-host$i" tc qdisc replace dev eth0 root tbf rate 1gbit burst 128kb latency 50ms 2>/dev/null || return 1
        case $2 in *loss*)
            ip netns exec "bf-host$i" nft -f - 2>/dev/null <<<"table inet loss {
                chain in { type filter hook input priority 0; iifname eth0 numgen random mod 100 < 1 drop; }
            }" || return 1 ;;
        esac
    done
}

model=(--layers 2 --dim 64 --heads 2 --seq 64 --batch 12 --synthetic --warmup 1)
larger=(--layers 4 --dim 256 --heads 4 --seq 128 --batch 12 --synthetic --warmup 1)
losses() { tail -n 1 "$1" | grep -o '"losses":[^]]*]' || echo "no losses in $1"; }
field() { tail -n 1 "$1" | grep -o "\"$2\":[0-9.]*" | head -1; }

# Cuts off the last host in the middle of a run. All ranks must end, and report what was missing.
cut_off() {
    local hosts=$1 run began
    rm -f "$work/lines"
    across "$hosts" 1 "${model[@]}" --steps 1000000 --deadline 3 --metrics "$work/lines" --json \
        >"$work/cut.json" 2>"$work/cut.err" &
    run=$!
    for _ in $(seq 600); do
        [ -s "$work/lines" ] && [ "$(wc -l <"$work/lines")" -ge 3 ] && break
        sleep 0.1
    done
    began=$SECONDS
    ip -n bf-switch link set "port$((hosts - 1))" down
    # The ranks end by themselves. The launcher may wait longer.
    while pgrep -f "^$program train .*--metrics $work/lines" >/dev/null; do
        sleep 0.2
        if [ $((SECONDS - began)) -gt 60 ]; then
            echo "failed: ranks are alive 60 s after the cut"
            exit 1
        fi
    done
    echo "all ranks have ended $((SECONDS - began)) s after the cut"
    for _ in $(seq 100); do kill -0 "$run" 2>/dev/null || break; sleep 0.1; done
    kill -KILL "$run" 2>/dev/null || true
    wait "$run" 2>/dev/null || true
    grep -m 1 -o "error: rank [0-9]* failed.*(operation [0-9]* of group" "$work/cut.err" ||
        { echo "failed: nobody says what was missing"; cat "$work/cut.err"; exit 1; }
}

for hosts in "${sizes[@]}"; do
    echo "== $hosts hosts"
    down
    up "$hosts"
    for flags in "" "--strategy shard-grad-op --prefetch 2" "--compile"; do
        # shellcheck disable=SC2086
        across "$hosts" 1 "${model[@]}" --steps 29 $flags --json --checkpoint-dir "$work/hosts" --overwrite >"$work/hosts.json" 2>"$work/hosts.err" ||
            { cat "$work/hosts.err"; exit 1; }
        # shellcheck disable=SC2086
        (cd "$work" && "$program" train "${model[@]}" --steps 29 $flags --ranks "$hosts" --json --checkpoint-dir "$work/threads" --overwrite \
            >"$work/threads.json" 2>/dev/null)
        [ "$(losses "$work/hosts.json")" = "$(losses "$work/threads.json")" ] ||
            { echo "failed: other losses on $hosts hosts than on threads ($flags)"; exit 1; }
        for file in "$work"/threads/step-000030/*; do
            cmp "$file" "$work/hosts/step-000030/$(basename "$file")" || { echo "failed: other files ($flags)"; exit 1; }
        done
        echo "30 steps ${flags:-of full sharding}: losses and saved files equal those of threads, bit for bit;" \
            "$(field "$work/hosts.json" tokens_per_s)"
    done
    across "$hosts" 2 "${model[@]}" --steps 5 --strategy hybrid-shard --replicate-size host --json >"$work/hosts.json" 2>"$work/hosts.err" ||
        { cat "$work/hosts.err"; exit 1; }
    (cd "$work" && "$program" train "${model[@]}" --steps 5 --strategy hybrid-shard --replicate-size "$hosts" --ranks $((2 * hosts)) --json \
        >"$work/threads.json" 2>/dev/null)
    [ "$(losses "$work/hosts.json")" = "$(losses "$work/threads.json")" ] || { echo "failed: hybrid sharding by hosts"; exit 1; }
    echo "shards inside of each host, copies across: losses equal those of threads"

    echo "-- a link goes down in the middle of a run, deadline 3 s"
    for _ in $(seq "${CUTS:-1}"); do
        cut_off "$hosts"
        down
        up "$hosts"
    done

    for link in "1 Gbit/s" "1 Gbit/s with 1 % loss"; do
        if ! make_slow "$hosts" "$link"; then
            echo "skipped: links of $link cannot be made here"
            continue
        fi
        for flags in "--prefetch 0" "--prefetch 1" "--compile"; do
            # shellcheck disable=SC2086
            across "$hosts" 1 "${larger[@]}" --steps 6 $flags --json >"$work/slow.json" 2>"$work/slow.err" ||
                { cat "$work/slow.err"; exit 1; }
            echo "links of $link, $flags: $(field "$work/slow.json" tokens_per_s)"
        done
    done
done
echo "hosts: passed"
