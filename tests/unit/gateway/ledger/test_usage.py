"""Sums by any dimension, for people and for programs."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from contract.outputs import EngineTime
from gateway.ledger.__main__ import main
from gateway.ledger.tables import open_ledger
from gateway.ledger.usage import usage

from .test_writer import finished, writer

DAY_S = 24 * 3600
FIRST_DAY_S = 1_793_491_200  # 2026-11-01T00:00Z


@pytest.fixture
def config(tmp_path: Path) -> Path:
    url = f"sqlite:///{tmp_path}/ledger.sqlite"
    ledger = writer(url)
    for day, tenant, tier in [(0, "a", "gold"), (0, "a", "gold"), (1, "a", "batch"), (1, "b", "gold")]:
        moment_ms = 1000 * (FIRST_DAY_S + day * DAY_S + DAY_S - 1)
        ledger.record(finished("r", tenant=tenant, key_id=f"{tenant}-1", tier=tier, ended_unix_ms=moment_ms))
    ledger.close()
    path = tmp_path / "millrace.toml"
    path.write_text(f'[gateway.ledger]\nurl = "{url}"\n')
    return path


def test_sums_by_tenant_and_tier(config: Path) -> None:
    rows = usage(open_ledger(f"sqlite:///{config.parent}/ledger.sqlite"), ["tenant", "tier"])
    assert [(row.group, row.numbers["num_requests"]) for row in rows] == [
        (("a", "batch"), 1),
        (("a", "gold"), 2),
        (("b", "gold"), 1),
    ]
    both = SimpleNamespace(**rows[1].numbers)
    assert (both.computed_prompt_tokens, both.cached_prompt_tokens, both.completion_tokens) == (80, 120, 20)
    assert (both.speculative_waste_tokens, both.recomputed_tokens) == (8, 6)
    assert both.queue_ms == pytest.approx(40)
    assert both.candidate_tokens == 14
    assert both.cost == pytest.approx(2 * 80e-6)


def test_sums_by_path_and_by_the_prompts_length(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/ledger.sqlite"
    ledger = writer(url)
    for path, prompt_tokens, seconds in [("plain", 100, 1.0), ("plain", 129, 2.0), ("cached", 50_000, 4.0)]:
        spent = EngineTime(prefill_s=seconds, decode_s=0.5)
        ledger.record(finished("r", path=path, prompt_tokens=prompt_tokens, engine_time=spent))
    ledger.close()
    rows = usage(open_ledger(url), ["path", "bucket"])
    assert [(row.group, row.numbers["engine_prefill_s"], row.numbers["engine_decode_s"]) for row in rows] == [
        (("cached", ">32768"), 4.0, 0.5),
        (("plain", "<=128"), 1.0, 0.5),
        (("plain", "<=512"), 2.0, 0.5),
    ]
    # An hour costs 7200, a second 2.
    assert sum(row.numbers["engine_cost"] for row in rows) == pytest.approx((7.0 + 1.5) * 2.0)


def test_period_holds_its_first_moment_and_not_its_last(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = ["--config", str(config), "--format", "json"]
    assert main([*base, "--by", "day", "--since", "2026-11-01", "--until", "2026-11-02"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["day"], row["num_requests"]) == ("2026-11-01", 2)
    assert main([*base, "--by", "", "--tenant", "a", "--since", "2026-11-01T23:59:59"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["num_requests"] == 3


def test_table_and_csv(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--config", str(config), "--by", "key"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:2] == ["key", "requests"]
    assert [line.split()[:2] for line in lines[1:]] == [["a-1", "3"], ["b-1", "1"]]
    assert main(["--config", str(config), "--by", "tenant", "--format", "csv"]) == 0
    assert capsys.readouterr().out.splitlines()[1].startswith("a,3,120,180,30,")


def test_a_dimension_that_is_named_twice_is_one_column(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--config", str(config), "--by", "key,key"]) == 0
    told = capsys.readouterr().out
    assert main(["--config", str(config), "--by", "key"]) == 0
    assert told == capsys.readouterr().out


def test_unknown_dimension_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--by", "tenant,weather"]) == 2
    assert "--by weather: use of tenant, tier" in capsys.readouterr().err
