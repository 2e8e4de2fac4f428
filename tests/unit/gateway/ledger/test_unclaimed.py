"""What was computed for a gateway that is gone is in the row that its journal leaves, once."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from gateway.ledger import unclaimed
from gateway.ledger.journal import _read
from gateway.ledger.tables import open_ledger
from gateway.ledger.unclaimed import UnclaimedTokens
from gateway.limits.limiter import Charges

from .test_journal import begun, died, progress, take_in, url
from .test_writer import finished, rows, writer

__all__ = ["url"]


def _tell_seven_and_die(url: str) -> None:
    ledger = writer(url)
    ledger.begin(begun("cut"), Charges()).record(progress(7, candidate_tokens=2))
    ledger.record(finished("whole"))
    os.kill(os.getpid(), signal.SIGKILL)


def test_the_row_of_a_killed_gateway_has_what_was_computed_beyond_what_it_told(url: str) -> None:
    died(_tell_seven_and_die, url)
    engine = open_ledger(url)
    heirs = [UnclaimedTokens(engine) for _ in range(2)]
    take_in(url)
    cut, whole = rows(engine)
    for heir in heirs:
        # Two engines had the one after another; the other's end was on its way.
        for num_tokens in (12, 30, 20):
            heir.note({cut["entry_id"]: num_tokens, whole["entry_id"]: 99, "of another ledger": 5})
        heir.write()
        heir.write()
    found = {row["request_id"]: row for row in rows(engine)}
    assert {name: row["unclaimed_tokens"] for name, row in found.items()} == {"cut": 30 - 7 - 2, "whole": 0}
    assert found["cut"]["cost_nanos"] == cut["cost_nanos"], "nobody pays for what nobody was told"
    engine.dispose()


def test_what_comes_before_the_row_waits_for_it(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    died(_tell_seven_and_die, url)
    (path,) = Path(f"{url.removeprefix('sqlite:///')}-open").iterdir()
    heir = UnclaimedTokens(open_ledger(url))
    entry_ids = [each.request.entry_id for each in _read(path.read_bytes(), 0)[0]]
    heir.note(dict.fromkeys(entry_ids, 10))
    heir.write()
    take_in(url)
    heir.write()
    assert [row["unclaimed_tokens"] for row in rows(open_ledger(url))] == [1, 0]
    heir.note({"never comes": 4})
    monkeypatch.setattr(unclaimed.time, "monotonic", lambda: 1e12)
    heir.write()
    assert not heir._waiting
