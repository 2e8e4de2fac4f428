"""The configuration file, its overrides, and what is said about mistakes."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.config import ModelConfig, SecurityConfig, load_section, read_tables
from runtime.errors import ConfigError


class Inner(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    size: int = 1
    kind: Literal["off", "int8"] = "off"


class Outer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str = ""
    engines: tuple[str, ...] = ()
    inner: Inner = Inner()


def write(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "millrace.toml"
    file.write_text(text)
    return file


def test_environment_wins_over_the_file(tmp_path: Path) -> None:
    file = write(tmp_path, '[gateway]\nname = "a"\n[gateway.inner]\nsize = 2\n')
    environ = {
        "MILLRACE_GATEWAY__INNER__SIZE": "3",
        "MILLRACE_GATEWAY__ENGINES": '["x:1", "y:2"]',
        "HOME": "/",
    }
    outer = load_section(read_tables(file, environ), "gateway", Outer)
    assert outer == Outer(name="a", engines=("x:1", "y:2"), inner=Inner(size=3))


def test_values_that_are_not_toml_are_text() -> None:
    tables = read_tables(None, {"MILLRACE_MODEL__PATH": "models/some-name", "MILLRACE_MODEL__NAME": '"7"'})
    assert load_section(tables, "model", ModelConfig) == ModelConfig(path="models/some-name", name="7")


@given(st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=40))
def test_any_quoted_text_arrives_unchanged(text: str) -> None:
    import json

    environ = {"MILLRACE_MODEL__PATH": json.dumps(text, ensure_ascii=False)}
    assert read_tables(None, environ)["model"]["path"] == text


def test_variables_of_the_command_line_are_not_configuration() -> None:
    environ = dict.fromkeys(
        ("MILLRACE_DEV_KEY", "MILLRACE_API_KEY", "MILLRACE_STATE_DIR", "MILLRACE_URL"), "x"
    )
    assert read_tables(None, environ) == {}


@pytest.mark.parametrize(
    ("text", "environ", "said"),
    [
        ("[gatway]\n", {}, r"unknown table \[gatway\]; known: .*gateway"),
        ("[gateway\n", {}, "not valid TOML"),
        ("", {"MILLRACE_GATWAY__NAME": "x"}, "MILLRACE_GATWAY__NAME: not a configuration variable"),
        ("", {"MILLRACE_GATEWAY": "x"}, "MILLRACE_GATEWAY: not a configuration variable"),
        ("[gateway]\nname = 'a'\n", {"MILLRACE_GATEWAY__NAME__X": "1"}, "name is not a table"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, text: str, environ: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read_tables(write(tmp_path, text), environ)


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.toml"):
        read_tables(tmp_path / "nowhere.toml", {})


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ({"nmae": 1}, r"gateway\.nmae: .*nmae"),
        ({"inner": {"sise": 1}}, r"gateway\.inner\.sise: .*sise"),
        ({"inner": {"size": "big"}}, r"gateway\.inner\.size: .*int"),
        ({"inner": {"kind": "int5"}}, r"gateway\.inner\.kind: .*'int5'; expected one of int8, off$"),
    ],
)
def test_unknown_keys_and_wrong_types_are_named(table: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_section({"gateway": table}, "gateway", Outer)


def test_served_name() -> None:
    assert ModelConfig(path="/checkpoints/tiny").served_name == "tiny"
    assert ModelConfig(path="/checkpoints/tiny", name="prod").served_name == "prod"


def test_secret_from_a_file_wins(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text("0123456789abcdef\n")
    security = SecurityConfig(context_secret="fedcba9876543210", context_secret_file=str(file))
    assert security.secret() == b"0123456789abcdef"


@pytest.mark.parametrize("secret", ["", "too short"])
def test_short_secret_is_refused_with_the_remedy(secret: str) -> None:
    with pytest.raises(ConfigError, match=r"at least 16 characters.*MILLRACE_SECURITY__CONTEXT_SECRET"):
        SecurityConfig(context_secret=secret).secret()


def test_missing_secret_file_is_named() -> None:
    with pytest.raises(ConfigError, match=r"context_secret_file.*nowhere"):
        SecurityConfig(context_secret_file="nowhere").secret()


@pytest.mark.parametrize(
    "text", ["[model]".encode("utf-16"), b"[model]\nname = '\xff'", b"a = " + b"[" * 50_000]
)
def test_a_file_that_is_no_toml_is_named(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "config.toml").write_bytes(text)
    with pytest.raises(ConfigError, match=r"config\.toml: not valid TOML"):
        read_tables(tmp_path / "config.toml", {})


def test_deep_values_that_are_no_toml_are_text() -> None:
    value = "[" * 50_000
    assert read_tables(None, {"MILLRACE_MODEL__NAME": value}) == {"model": {"name": value}}
