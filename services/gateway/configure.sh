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
# Compose starts this again with every `up`, and leaves gateways as they are whose configuration was edited: it
# compares its own files and images alone. Nothing would have changed, and nobody would know.
edited=$(sha256sum <"$config")
if [ -s "$edge/applied" ] && [ "$edited" != "$(cat "$edge/applied")" ] \
    && python -c 'import socket; socket.create_connection(("gateway", 8000), 2)' 2>/dev/null; then
    echo "config/millrace.toml was edited, and gateways run that were started before: apply it by" \
        "\`make up\` or \`docker compose up --detach --build\`" >&2
    exit 1
fi
echo "$edited" >"$edge/applied"
# Envoy runs as another user; its configuration holds no secret.
(umask 022 && python -m gateway.envoy --config "$config" --profile compose >"$edge/envoy.yaml.new")
mv "$edge/envoy.yaml.new" "$edge/envoy.yaml"
