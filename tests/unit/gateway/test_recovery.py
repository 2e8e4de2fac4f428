"""Of gateways that share a folder the ones that live take in what others have left, without a start."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from gateway.ledger.tables import open_ledger
from tests.unit.gateway.ledger.test_journal import _serve_and_die, died
from tests.unit.gateway.ledger.test_writer import rows
from tests.unit.gateway.rig.deployment import deployed
from tests.unit.gateway.rig.engine import ScriptedEngine


async def test_a_gateway_that_runs_takes_in_what_another_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.edge._RECOVERY_INTERVAL_S", 0.05)
    url = f"sqlite:///{tmp_path}/ledger.sqlite"
    async with deployed(ScriptedEngine(), tables={"gateway": {"ledger": {"url": url}}}):
        (own,) = (tmp_path / "ledger.sqlite-open").iterdir()
        await asyncio.to_thread(died, _serve_and_die, url)
        async with asyncio.timeout(60):
            while len(rows(open_ledger(url))) < 4 or list(own.parent.iterdir()) != [own]:
                await asyncio.sleep(0.01)
