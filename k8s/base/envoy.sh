#!/bin/bash
# The first process of Envoy's container: starts Envoy, and when the container is to end lets the requests in
# flight finish first. Envoy by itself would cut them, and hooks of compose and Kubernetes do not run whenever a
# container is stopped. Envoy's --drain-time-s says for how long new connections are still taken.
# usage: envoy.sh ENVOY [ARGUMENT...]; DRAIN_LIMIT_S, SETTLE_S and ADMIN_PORT as below
limit_s=${DRAIN_LIMIT_S:-900}
# Until load balancers have noticed that health checks fail; requests are still taken.
settle_s=${SETTLE_S:-5}
admin_port=${ADMIN_PORT:-9901}

admin() {
    exec 3<>"/dev/tcp/127.0.0.1/$admin_port" || return
    printf '%s %s HTTP/1.1\r\nHost: envoy\r\nContent-Length: 0\r\nConnection: close\r\n\r\n' "$1" "$2" >&3
    cat <&3
    exec 3>&-
}

# The admin interface's own request counts under its own prefix.
is_serving() {
    admin GET '/stats?filter=downstream_rq_active' | grep -v '^http\.admin\.' | grep -qE 'active: [1-9]'
}

drain() {
    trap 'kill -KILL "$envoy"' TERM INT
    admin POST /healthcheck/fail >/dev/null
    sleep "$settle_s"
    admin POST '/drain_listeners?graceful' >/dev/null
    for ((second = 0; second < limit_s; second++)); do
        is_serving || break
        sleep 1
    done
    # It sends spans once a second (gateway/envoy/envoy.yaml.j2), and at its end none: those of the last requests.
    sleep 2
    kill -TERM "$envoy" 2>/dev/null
}

# With no terminal's signals of its own: Ctrl-C reaches the whole group, and Envoy is told only after the drain.
(trap '' INT; exec "$@") &
envoy=$!
ending=false
trap 'ending=true' TERM INT
# A signal ends the wait before Envoy has ended.
wait "$envoy"
status=$?
if "$ending"; then
    drain
    wait "$envoy"
    status=$?
fi
exit "$status"
