#!/bin/sh
# Makes what the containers of one deployment share: the secret that signs request contexts, and Envoy's
# configuration from the same file and variables that the gateway reads. Safe to repeat; a secret is kept.
# usage: configure.sh CONFIG SECRETS_DIRECTORY EDGE_DIRECTORY [GATEWAYS]; where gateways that run tell their metrics
set -eu
config=$1
secrets=$2
edge=$3
gateways=${4:-}

if [ ! -s "$secrets/context_secret" ]; then
    (umask 077 && python -c 'import secrets; print(secrets.token_hex(32))' >"$secrets/context_secret.new")
    mv "$secrets/context_secret.new" "$secrets/context_secret"
fi
# Compose starts this again with every `up`, and leaves gateways as they are whose configuration was edited: it
# compares its own files and images alone. Nothing would have changed, and nobody would know.
python -m gateway.applied "$config" ${gateways:+"$gateways"}
# Envoy runs as another user; its configuration holds no secret.
(umask 022 && python -m gateway.envoy --config "$config" --profile compose >"$edge/envoy.yaml.new")
mv "$edge/envoy.yaml.new" "$edge/envoy.yaml"
