#!/bin/bash
# Makes what a release is handed out as, from the commit that is checked out: the wheels, the images of
# docker-compose.yml (COMPOSE_FILE names others), a bill of materials for each, and the sums of all. The same commit
# gives the same wheels. RELEASE_KEY names a private key of OpenSSH, which signs the sums.
# usage: services/release.sh FOLDER
set -euo pipefail
folder=$1
fail() { echo "release: $*" >&2; exit 1; }

version=$(sed -n 's/^version = "\(.*\)"$/\1/p' pyproject.toml)
[ -z "$(git status --porcelain)" ] || fail "files differ from the commit: commit them, or put them aside"
tagged=$(git rev-parse --quiet --verify "v$version^{commit}" || true)
[ -z "$tagged" ] || [ "$tagged" = "$(git rev-parse HEAD)" ] \
    || fail "v$version is another commit: raise \`version\` in pyproject.toml"
[ -z "${RELEASE_KEY:-}" ] || [ -r "$RELEASE_KEY" ] || fail "RELEASE_KEY: $RELEASE_KEY cannot be read"
rm -rf "$folder"
mkdir -p "$folder"

SOURCE_DATE_EPOCH=$(git log -1 --format=%ct)
export SOURCE_DATE_EPOCH MILLRACE_TAG=$version
python=$(realpath -s "${PYTHON:-.venv/bin/python}")
"$python" -m hatchling build --target wheel --directory "$folder" >&2
(cd client && "$python" -m hatchling build --target wheel --directory "$(realpath "$OLDPWD/$folder")" >&2)
if docker info >/dev/null 2>&1; then
    docker compose build
    mapfile -t images < <(docker compose config --images | grep ^millrace/ | sort -u)
    for image in "${images[@]}"; do
        [ "$(docker image inspect -f '{{index .Config.Labels "millrace.stand-in"}}' "$image")" != true ] \
            || fail "$image is built on what stands in for the image of a registry: see tests/containers/images.sh"
    done
    docker save "${images[@]}" | gzip -n -1 >"$folder/millrace-images-$version.tar.gz"
else
    echo "no Docker engine answers: the images are left out" >&2
fi
services/bills.sh "$folder/bills"
(cd "$folder" && find . -type f ! -name SHA256SUMS -printf '%P\0' | sort -z | xargs -0 sha256sum >SHA256SUMS)
if [ -n "${RELEASE_KEY:-}" ]; then
    ssh-keygen -Y sign -q -f "$RELEASE_KEY" -n file "$folder/SHA256SUMS"
else
    echo "RELEASE_KEY is not given: the sums are not signed" >&2
fi
(cd "$folder" && du -h --apparent-size -- *)
