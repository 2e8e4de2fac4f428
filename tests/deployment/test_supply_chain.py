"""What is installed is what is pinned, and every image can say what it holds."""

from __future__ import annotations

import json
import re
from importlib import metadata

import pytest
from packaging.utils import canonicalize_name

from services import bill_of_materials
from tests.deployment.containerfile import REPOSITORY

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


@pytest.mark.parametrize("deployable", ["gateway", "tokenizer", "engine"])
def test_an_image_can_say_what_it_holds(deployable: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert bill_of_materials.main([deployable]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["bomFormat"] == "CycloneDX"
    listed = {component["name"] for component in document["components"]}
    assert {"grpcio", "protobuf"} <= listed
    assert ("torch" in listed) == (deployable == "engine")
    assert document["metadata"]["component"]["version"] == metadata.version("millrace")


def test_an_unknown_deployable_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert bill_of_materials.main(["nothing"]) == 2
    assert "gateway" in capsys.readouterr().err
