# Images that the project takes from registries: the real one where its registry answers, and what stands in for it
# elsewhere, under the same name and with a label. For prepare.sh, which says what `say` and `stand_in` do.
# shellcheck shell=bash

label=millrace.stand-in
has() { docker image inspect "$1" >/dev/null 2>&1; }
stands_in() { [ "$(docker image inspect -f "{{index .Config.Labels \"$label\"}}" "$1" 2>/dev/null)" = true ]; }

# Whether the registry of the images, or what the engine asks in its place, says anything at all: asked once, and
# in seconds, whatever a pull would take.
registry_answers() {
    local url
    if [ -z "${registry:-}" ]; then
        registry=silent
        for url in $(docker info -f '{{range .RegistryConfig.Mirrors}}{{.}} {{end}}') https://registry-1.docker.io/; do
            ! curl --silent --output /dev/null --max-time 10 "${url%/}/v2/" || registry=answers
        done
    fi
    [ "$registry" = answers ]
}

# image IMAGE STAND_IN: there afterwards. What stands in for it gives way as soon as the real one can be had; a
# pull that fails says nothing of other images.
image() {
    ! has "$1" || stands_in "$1" || return 0
    if registry_answers; then
        timeout "${PULL_LIMIT_S:-600}" docker pull -q "$1" >/dev/null 2>&1 && return
        say "$1: it cannot be pulled, though its registry answers; a stand-in takes its place"
    else
        say "$1: its registry does not answer, a stand-in takes its place"
    fi
    has "$1" || stand_in "$2" "$1"
}
