"""Images of others are pinned by the digests that registries tell, wherever they are named."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import tomllib
from pathlib import Path

import msgspec
import pytest

from services import image_digests, third_party_images
from tests.deployment.containerfile import parse

REPOSITORY = Path(__file__).resolve().parents[3]
LIST = "services/third_party_images.toml"
# Tells of every image the digest of its name, and of its repository by another name as well.
DOCKER = """#!/bin/sh
for image; do :; done
case "$1:$image" in
pull:$REFUSED) echo "Error response from daemon: no route to host" >&2; exit 1 ;;
image:*)
    sum() { printf %s "$1" | sha256sum | cut -d ' ' -f 1; }
    echo "mirror.example/${image%:*}@sha256:$(sum other)"
    [ "$image" = "$MADE_HERE" ] || echo "${image%:*}@sha256:$(sum "$image")" ;;
esac
"""


def digest_of(image: str) -> str:
    return f"sha256:{hashlib.sha256(image.encode()).hexdigest()}"


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What names images in this repository, and a Docker that knows all of them."""
    folder = tmp_path / "checkout"
    for pattern in (*image_digests._FILES, LIST):
        for path in REPOSITORY.glob(pattern):
            target = folder / path.relative_to(REPOSITORY)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)
    docker = tmp_path / "bin/docker"
    docker.parent.mkdir()
    docker.write_text(DOCKER)
    docker.chmod(0o755)
    monkeypatch.setenv("PATH", f"{docker.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("REFUSED", "")
    monkeypatch.setenv("MADE_HERE", "")
    return folder


def contents(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


def named(folder: Path) -> set[str]:
    """Images of others as they are named to whoever runs or builds something."""
    found: set[str] = set()
    for path in (*folder.glob("*.yml"), *folder.rglob("k8s/**/*.yaml")):
        found |= set(re.findall(r"^\s*image: ([^\s{}]+)$", path.read_text(), re.MULTILINE))
    for path in folder.glob("services/*/Dockerfile*"):
        stages = parse(path).stages
        found |= {stage.base for stage in stages} - {stage.name for stage in stages}
    return {image for image in found if not image.startswith("millrace/")}


def test_every_image_is_pinned_wherever_it_is_named(checkout: Path) -> None:
    before = contents(checkout)
    images = [each.image for each in third_party_images.read_list().images]
    assert image_digests.main(checkout) == 0
    after = contents(checkout)
    read = msgspec.convert(tomllib.loads(after.pop(LIST)), third_party_images.Images)
    assert [(each.image, each.digest) for each in read.images] == [
        (image, digest_of(image)) for image in images
    ]
    assert named(checkout) == {each.reference for each in read.images}
    # Nothing else has changed.
    for name, text in after.items():
        assert re.sub("@sha256:[0-9a-f]{64}", "", text) == before[name]


def test_a_digest_is_renewed_and_does_not_pile_up(checkout: Path) -> None:
    assert image_digests.main(checkout) == 0
    pinned = contents(checkout)
    old = f"sha256:{64 * '0'}"
    image = third_party_images.read_list().images[0].image
    for path in checkout.rglob("*"):
        if path.is_file():
            path.write_text(path.read_text().replace(digest_of(image), old))
    assert contents(checkout) != pinned
    assert image_digests.main(checkout) == 0
    assert contents(checkout) == pinned


@pytest.mark.parametrize(
    ("variable", "told"), [("REFUSED", "no route to host"), ("MADE_HERE", "docker image rm")]
)
def test_nothing_is_written_where_one_of_them_is_unknown(
    checkout: Path,
    variable: str,
    told: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    before, last = contents(checkout), third_party_images.read_list().images[-1].image
    monkeypatch.setenv(variable, last)
    assert image_digests.main(checkout) == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert last in said
    assert told in said
    assert contents(checkout) == before


def test_a_machine_without_docker_is_refused(
    checkout: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(checkout))
    assert image_digests.main(checkout) == 1
    assert "docker cannot be started" in capsys.readouterr().err


def test_a_name_that_only_begins_or_ends_so_is_another_image() -> None:
    digests = {"a/b:1.2": f"sha256:{64 * 'a'}"}
    for name in ("x/a/b:1.2", "a/b:1.2-alpine", "a/b:1.20", "a/b:1.2.1"):
        assert image_digests.pinned(f"image: {name}\n", digests) == f"image: {name}\n"
    assert (
        image_digests.pinned("FROM a/b:1.2 AS made\n", digests)
        == f"FROM a/b:1.2@{digests['a/b:1.2']} AS made\n"
    )
