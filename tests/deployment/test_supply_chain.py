"""What is installed is what is pinned, and every image can say what it holds."""

from __future__ import annotations

import datetime
import json
import re
from importlib import metadata
from pathlib import Path

import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from packaging.utils import canonicalize_name

from services import bill_of_materials, third_party_images
from tests.deployment.composition import load
from tests.deployment.containerfile import REPOSITORY, parse
from tests.deployment.manifests import K8S

# The build of torch decides by the machine what else comes with it.
_UNPINNED = {"torch", "triton", "setuptools"}


def _pins() -> dict[str, str]:
    lines = (REPOSITORY / "constraints.txt").read_text().split()
    return {canonicalize_name(line.split("==")[0]): line.split("==")[1] for line in lines}


def test_every_pin_is_exact() -> None:
    for line in (REPOSITORY / "constraints.txt").read_text().split():
        assert re.fullmatch(r"[\w.-]+==[\w.!+-]+", line), line


@pytest.mark.parametrize("deployable", ["gateway", "tokenizer", "engine"])
def test_what_is_installed_is_what_is_pinned(deployable: str) -> None:
    pins = _pins()
    for name, distribution in bill_of_materials.closure(bill_of_materials.requirements(deployable)).items():
        if name not in _UNPINNED and not name.startswith("nvidia-"):
            assert pins.get(name) == distribution.version, name


def _bill(*arguments: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert bill_of_materials.main(arguments) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("deployable", ["gateway", "tokenizer", "engine"])
def test_an_image_can_say_what_it_holds(deployable: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = _bill(deployable, capsys=capsys)
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(text) is None
    document = json.loads(text)
    listed = {component["name"] for component in document["components"]}
    assert {"grpcio", "protobuf"} <= listed
    assert ("torch" in listed) == (deployable == "engine")
    assert document["metadata"]["component"]["version"] == metadata.version("millrace")


_DPKG_STATUS = """\
Package: libc6
Status: install ok installed
Architecture: amd64
Multi-Arch: same
Source: glibc
Version: 2.36-9+deb12u13
Description: GNU C Library: Shared libraries
 Contains the standard libraries that are used by nearly all programs.
 .
 Version: of the description, not of the package

Package: gone
Status: deinstall ok config-files
Architecture: amd64
Version: 1

Package: zlib1g
Status: install ok installed
Architecture: amd64
Version: 1:1.2.13.dfsg-1
Description: compression library
"""


def test_packages_of_the_operating_system_are_listed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status = tmp_path / "status"
    status.write_text(_DPKG_STATUS)
    arguments = ("gateway", "--dpkg-status", str(status), "--distribution", "debian-12")
    text = _bill(*arguments, capsys=capsys)
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(text) is None
    links = [component["purl"] for component in json.loads(text)["components"]]
    assert [link for link in links if link.startswith("pkg:deb/")] == [
        "pkg:deb/debian/libc6@2.36-9%2Bdeb12u13?arch=amd64&distro=debian-12",
        "pkg:deb/debian/zlib1g@1:1.2.13.dfsg-1?arch=amd64&distro=debian-12",
    ]
    assert any(link.startswith("pkg:pypi/grpcio@") for link in links)


def test_the_same_packages_give_the_same_bytes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    first, second = (_bill("gateway", capsys=capsys) for _ in range(2))
    assert first == second
    assert json.loads(first)["metadata"]["timestamp"] == "2023-11-14T22:13:20+00:00"
    assert json.loads(first)["serialNumber"] != json.loads(_bill("engine", capsys=capsys))["serialNumber"]


def test_an_unknown_deployable_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        bill_of_materials.main(["nothing"])
    assert ended.value.code == 2
    assert "gateway" in capsys.readouterr().err


def test_images_of_others_are_those_on_the_list() -> None:
    named = {service["image"] for service in load()["services"].values()}
    for path in K8S.rglob("*.yaml"):
        named |= set(re.findall(r"^\s*image: (\S+)$", path.read_text(), re.MULTILINE))
    for path in (REPOSITORY / "services").glob("*/Dockerfile*"):
        dockerfile = parse(path)
        own = {stage.name for stage in dockerfile.stages}
        named |= {stage.base for stage in dockerfile.stages} - own
    named = {image for image in named if not image.startswith("millrace/")}
    assert named == {each.reference for each in third_party_images.read_list().images}


def test_an_image_that_nobody_has_looked_at_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    listed = third_party_images.read_list()
    oldest = min(each.seen for each in listed.images)
    limit = datetime.timedelta(days=listed.max_age_days)
    assert third_party_images.main(oldest + limit) == 0
    assert "TOO OLD" not in capsys.readouterr().out
    assert third_party_images.main(oldest + limit + datetime.timedelta(days=1)) == 1
    assert "TOO OLD" in capsys.readouterr().out


def test_an_image_without_a_digest_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    digest = f"sha256:{64 * 'a'}"
    seen = datetime.date(2026, 1, 1)
    pinned = third_party_images.Image("a/pinned:1", "why", seen, digest)
    listed = third_party_images.Images(90, (pinned, third_party_images.Image("a/tagged:1", "why", seen)))
    monkeypatch.setattr(third_party_images, "read_list", lambda: listed)
    assert third_party_images.main(seen) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"a/pinned:1@{digest}  0 days"
    assert lines[1] == "a/tagged:1  0 days  no digest"
    assert lines[2].startswith("1 of 2 are pinned by their tags alone")
