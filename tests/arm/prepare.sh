#!/bin/sh
# What the kernels' tests need to run as on ARM's 64-bit processors, under emulation: QEMU, a cross compiler, and a
# Python of that architecture with torch, all below build/arm. Debian and root only; made once.
set -eu
cd "$(dirname "$0")/../.."
folder=$PWD/build/arm
# The last release whose wheel for this architecture is a CPU build on PyPI.
torch=2.10.0
made="$folder/made-$torch"
[ -e "$made" ] && exit 0

missing=
command -v qemu-aarch64 >/dev/null || missing="$missing qemu-user"
command -v aarch64-linux-gnu-g++ >/dev/null || missing="$missing g++-aarch64-linux-gnu"
if [ -n "$missing" ]; then
  export DEBIAN_FRONTEND=noninteractive
  apt-get update -q
  # shellcheck disable=SC2086
  apt-get install -y -q --no-install-recommends $missing
fi

# The other architecture's packages are unpacked, never installed: this machine's own stay as they are.
rm -rf "$folder"
mkdir -p "$folder/lists/partial" "$folder/cache/archives/partial" "$folder/root" "$folder/wheels"
: >"$folder/status"
foreign="-oAPT::Architecture=arm64 -oAPT::Architectures=arm64 -oDir::State::Lists=$folder/lists
  -oDir::State::status=$folder/status -oDir::Cache=$folder/cache -oAPT::Sandbox::User=root"
# shellcheck disable=SC2086
apt-get $foreign update -q
# shellcheck disable=SC2086
apt-get $foreign install -y -q --no-install-recommends --download-only python3 libgomp1 libstdc++6
for package in "$folder"/cache/archives/*.deb; do dpkg-deb -x "$package" "$folder/root"; done

python=$(basename "$(readlink -f "$folder/root/usr/bin/python3")")
pip="$PWD/.venv/bin/python -m pip --disable-pip-version-check"
$pip download -q --no-deps --only-binary=:all: --python-version "${python#python}" --implementation cp \
  --platform manylinux_2_28_aarch64 --platform manylinux_2_27_aarch64 --platform manylinux_2_17_aarch64 \
  --platform manylinux2014_aarch64 -d "$folder/wheels" "torch==$torch" numpy msgspec \
  $(grep -E '^(hypothesis|grpcio|protobuf)==' constraints.txt)
# Of these any architecture's will do.
$pip install -q --no-deps --no-compile --target "$folder/site" -c constraints.txt pytest iniconfig packaging pluggy \
  pygments filelock typing-extensions sympy mpmath networkx jinja2 fsspec sortedcontainers attrs
for wheel in "$folder"/wheels/*.whl; do
  "$PWD/.venv/bin/python" -m zipfile -e "$wheel" "$folder/site"
done
rm -rf "$folder/wheels" "$folder/cache" "$folder/lists" "$folder/site/torch/include"
: >"$made"
