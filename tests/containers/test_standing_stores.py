"""A deployment's own Jaeger and Prometheus are asked. Causes are planted in what a running stack serves with
its real engine, and `diagnose` names the slice and why.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from threading import Event
from typing import Any

import httpx
import pytest

from observability.emit import names
from observability.emit.names import Cause
from tests.containers.engine import (
    JAEGER,
    KEY,
    LIMIT_PER_MINUTE,
    LIMIT_S,
    LIMITED_KEY,
    MODEL,
    PROMETHEUS,
    READER_KEY,
    Compose,
    ask,
    run,
    wait_until,
)

pytestmark = pytest.mark.timeout(900)

# What nobody delays, beside every planted cause. Three are the slowest.
NUM_PLAIN = 40
# As shipped an engine has so many places in the batch.
NUM_PLACES = 64
_numbers = itertools.count()


def _post(url: str, key: Mapping[str, str], body: dict[str, Any]) -> None:
    with httpx.Client(trust_env=False, timeout=LIMIT_S) as client:
        answer = client.post(url, json={"model": MODEL, **body}, headers=dict(key))
        assert answer.status_code == 200, answer.text


def _complete(
    stack: Compose, num_tokens: int, max_tokens: int, *, key: Mapping[str, str] = KEY, **more: Any
) -> None:
    """An answer to a prompt that is in no cache."""
    drawn = random.Random(next(_numbers))
    prompt = [drawn.randrange(300, 1000) for _ in range(num_tokens)]
    body = {"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, **more}
    _post(f"{stack.url}/v1/completions", key, body)


def _long_prefill(stack: Compose) -> None:
    """One tenant's answers, while another has long prompts computed without a pause."""
    over = Event()

    def compute() -> None:
        while not over.is_set():
            # Nothing follows their first token, so they have no time per token.
            _complete(stack, 3000, 1)

    with ThreadPoolExecutor(3) as pool:
        feeders = [pool.submit(compute) for _ in range(3)]
        try:
            for _ in range(5):
                _complete(stack, 8, 8, key=READER_KEY)
        finally:
            over.set()
        for feeder in feeders:
            feeder.result()


def _preemption(stack: Compose) -> None:
    """A tier that holds all places, and is displaced by a higher one."""
    num_each = 8
    num_requests = NUM_PLACES // num_each
    options = {"n": num_each, "temperature": 1.0}
    with ThreadPoolExecutor(2 * num_requests) as pool:
        lower = options | {"service_tier": "flex"}
        are_full = Event()

        def hold() -> None:
            # However long it takes to see that no place is left, none is until then.
            while not are_full.is_set():
                _complete(stack, 8, 400, **lower)

        mine = [pool.submit(hold) for _ in range(num_requests)]
        try:
            wait_until(lambda: _num_running(stack) == NUM_PLACES, "places are left")
        finally:
            are_full.set()
        higher = options | {"service_tier": "priority"}
        others = [pool.submit(_complete, stack, 8, 60, **higher) for _ in range(num_requests)]
        for each in (*mine, *others):
            each.result()


def _num_running(stack: Compose) -> float:
    """Sequences in the engines' batches."""
    return sum(each.value(names.REQUESTS_RUNNING) for each in stack.metrics("engine").values())


def _grammar_compile(stack: Compose) -> None:
    """Schemas that nobody has asked for before, each of them large."""
    for _ in range(5):
        number = next(_numbers)
        properties = {
            f"key {each}": {"enum": [f"choice {number} {each} {choice}" for choice in range(100)]}
            for each in range(60)
        }
        schema = {"type": "object", "properties": properties, "required": list(properties)}
        schema["additionalProperties"] = False
        form = {"type": "json_schema", "json_schema": {"name": "planted", "schema": schema}}
        _complete(stack, 8, 4, ignore_eos=False, response_format=form)


# By what `diagnose` judges, and as its verdict begins.
PLANTED: Mapping[Cause, tuple[Callable[[Compose], None], str, str]] = {
    Cause.LONG_PREFILL: (_long_prefill, "tpot", "tenant reader: "),
    Cause.PREEMPTION: (_preemption, "e2e", "tier batch: "),
    Cause.GRAMMAR_COMPILE: (_grammar_compile, "ttft", "guided json_schema: "),
}


@pytest.mark.parametrize("cause", PLANTED)
def test_diagnose_names_the_planted_slice_and_its_cause(plain: Compose, cause: Cause) -> None:
    plant, metric, verdict = PLANTED[cause]
    began_s = time.time()
    for _ in range(NUM_PLAIN):
        _complete(plain, 8, 4)
    plant(plain)
    ended_s = time.time()
    # What was served before and after lies in the same store.
    until = datetime.fromtimestamp(ended_s, UTC).isoformat()
    asked = ("--metric", metric, "--until", until, "--minutes", str((ended_s - began_s) / 60))
    told = ""

    def is_told() -> bool:
        nonlocal told
        told = _diagnose(*asked)
        # Where the processors are busy, not all of a tier's requests are displaced: then the cause tells the
        # slow ones apart better than the tier does.
        is_named = any(f"\n{slice_}" in told for slice_ in (verdict, f"delayed by {cause}: "))
        return is_named and f"slowest were held back by {cause}: {cause.meaning}" in told

    try:
        wait_until(is_told, "diagnose does not name what was planted")
    finally:
        print(f"\n{told}")


def test_whom_limits_refused_is_told(plain: Compose) -> None:
    for _ in range(3 * LIMIT_PER_MINUTE):
        ask(plain.url, key=LIMITED_KEY)

    def is_told() -> bool:
        # There are to be enough answers to compare slices of.
        assert ask(plain.url).status_code == 200
        return "of tenant limited (REQUEST_RATE_EXCEEDED)" in _diagnose()

    wait_until(is_told, "diagnose does not tell whom limits refused")
    wait_until(_top_shows_engines, "top shows no engine")


def _top_shows_engines() -> bool:
    """It fails until Prometheus has looked for the first time, which it does every ten seconds."""
    try:
        return "engine" in run(".venv/bin/millrace", "top", "--once", "--prometheus", PROMETHEUS)
    except AssertionError:
        return False


def _diagnose(*options: str) -> str:
    command = (".venv/bin/millrace", "diagnose", "--jaeger", JAEGER, *options)
    return run(*command, environment={"COLUMNS": "300"})
