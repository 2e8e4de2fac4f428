"""What the real run does about images whose registry cannot be reached, with docker and curl played."""

from __future__ import annotations

import subprocess

import pytest

from tests.deployment.containerfile import REPOSITORY

# `there` has lines "name label"; `says` is what curl finds of the registry, `slow` the image whose pull takes
# too long. What is done is printed.
PLAYED = r"""
set -euo pipefail
say() { echo "say: $*"; }
stand_in() { echo "stand in: $2"; there+=$'\n'"$2 true"; }
curl() { echo "asked" >&2; [ "$says" = answers ]; }
timeout() { echo "pull: $5" >&3; [ "$5" != "$slow" ]; }
docker() {
    case "$1 $2" in
        "info -f") ;;
        "image inspect")
            local name=${*: -1}
            grep -q "^$name " <<<"$there" || return 1
            [ "$3" != -f ] || sed -n "s|^$name ||p" <<<"$there" ;;
    esac
}
exec 3>&1
. tests/containers/images.sh
for each in one two; do image "$each" kind; done
"""


@pytest.mark.parametrize(
    ("registry", "there", "slow", "done"),
    [
        ("answers", "", "", ["pull: one", "pull: two"]),
        ("silent", "", "", ["stand in: one", "stand in: two"]),
        # A stand-in is replaced once its image can be pulled, and stays while the registry is silent.
        ("answers", "one true\ntwo <no value>", "", ["pull: one"]),
        ("silent", "one true\ntwo <no value>", "", []),
        # A pull that takes too long says nothing of the next one.
        ("answers", "", "one", ["pull: one", "stand in: one", "pull: two"]),
        ("answers", "one true", "one", ["pull: one", "pull: two"]),
    ],
)
def test_real_images_are_had_where_a_registry_answers(
    registry: str, there: str, slow: str, done: list[str]
) -> None:
    told = subprocess.run(
        ["bash", "-c", PLAYED],
        cwd=REPOSITORY,
        env={"PATH": "/usr/bin:/bin", "says": registry, "there": there, "slow": slow},
        capture_output=True,
        text=True,
        check=True,
    )
    lines = told.stdout.splitlines()
    assert [line for line in lines if not line.startswith("say: ")] == done
    # Nobody stands in without being named.
    named = {line.split(": ")[1] for line in lines if line.startswith("say: ")}
    assert {line.removeprefix("stand in: ") for line in done if line.startswith("stand in")} <= named
    assert told.stderr.count("asked") <= 1
