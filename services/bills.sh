#!/bin/bash
# Writes what each image holds (CycloneDX) to FOLDER/<deployable>.json. The operating system's packages are those
# of the image, which only a Docker engine can look into.
# usage: services/bills.sh FOLDER
set -euo pipefail
folder=$1
SOURCE_DATE_EPOCH=$(git log -1 --format=%ct 2>/dev/null || echo 0)
export SOURCE_DATE_EPOCH
mkdir -p "$folder"
for name in gateway tokenizer engine; do
    image=millrace/$name:${MILLRACE_TAG:-0.1.0}
    arguments=()
    if docker image inspect "$image" >/dev/null 2>&1; then
        listed=$(mktemp)
        docker run --rm --network none --entrypoint cat "$image" /var/lib/dpkg/status >"$listed"
        # shellcheck disable=SC2016
        release=$(docker run --rm --network none --entrypoint sh "$image" \
            -c '. /etc/os-release && echo "$ID-$VERSION_ID"')
        arguments=(--dpkg-status "$listed" --distribution "$release")
    else
        echo "$image is not here: its Debian packages are left out (make up builds it)" >&2
    fi
    "${PYTHON:-.venv/bin/python}" -m services.bill_of_materials "$name" "${arguments[@]}" >"$folder/$name.json"
    [ -z "${listed:-}" ] || rm "$listed"
    unset listed
done
