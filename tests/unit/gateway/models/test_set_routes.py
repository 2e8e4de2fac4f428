"""Weights that a rollout has set: when they hold, when the file does, and when nobody watches any more."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest
from sqlalchemy import Engine

from contract.errors import MillraceError, Reason
from gateway.models.route_store import RouteWeights, beat, open_route_store, read_weights, write_weights
from gateway.models.route_watch import RouteWatch
from gateway.models.routes import SetRoute
from tests.unit.gateway.models.test_served import TWO, answer, engine
from tests.unit.gateway.rig.deployment import Deployment, deployed

FILE = {"big": 100.0, "small": 0.0}
SET = RouteWeights(
    alias="chat",
    weights={"big": 0.0, "small": 100.0},
    without=FILE,
    configured=FILE,
    is_running=True,
    heartbeat=1,
)


def tables(folder: Path, **rollout: Any) -> dict[str, Any]:
    return {
        "served": {**TWO, "routes": {"chat": FILE}},
        "gateway": {
            "rollout": {"url": f"sqlite:///{folder / 'routes.sqlite'}", "interval_s": 0.02, **rollout}
        },
    }


@pytest.fixture
def database(tmp_path: Path) -> Any:
    engine = open_route_store(f"sqlite:///{tmp_path / 'routes.sqlite'}")
    yield engine
    engine.dispose()


def write(database: Engine, weights: RouteWeights) -> None:
    with database.begin() as connection:
        write_weights(connection, weights)


async def until(stack: Deployment, **shares: float) -> None:
    """Until the gateway says that these are in force."""
    wanted = [
        f'millrace_route_share_ratio{{alias="chat",model="{model}"}} {share}'
        for model, share in shares.items()
    ]
    page = ""
    while not all(line in page for line in wanted):
        await asyncio.sleep(0.01)
        page = (await stack.http.get("/metrics")).text


async def test_what_is_set_holds_within_an_interval_and_requests_that_run_stay(
    tmp_path: Path, database: Engine
) -> None:
    big, small = engine("big"), engine("small")
    async with deployed(big, small, tables=tables(tmp_path)) as stack:
        assert (await answer(stack, model="chat"))[0] == "big"
        big.gate.clear()
        running = asyncio.create_task(answer(stack, model="chat"))
        while len(big.submissions) < 2:
            await asyncio.sleep(0.01)
        write(database, SET)
        await until(stack, big=0.0, small=1.0)
        assert (await answer(stack, model="chat"))[0] == "small"
        big.gate.set()
        assert (await running)[0] == "big"
        page = (await stack.http.get("/metrics")).text
        assert 'millrace_route_engines{alias="chat",model="small"} 1.0' in page
        assert 'millrace_rollout_silence_seconds{alias="chat"}' in page
        write(database, msgspec.structs.replace(SET, weights=FILE, is_running=False))
        await until(stack, big=1.0, small=0.0)
        assert (await answer(stack, model="chat"))[0] == "big"
        assert "millrace_rollout_silence_seconds{" not in (await stack.http.get("/metrics")).text


async def test_a_gateway_that_starts_serves_what_is_set_from_its_first_request(
    tmp_path: Path, database: Engine
) -> None:
    write(database, SET)
    async with deployed(engine("big"), engine("small"), tables=tables(tmp_path, interval_s=3600.0)) as stack:
        assert (await answer(stack, model="chat"))[0] == "small"


async def test_a_share_is_the_same_keys_in_every_gateway(tmp_path: Path, database: Engine) -> None:
    write(database, msgspec.structs.replace(SET, weights={"big": 70.0, "small": 30.0}))
    told: list[list[str]] = []
    for _ in range(2):
        async with deployed(engine("big"), engine("small"), tables=tables(tmp_path)) as stack:
            told.append(
                [(await answer(stack, model="chat", prompt_cache_key=str(key)))[0] for key in range(40)]
            )
    assert told[0] == told[1]
    assert 3 < Counter(told[0])["small"] < 25


async def test_a_database_that_is_lost_changes_nothing(
    tmp_path: Path, database: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    write(database, SET)
    async with deployed(engine("big"), engine("small"), tables=tables(tmp_path)) as stack:
        with database.begin() as connection:
            connection.exec_driver_sql("ALTER TABLE route_weights RENAME TO gone")
        while "what rollouts have set cannot be read" not in caplog.text:
            await asyncio.sleep(0.01)
        assert (await answer(stack, model="chat"))[0] == "small"


async def test_a_refusal_counts_for_the_model_that_the_alias_led_to(tmp_path: Path, database: Engine) -> None:
    write(database, SET)
    small = engine("small", refusal=MillraceError(Reason.QUEUE_LIMIT_EXCEEDED, "full"))
    async with deployed(engine("big"), small, tables=tables(tmp_path)) as stack:
        assert (await stack.chat(model="chat")).status_code == 429
        stack.gateway._edge.deferred.flush()
        page = (await stack.http.get("/metrics")).text
        assert 'model="small",outcome="refused"' in page


def test_a_file_that_says_something_else_by_now_wins() -> None:
    route = SetRoute({"big": 99.0, "small": 1.0}, FILE, FILE)
    assert route.over(FILE, 0.0) == {"big": 99.0, "small": 1.0}
    edited = {"big": 0.0, "small": 100.0}
    assert route.over(edited, 0.0) == edited


async def test_nobody_watches_for_too_long_and_the_candidate_is_out(tmp_path: Path, database: Engine) -> None:
    async with deployed(engine("big"), engine("small"), tables=tables(tmp_path)) as stack:
        gateway = stack.gateway
        # A clock of its own, ahead or behind as the test wants.
        now_s = [0.0]
        watch = RouteWatch(gateway._config, gateway._catalog, stack.metrics, clock=lambda: now_s[0])
        mortal = msgspec.structs.replace(SET, dead_man_s=30.0)
        watch.take([mortal])
        route = gateway._catalog._set_routes["chat"]
        assert route.over(FILE, 29.9) == SET.weights
        assert route.over(FILE, 30.0) == FILE
        # The same heartbeat, read again, is no sign of life; another one is.
        now_s[0] = 20.0
        watch.take([mortal])
        assert gateway._catalog._set_routes["chat"].ends_s == 30.0
        watch.take([msgspec.structs.replace(mortal, heartbeat=2)])
        assert gateway._catalog._set_routes["chat"].ends_s == 50.0
        # What is over does not die.
        watch.take([msgspec.structs.replace(mortal, is_running=False)])
        assert gateway._catalog._set_routes["chat"].over(FILE, 1e9) == SET.weights


def test_a_sign_of_life_is_one(database: Engine) -> None:
    write(database, SET)
    with database.begin() as connection:
        beat(connection, "chat", 7)
        (found,) = read_weights(connection)
    assert found == msgspec.structs.replace(SET, heartbeat=7)
