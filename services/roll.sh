#!/bin/bash
# Replaces the containers of one service one at a time: a new one is healthy before an old one drains. Compose by
# itself stops all of them at once. Arguments of compose, such as further files, are in COMPOSE_FILE and the like.
# usage: services/roll.sh SERVICE
set -euo pipefail
service=$1
mapfile -t old < <(docker compose ps --quiet "$service")
[ "${#old[@]}" -gt 0 ] || { echo "$service does not run: docker compose up" >&2; exit 1; }
for container in "${old[@]}"; do
    docker compose up --detach --wait --no-deps --no-recreate --scale "$service=$((${#old[@]} + 1))" "$service"
    # Gateways look engines up every 5 s, Envoy gateways every 2.
    sleep "${NOTICE_S:-7}"
    # Docker waits for the container's own grace period.
    docker stop "$container" >/dev/null
    docker rm "$container" >/dev/null
done
