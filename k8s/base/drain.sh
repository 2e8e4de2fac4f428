#!/bin/bash
# Runs before Envoy is told to end: sends clients elsewhere, then waits until no request is in flight. Envoy's
# --drain-time-s says for how long it still takes new connections.
# usage: drain.sh [ADMIN_PORT [LIMIT_S]]
port=${1:-9901}
limit_s=${2:-900}

admin() {
    exec 3<>"/dev/tcp/127.0.0.1/$port" || exit 0
    printf '%s %s HTTP/1.1\r\nHost: envoy\r\nContent-Length: 0\r\nConnection: close\r\n\r\n' "$1" "$2" >&3
    cat <&3
}

# Endpoints are removed from load balancers while this pod still answers.
admin POST /healthcheck/fail >/dev/null
sleep "${SETTLE_S:-5}"
admin POST '/drain_listeners?graceful' >/dev/null
for ((second = 0; second < limit_s; second++)); do
    # The admin interface's own request counts under its own prefix.
    admin GET '/stats?filter=downstream_rq_active' | grep -v '^http\.admin\.' | grep -qE 'active: [1-9]' || exit 0
    sleep 1
done
