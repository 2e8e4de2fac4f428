"""What is documented of the configuration is what is read: each table says where it stands, each mention of a
table is one of those, and no key is there that nobody reads.
"""

from __future__ import annotations

import re
from functools import cache

import pytest

from tests.deployment.containerfile import REPOSITORY
from tests.deployment.settings import TABLES, known_settings

PACKAGES = ("contract", "engine", "gateway", "models", "observability", "services", "tokenizer_svc")
SETTINGS = known_settings()
# A table for each name is written with an example's name, or with a word for it.
_NAMED = re.compile(r"^(tiers|tenants|gateway\.prices)\.[^.]+")


@cache
def sources(suffix: str) -> dict[str, str]:
    """Texts of the packages by path, generated ones left out."""
    paths = [path for package in PACKAGES for path in (REPOSITORY / package).rglob(f"*{suffix}")]
    return {
        str(path.relative_to(REPOSITORY)): path.read_text(encoding="utf-8")
        for path in paths
        if "stubs" not in path.parts
    }


@pytest.mark.parametrize("table", [path for path, kind in SETTINGS.items() if kind is not None])
def test_each_table_says_where_it_stands(table: str) -> None:
    kind = SETTINGS[table]
    assert kind is not None
    said = re.search(r"\[([\w.<>]+)\]", kind.__doc__ or "")
    assert said is not None, kind
    assert _NAMED.sub(r"\1.<name>", said[1]) == table


def test_each_table_that_is_mentioned_is_read() -> None:
    tables = re.compile(
        rf"(?<![\w\])])\[((?:{'|'.join(name.split('.')[0] for name in TABLES)})(?:\.[\w<>\"*-]+)*)\]"
    )
    guides = {str(path): path.read_text() for path in (REPOSITORY / "docs").rglob("*.md")}
    guides["README.md"] = (REPOSITORY / "README.md").read_text()
    mentioned = {
        (path, name)
        for path, text in {**sources(".py"), **sources(".md"), **guides}.items()
        for name in tables.findall(text)
    }
    assert len(mentioned) > 20
    known = {*SETTINGS, "tiers", "tenants"}
    assert not {(path, name) for path, name in mentioned if _NAMED.sub(r"\1.<name>", name) not in known}


@pytest.mark.parametrize("setting", [path for path, kind in SETTINGS.items() if kind is None])
def test_each_key_is_read(setting: str) -> None:
    key = setting.rpartition(".")[2]
    # Read as an attribute; some are read by a name from a list of names.
    read = re.compile(rf"\.{key}\b|\"{key}\"")
    assert any(read.search(text) for text in (*sources(".py").values(), *sources(".j2").values())), (
        f"nobody reads {setting}"
    )
