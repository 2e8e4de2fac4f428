#!/bin/bash
# Makes ready what the tests of the containers need: a Docker engine, compose, the images that the project takes
# from registries, and its own. Where a registry cannot be reached, stand-ins under the same names take the place
# of its images (stand_ins/); what is not on this machine is unpacked below build/containers and not installed.
# Its own are tagged $MILLRACE_TAG, by default `test`, so that nobody's images of a release are replaced.
# usage: tests/containers/prepare.sh [engine | stop], in the repository's root: `engine` makes an engine ready and
# nothing else, with status 1 where there can be none; `stop` ends the one that was started here.
set -euo pipefail
here=tests/containers
work=$PWD/build/containers
export DOCKER_CONFIG=$work/docker-config DOCKER_BUILDKIT=0 MILLRACE_TAG=${MILLRACE_TAG:-test}
mkdir -p "$DOCKER_CONFIG/cli-plugins"
say() { printf '%s %s\n' "$(date +%T)" "$*" >&2; }
fail() { echo "$*" >&2; exit 1; }
# shellcheck source=tests/containers/images.sh
. "$here/images.sh"
debian_mirrors() { sed -n 's/^URIs: *//p' /etc/apt/sources.list.d/*.sources 2>/dev/null || true; }

ensure_engine() {
    docker info >/dev/null 2>&1 && return
    [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null || fail "start a Docker engine, or run this as root on Debian"
    command -v dockerd >/dev/null || {
        say "installing Debian's Docker engine"
        apt-get update -qq
        DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends docker.io iptables >/dev/null
    }
    say "starting dockerd; its log is $work/dockerd.log"
    setsid nohup dockerd --pidfile "$work/dockerd.pid" >"$work/dockerd.log" 2>&1 </dev/null &
    local process=$!
    for _ in $(seq 60); do
        docker info >/dev/null 2>&1 && return
        kill -0 "$process" 2>/dev/null || break
        sleep 1
    done
    fail "dockerd does not start: $(tail -n 1 "$work/dockerd.log")"
}

started_here() { [ "$(cat "/proc/$(cat "$work/dockerd.pid" 2>/dev/null)/comm" 2>/dev/null)" = dockerd ]; }

# Images stay for the next time.
stop_engine() {
    local process
    started_here || return 0
    process=$(cat "$work/dockerd.pid")
    kill "$process"
    for _ in $(seq 60); do kill -0 "$process" 2>/dev/null || return 0; sleep 1; done
    fail "dockerd does not end"
}

# A state of apt for Debian's newest suite, which this machine need not follow.
ensure_newest_suite() {
    local root=$work/apt
    [ -f "$root/ready" ] && return
    mkdir -p "$root"/{etc/apt/preferences.d,etc/apt/apt.conf.d,etc/apt/sources.list.d} \
        "$root"/var/{lib/apt/lists/partial,lib/dpkg,cache/apt/archives/partial}
    : >"$root/var/lib/dpkg/status"
    printf 'Types: deb\nURIs: %s\nSuites: sid\nComponents: main\nSigned-By: %s\n' \
        "$(debian_mirrors | head -1)" /usr/share/keyrings/debian-archive-keyring.gpg >"$root/etc/apt/sources.list.d/sid.sources"
    # A mirror may be a snapshot that is older than its index is valid for; signatures count all the same.
    printf '%s\n' "Dir \"$root\";" "Dir::State::status \"$root/var/lib/dpkg/status\";" \
        'Dir::Bin::methods "/usr/lib/apt/methods";' 'APT::Sandbox::User "root";' \
        'Acquire::Check-Valid-Until "false";' >"$root/apt.conf"
    APT_CONFIG=$root/apt.conf apt-get update -qq
    touch "$root/ready"
}

# A package of it, unpacked.
# unpack PACKAGE
unpack() {
    local folder=$work/packages/$1
    [ -f "$folder/ready" ] && return
    ensure_newest_suite
    rm -rf "$folder" && mkdir -p "$folder"
    (cd "$folder" && APT_CONFIG=$work/apt/apt.conf apt-get download -qq "$1" && dpkg-deb -x ./*.deb . && touch ready)
}

ensure_compose() {
    docker compose version >/dev/null 2>&1 && return
    say "unpacking Debian's docker-compose"
    unpack docker-compose
    cp "$work/packages/docker-compose/usr/libexec/docker/cli-plugins/docker-compose" "$DOCKER_CONFIG/cli-plugins/"
    docker compose version >/dev/null
}

# The real kustomize, which the tests of the manifests compare with.
ensure_kubectl() {
    command -v kubectl >/dev/null || unpack kubectl
}

# The base of all stand-ins: Debian without recommends, with the sources of packages of this machine.
ensure_debian() {
    local root=$work/debian mirrors
    has millrace-stand-in/debian && return
    say "debootstrap"
    command -v debootstrap >/dev/null || apt-get install -y -qq --no-install-recommends debootstrap >/dev/null
    mapfile -t mirrors < <(debian_mirrors)
    [ -x "$root/bin/sh" ] || debootstrap --variant=minbase --include=ca-certificates,netbase,tzdata \
        bookworm "$root" "${mirrors[0]}" >"$work/debootstrap.log"
    printf 'deb %s bookworm main\n' "${mirrors[0]}" >"$root/etc/apt/sources.list"
    [ -z "${mirrors[1]:-}" ] || printf 'deb %s bookworm-security main\n' "${mirrors[1]}" >>"$root/etc/apt/sources.list"
    printf 'APT::Install-Recommends "false";\n' >"$root/etc/apt/apt.conf.d/99recommends"
    rm -rf "$root"/var/cache/apt/archives/*.deb "$root"/var/lib/apt/lists/*
    tar -C "$root" -c . | docker import -c 'CMD ["bash"]' - millrace-stand-in/debian >/dev/null
}

# stand_in NAME IMAGE: what the Dockerfile copies is laid beside it first.
stand_in() {
    local context=$work/context-$1 python
    ensure_debian
    rm -rf "$context"
    cp -r "$here/stand_ins/$1" "$context"
    case $1 in
        python)
            cp /etc/ssl/certs/ca-certificates.crt "$context/authorities.crt"
            mkdir -p "$context/local/"{bin,lib,include}
            python=$(.venv/bin/python -c 'import sys; print(sys.base_prefix)')
            cp -a "$python"/bin/python3* "$context/local/bin/"
            ln -sf python3 "$context/local/bin/python"
            cp -a "$python"/lib/libpython3*.so* "$context/local/lib/" 2>/dev/null || true
            cp -a "$python"/include/python3* "$context/local/include/"
            tar -C "$python/lib" --exclude='*/site-packages/*' --exclude='*/test' --exclude=__pycache__ \
                --exclude='*/config-3*' -c python3."$(.venv/bin/python -c 'import sys; print(sys.version_info.minor)')" \
                | tar -C "$context/local/lib" -x ;;
        otlp)
            cp tests/unit/observability/{jaeger_stand_in,stand_in_server}.py "$context/" ;;
        envoy)
            cp "$(.venv/bin/python -c 'from services.supervisor.edge import envoy_binary; print(envoy_binary())')" "$context/" ;;
        prometheus)
            unpack prometheus
            cp "$work/packages/prometheus/usr/bin/prometheus" "$context/" ;;
    esac
    docker build -q --network host --label "$label=true" -t "$2" "$context" >/dev/null
}

