#!/bin/sh
# The end of the build stage of every image, in the folder with pyproject.toml, on what was laid out for it.
set -eu
# Modes are not those of the checkout: its owner's umask may keep others out, and the user that serves is one of
# them.
chmod -R a+rX /app /etc/millrace
# The root file system is read-only at run time, so byte code is made here.
python -m compileall -q /app
# The services read their version from the metadata of an installed project.
version=$(sed -n 's/^version = "\(.*\)"$/\1/p' pyproject.toml)
metadata=$(/opt/venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/millrace-$version.dist-info
mkdir "$metadata"
printf 'Metadata-Version: 2.1\nName: millrace\nVersion: %s\n' "$version" >"$metadata/METADATA"
