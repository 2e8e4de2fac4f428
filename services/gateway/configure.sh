#!/bin/sh
# Makes what the containers of one deployment share: the secret that signs request contexts, and Envoy's
# configuration from the same file and variables that the gateway reads. Safe to repeat; a secret is kept.
# usage: configure.sh CONFIG SECRETS_DIRECTORY EDGE_DIRECTORY
set -eu
config=$1
secrets=$2
edge=$3

if [ ! -s "$secrets/context_secret" ]; then
    (umask 077 && python -c 'import secrets; print(secrets.token_hex(32))' >"$secrets/context_secret.new")
    mv "$secrets/context_secret.new" "$secrets/context_secret"
fi
# Envoy runs as another user; its configuration holds no secret.
(umask 022 && python -m gateway.envoy --config "$config" --profile compose >"$edge/envoy.yaml.new")
mv "$edge/envoy.yaml.new" "$edge/envoy.yaml"
