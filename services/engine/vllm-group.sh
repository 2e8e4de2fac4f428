#!/bin/sh
# A pod of an engine of vLLM's make. Alone it is the engine. In a group (a LeaderWorkerSet tells size and index)
# the first one is, with Ray's head beside it, and the others give their devices to it until it goes.
set -eu
ray=/opt/vllm/bin/ray
port=6379

has_leader() {
    "$ray" health-check --address "$LWS_LEADER_ADDRESS:$port" >/dev/null 2>&1
}

case "${1:-}" in
--is-joined)
    has_leader
    exit
    ;;
--until-leader-leaves)
    while has_leader; do sleep 5; done
    exit
    ;;
esac

if [ "${LWS_GROUP_SIZE:-1}" -gt 1 ]; then
    if [ "${LWS_WORKER_INDEX:-0}" -ne 0 ]; then
        until has_leader; do sleep 1; done
        exec "$ray" start --address "$LWS_LEADER_ADDRESS:$port" --disable-usage-stats --block
    fi
    "$ray" start --head --port "$port" --disable-usage-stats --include-dashboard=false
    export RAY_ADDRESS="127.0.0.1:$port" MILLRACE_ENGINE__VLLM__LAUNCHER=ray
fi
exec python -m engine "$@"
