"""Commands about keys and usage work on the databases that the stack uses, not on others beside them."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from runtime.config import read_tables
from runtime.errors import ConfigError
from services.cli.owners import configured, last_request, model_settings, remember_request
from services.supervisor.config import BUNDLED_MODEL, DEFAULT_CONFIG
from services.supervisor.state import RunState, own_create_time, write_state

KEYS = "MILLRACE_KEYS__STORE"
LEDGER = "MILLRACE_GATEWAY__LEDGER__URL"


@pytest.fixture
def state(tmp_path: Path) -> Path:
    directory = tmp_path / "state"
    directory.mkdir()
    return directory


@pytest.fixture
def deployed(tmp_path: Path) -> Path:
    path = tmp_path / "deployed.toml"
    path.write_text('[keys]\nstore = "postgresql://keys"\n[tenants.acme]\n')
    return path


def run_stack(state: Path, config: Path, **environment: str) -> None:
    write_state(
        state,
        RunState(
            pid=os.getpid(),
            pid_created_unix_s=own_create_time(),
            address="127.0.0.1:1",
            api_key="k",
            model="m",
            trace_store="",
            config=str(config),
            environment=environment,
        ),
    )


def environ(state: Path) -> dict[str, str]:
    return {"MILLRACE_STATE_DIR": str(state)}


@pytest.mark.parametrize("form", [["--config", "{}"], ["--config={}"]])
def test_named_file_wins_over_the_places_of_a_local_stack(
    state: Path, deployed: Path, form: list[str]
) -> None:
    asked = [*(part.format(deployed) for part in form), "create", "--tenant", "acme"]
    arguments, environment = configured(asked, environ(state))
    assert arguments == asked
    assert read_tables(deployed, environment)["keys"]["store"] == "postgresql://keys"
    # The ledger's default, because the file names none.
    assert environment[LEDGER] == f"sqlite:///{state}/ledger.sqlite"


def test_running_stack_is_asked_for_its_own_file(state: Path, deployed: Path) -> None:
    run_stack(state, deployed, **{LEDGER: "sqlite:///there"})
    for asked in (["list"], ["--config", str(deployed), "list"]):
        arguments, environment = configured(asked, environ(state))
        assert arguments == ["--config", str(deployed), "list"]
        assert (environment[LEDGER], KEYS in environment) == ("sqlite:///there", False)


def test_settings_of_a_running_stack_do_not_go_with_another_file(
    tmp_path: Path, state: Path, deployed: Path
) -> None:
    run_stack(state, tmp_path / "other.toml", **{KEYS: "/of/the/stack"})
    _, environment = configured(["--config", str(deployed), "list"], environ(state))
    assert KEYS not in environment


def test_without_a_stack_the_file_of_millrace_up_is_taken(state: Path) -> None:
    arguments, environment = configured(["list"], environ(state))
    assert arguments == ["--config", str(DEFAULT_CONFIG), "list"]
    assert environment[KEYS] == f"{state}/keys.sqlite"


def test_emptied_place_stays_empty(state: Path, deployed: Path) -> None:
    deployed.write_text('[keys]\nstore = ""\n')
    assert KEYS not in configured(["--config", str(deployed), "list"], environ(state))[1]


def test_file_that_cannot_be_read_is_named(state: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"missing\.toml"):
        configured(["--config", str(tmp_path / "missing.toml"), "list"], environ(state))
    # The module complains about an option without its value, and gives help.
    assert configured(["list", "--config"], environ(state))[0][-1] == "--config"


def test_the_request_that_was_just_sent_is_the_one_that_last_waits_for(state: Path, deployed: Path) -> None:
    environ = {"MILLRACE_STATE_DIR": str(state)}
    remember_request("r-1", environ)
    assert last_request(environ) == []
    run_stack(state, deployed)
    remember_request("r-1", environ)
    assert last_request(environ) == ["--after", "r-1"]
    os.utime(state / "last-request", (0, 0))
    assert last_request(environ) == []


def test_the_plan_is_of_the_model_that_the_file_names(state: Path, tmp_path: Path) -> None:
    file, nano = tmp_path / "millrace.toml", json.dumps(str(BUNDLED_MODEL))
    draft = BUNDLED_MODEL.with_name("millrace-nano-draft")

    def planned(model: str = "") -> dict[str, str]:
        return model_settings(model, None, environ=environ(state), config=file)

    file.write_text(f'[model]\npath = "{draft}"\n')
    assert planned() == {"MILLRACE_MODEL__PATH": json.dumps(str(draft))}
    assert planned(str(BUNDLED_MODEL)) == {"MILLRACE_MODEL__PATH": nano}
    file.write_text("[engine]\n")
    assert planned() == {"MILLRACE_MODEL__PATH": nano}
    file.write_text(f"[models.one]\npath = {nano}\n")
    one = {"MILLRACE_MODEL__NAME": '"one"', "MILLRACE_MODEL__PATH": nano}
    assert planned() == planned("one") == one
    file.write_text(f'[models.one]\npath = {nano}\n[models.two]\npath = "{draft}"\n')
    two = {"MILLRACE_MODEL__NAME": '"two"', "MILLRACE_MODEL__PATH": json.dumps(str(draft))}
    assert planned("two") == two
    assert planned(str(BUNDLED_MODEL)) == {"MILLRACE_MODEL__PATH": nano}
    with pytest.raises(ConfigError, match="several models; name one of them with --model: one, two"):
        planned()