# The folder of this machine with a CPU build of torch, from which pip installs; nothing where PyTorch's own index
# answers.
torch_wheels() {
    curl --silent --fail --head --max-time 10 https://download.pytorch.org/whl/cpu/torch/ >/dev/null && return
    local folder
    for folder in ${PIP_FIND_LINKS:-} $(.venv/bin/python -m pip config get global.find-links 2>/dev/null); do
        compgen -G "$folder/torch-*+cpu-*.whl" >/dev/null && { echo "$folder"; return; }
    done
    fail "neither PyTorch's index nor a CPU build of torch can be reached"
}

# From a checkout as the tests make theirs, whose modes are part of what layers are known by.
build() {
    local wheels port=${TORCH_INDEX_PORT:-18098} server checkout=$work/checkout
    wheels=$(torch_wheels)
    if [ -n "$wheels" ]; then
        .venv/bin/python "$here/torch_index.py" "$port" "$wheels" &
        server=$!
        # shellcheck disable=SC2064
        trap "kill $server" EXIT
        export TORCH_INDEX=http://127.0.0.1:$port/whl/cpu
    fi
    # Who builds again is to find the same layers.
    echo "${TORCH_INDEX:-}" >"$work/torch_index"
    rm -rf "$checkout" && mkdir -p "$checkout"
    git ls-files -z | (umask 077 && tar --null -T - --ignore-failed-read -c | tar --no-same-permissions -C "$checkout" -x)
    make -s -C "$checkout" mounted
    local compose=(docker compose --project-directory "$checkout" -f "$checkout/docker-compose.yml")
    "${compose[@]}" -f "$checkout/$here/compose.yml" build
    [ "${TEST_CONTAINERS_VLLM:-}" != 1 ] || {
        say "building the engine with vLLM's core"
        "${compose[@]}" -f "$checkout/compose.vllm.yml" -f "$checkout/$here/compose.yml" -f "$checkout/$here/vllm.yml" build engine
    }
}

case ${1:-} in
    stop) stop_engine; exit ;;
    engine) ensure_engine; exit ;;
esac
ensure_engine
ensure_compose
ensure_kubectl
image "python:$(sed -n 's/^ARG PYTHON=//p' services/gateway/Dockerfile)" python
others=$(docker compose -f docker-compose.yml config --format json | .venv/bin/python -c '
import json, sys
stand_ins = {"envoyproxy": "envoy", "valkey": "valkey", "otel": "otlp", "jaegertracing": "otlp", "prom": "prometheus", "grafana": "grafana"}
for service in json.load(sys.stdin)["services"].values():
    owner = service["image"].partition("/")[0]
    if owner in stand_ins:
        print(service["image"], stand_ins[owner])
')
while read -r name kind; do image "$name" "$kind" </dev/null; done <<<"$others"
image "$(sed -n 's/^ *image: \(postgres:.*\)/\1/p' k8s/components/postgres/postgres.yaml)" postgres
say "building the project's images"
build
# What earlier builds left behind; younger layers save time.
! started_here || docker image prune --force --filter until=168h >/dev/null
docker images --format '{{.Repository}}:{{.Tag}} {{.Size}}' >&2
