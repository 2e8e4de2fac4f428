"""Rows that are planned and booked in one look are those of the general way: same plans, events and load."""

from __future__ import annotations

from unittest.mock import patch

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.scheduler.plan_draft import RowWriter
from engine.scheduler.results import ResultHandler
from tests.unit.engine.checked_runner import expected_token
from tests.unit.engine.driver import Driver, memory_plan


@st.composite
def workloads(draw: st.DrawFn) -> tuple[dict[str, object], list[dict[str, object]]]:
    """Options of a driver, and requests with the step at which each comes."""
    options: dict[str, object] = {
        "overlap": draw(st.booleans()),
        "prefix_caching": draw(st.booleans()),
        "window": draw(st.sampled_from([None, 12])),
        "memory": memory_plan(num_blocks=draw(st.sampled_from([8, 12, 64]))),
        "max_num_batched_tokens": draw(st.sampled_from([8, 32])),
    }
    requests = []
    for _ in range(draw(st.integers(1, 8))):
        prompt = [draw(st.integers(0, 3))] * draw(st.integers(1, 14))
        stop = expected_token(tuple(prompt), 0, 0, len(prompt) + 5)
        requests.append(
            {
                "at": draw(st.sampled_from([0, 0, 0, 3, 9])),
                "prompt": prompt,
                "max_tokens": draw(st.integers(1, 18)),
                **draw(st.sampled_from([{}, {}, {}, {"n": 2}, {"beam_width": 2}])),
                "logprobs": draw(st.sampled_from([None, None, 1])),
                "tenant": draw(st.sampled_from(["a", "b"])),
                "stop_token_ids": (stop,) if draw(st.booleans()) else (),
            }
        )
    return options, requests


def run(options: dict[str, object], requests: list[dict[str, object]]) -> Driver:
    driver = Driver(**options)  # type: ignore[arg-type]
    for step in range(400):
        for request in requests:
            if request["at"] == step:
                driver.submit(**{name: value for name, value in request.items() if name != "at"})  # type: ignore[arg-type]
        driver.step()
        if step > 9 and not driver.scheduler.has_work:
            break
    assert not driver.scheduler.num_requests
    return driver


@given(workloads())
def test_as_the_general_way(workload: tuple[dict[str, object], list[dict[str, object]]]) -> None:
    quick = run(*workload)
    with (
        patch.object(RowWriter, "add_next", lambda *given: False),
        patch.object(ResultHandler, "_apply_next", lambda *given: False),
    ):
        general = run(*workload)
    assert quick.plans == general.plans
    assert quick.events == general.events
    assert msgspec.to_builtins(quick.scheduler.load(9.0)) == msgspec.to_builtins(general.scheduler.load(9.0))


def test_most_rows_go_that_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a plain answer, all but the prompt's row, the ends of blocks and the last token."""
    planned = booked = 0
    add_next, take_next = RowWriter.add_next, ResultHandler._apply_next

    def plan(*given: object) -> bool:
        nonlocal planned
        done = add_next(*given)  # type: ignore[arg-type]
        planned += done
        return done

    def book(*given: object) -> bool:
        nonlocal booked
        done = take_next(*given)  # type: ignore[arg-type]
        booked += done
        return done

    monkeypatch.setattr(RowWriter, "add_next", plan)
    monkeypatch.setattr(ResultHandler, "_apply_next", book)
    driver = Driver(memory=memory_plan(block_size=16))
    driver.submit([1] * 8, max_tokens=64)
    driver.run()
    # Positions 8 to 70 follow the prompt: 16, 32, 48 and 64 begin a block, those before them fill one.
    assert planned == 63 - 4
    assert booked == 63 - 4 - 1
