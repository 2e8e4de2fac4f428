"""Causes are planted one after the other in what a running stack serves; `diagnose` names the slice that was
slow and why, from a deployment's store as from the local one, among everything that was served before.

The engine is simulated, so that steps take the time that the plan says and the planted cause is the largest.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from threading import Event

import openai
import pytest

from observability.analysis.scrape import Reading
from observability.analysis.store import SpanReader
from observability.emit import names
from observability.emit.names import Cause
from tests.e2e.stack import LIMIT_S, LIMITED_KEY, Stack, eventually, limited_config, running_stack
from tests.e2e.streaming import Client, tokens
from tests.unit.observability.jaeger_stand_in import jaeger
from tests.unit.observability.prometheus_stand_in import prometheus

PACE = {
    "MILLRACE_ENGINE__SIMULATION__STEP_MS": "10",
    "MILLRACE_ENGINE__SIMULATION__TOKENS_PER_S": "10000",
    "MILLRACE_ENGINE__SIMULATION__NUM_BLOCKS": "512",
    "MILLRACE_ENGINE__SCHEDULER__MAX_NUM_SEQS": "5",
    "MILLRACE_ENGINE__SCHEDULER__MAX_NUM_BATCHED_TOKENS": "1024",
    # Long prompts are held back by nothing.
    "MILLRACE_ENGINE__SCHEDULER__LONG_PREFILL_SHARE": "1.0",
    "MILLRACE_ENGINE__SCHEDULER__STEP_TARGET_MS": "0",
    # Every prompt is computed: a cached one would delay nobody.
    "MILLRACE_ENGINE__CACHE__PREFIX_CACHING": "false",
    # The bundled model has two adapters.
    "MILLRACE_ENGINE__ADAPTERS__SLOTS": "1",
}
READER_KEY = "mr-reader"
# What nobody delays, beside every planted cause: more than the store answers at once. Three are the slowest.
NUM_PLAIN = 40
# Of which the tenant may have two a minute.
NUM_LIMITED = 6


def _ask(client: openai.OpenAI, stack: Stack, num_tokens: int, max_tokens: int) -> str:
    """Id of a request that is answered, by one of many in the same client."""
    answer = client.completions.with_raw_response.create(
        model=stack.model,
        prompt=tokens(num_tokens),
        max_tokens=max_tokens,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    list(answer.parse())
    return str(answer.headers["x-request-id"])


def _plain(stack: Stack) -> list[str]:
    """Short requests, of which there are never more at once than are served together."""
    with stack.openai() as client, ThreadPoolExecutor(3) as pool:
        return list(pool.map(lambda _: _ask(client, stack, 8, 4), range(NUM_PLAIN)))


def _long_prefill(stack: Stack) -> list[str]:
    """One tenant's answers, while another has long prompts computed without a pause."""
    served: list[str] = []
    over = Event()

    def compute(client: openai.OpenAI) -> None:
        while not over.is_set():
            # Nothing follows their first token, so they have no time per token.
            served.append(_ask(client, stack, 2500, 1))

    # While one is answered and asks again, two wait.
    with stack.openai() as client, ThreadPoolExecutor(3) as pool:
        feeders = [pool.submit(compute, client) for _ in range(3)]
        try:
            assert eventually(lambda: bool(served))
            for _ in range(2):
                mine = [Client(stack, tokens(8), 4, key=READER_KEY) for _ in range(2)]
                served += [each.wait() for each in mine]
        finally:
            over.set()
        for feeder in feeders:
            feeder.result()
    return served


def _kv_pressure(stack: Stack) -> list[str]:
    """Prompts for which there is no room beside one that holds nearly all."""
    # It takes less long to be computed than it then holds them.
    holder = Client(stack, tokens(7950), 200)
    assert holder.started.wait(LIMIT_S)
    # All in one step when it has ended, so that they wait for nothing else.
    mine = [Client(stack, tokens(250), 2) for _ in range(4)]
    return [each.wait() for each in (holder, *mine)]


def _preemption(stack: Stack) -> list[str]:
    """A tier that is displaced by a higher one."""
    mine = [Client(stack, tokens(8), 100, tier="batch") for _ in range(5)]
    assert all(each.started.wait(LIMIT_S) for each in mine)
    others = [Client(stack, tokens(8), 60, tier="interactive") for _ in range(5)]
    return [each.wait() for each in (*mine, *others)]


def _cold_adapter(stack: Stack) -> list[str]:
    """An adapter that waits for the only slot."""
    holder = Client(stack, tokens(8), 120, model=f"{stack.model}:pirate")
    assert holder.started.wait(LIMIT_S)
    mine = [Client(stack, tokens(8), 2, model=f"{stack.model}:entries") for _ in range(5)]
    return [each.wait() for each in (holder, *mine)]


def _rate_limit(stack: Stack) -> list[str]:
    """More requests in a minute than the tenant has: those that are served."""
    served, refused = [], []
    with stack.openai(LIMITED_KEY) as client:
        for _ in range(NUM_LIMITED):
            try:
                served.append(_ask(client, stack, 8, 4))
            except openai.RateLimitError as error:
                refused.append(str(error.response.headers["x-request-id"]))
    for request_id in refused:
        stack.trace(request_id, [names.GATEWAY_RATE_LIMIT])
    return served


@dataclass(frozen=True)
class Planted:
    """What is done to some requests, by what `diagnose` judges, and the slice that they are."""

    delay: Callable[[Stack], list[str]]
    metric: str
    # As the verdict begins; {model} is the one that is served.
    slice: str


PLANTED = {
    Cause.LONG_PREFILL: Planted(_long_prefill, "tpot", "tenant reader: "),
    Cause.KV_PRESSURE: Planted(_kv_pressure, "ttft", "prompt length <=512: "),
    Cause.PREEMPTION: Planted(_preemption, "e2e", "tier batch: "),
    Cause.COLD_ADAPTER: Planted(_cold_adapter, "ttft", "model {model}:entries: "),
    Cause.RATE_LIMIT: Planted(_rate_limit, "ttft", f"{Cause.RATE_LIMIT}: "),
}


@dataclass(frozen=True)
class Served:
    """A stack that has served all of it; when each cause was planted, and among which requests."""

    stack: Stack
    times_s: Mapping[Cause, tuple[float, float]]
    # The plain ones first, then those that are named in PLANTED.
    ids: Mapping[Cause, list[str]]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("diagnose")
    config = limited_config("", 60.0, ['[tenants.reader]\ntier = "standard"'], {"reader": READER_KEY})
    with running_stack(folder, "--simulated", config=config, environment=PACE) as stack:
        times_s: dict[Cause, tuple[float, float]] = {}
        ids: dict[Cause, list[str]] = {}
        for cause, planted in PLANTED.items():
            began_s = time.time()
            ids[cause] = [*_plain(stack), *planted.delay(stack)]
            times_s[cause] = (began_s, time.time())
        everyone = {request_id for each in ids.values() for request_id in each}
        assert eventually(lambda: _has_traces(stack, everyone)), stack.transcript()
        yield Served(stack, times_s, ids)


def _has_traces(stack: Stack, ids: set[str]) -> bool:
    """Whether every service has told its part of these requests: each sends its spans by itself."""
    with closing(SpanReader(Path(stack.state.trace_store))) as reader:
        told = [
            {span.request_id for span in reader.spans_named(name, since_ns=0)}
            for name in (names.ENVOY_INGRESS, names.GATEWAY_REQUEST, names.ENGINE_REQUEST)
        ]
    return all(ids <= each for each in told)


@pytest.mark.parametrize("cause", PLANTED)
def test_diagnose_names_the_planted_slice_and_its_cause(served: Served, cause: Cause) -> None:
    stack, planted = served.stack, PLANTED[cause]
    began_s, ended_s = served.times_s[cause]
    # What was planted before and after lies in the same store.
    until = datetime.fromtimestamp(ended_s, UTC).isoformat()
    asked = ("--metric", planted.metric, "--until", until, "--minutes", str((ended_s - began_s) / 60))
    with jaeger(stack.exported) as url, ThreadPoolExecutor() as pool:
        found = pool.submit(stack.command, "diagnose", *asked, "--jaeger", url)
        local = stack.command("diagnose", *asked)
        standing = found.result()
    assert standing == local
    counted, verdict, held_back, *_ = standing.splitlines()
    assert verdict.startswith(planted.slice.format(model=stack.model)), standing
    if cause is Cause.RATE_LIMIT:
        refused = NUM_PLAIN + NUM_LIMITED - len(served.ids[cause])
        told = f"{refused} of tenant limited (REQUEST_RATE_EXCEEDED)"
        assert verdict.endswith(f"{refused} requests were refused by their tenants' limits: {told}"), standing
    else:
        assert f"slowest were held back by {cause}: {cause.meaning}" in held_back, standing
    # Who got a single token has no time per token.
    if planted.metric != "tpot":
        assert counted.startswith(f"{len(served.ids[cause])} requests"), standing


def test_why_and_top_ask_a_deployments_stores(served: Served) -> None:
    """What this stack has really told, where a deployment keeps it."""
    stack = served.stack
    began_s = time.time() - 1.0
    displaced = served.ids[Cause.PREEMPTION][NUM_PLAIN]

    def said(unix_s: float) -> dict[str, Reading]:
        found = [
            (address, reading)
            for kind in ("gateway", "engine")
            for address, reading in zip(stack.addresses(kind, "metrics"), stack.metrics(kind), strict=True)
        ]
        # As of processes that are younger than what is asked for.
        return dict(found) if unix_s >= began_s else {}

    with jaeger(stack.exported) as traces, prometheus(said) as metrics, ThreadPoolExecutor() as pool:
        why = pool.submit(stack.command, "why", displaced, "--jaeger", traces)
        shown = stack.command("top", "--once", "--prometheus", metrics)
        assert Cause.PREEMPTION.meaning in why.result().splitlines()[1]
    tables = [line.split() for line in shown.splitlines()]
    assert "requests/s" in tables[0]
    assert {"batch", "interactive", "standard"} <= {line[0] for line in tables if line}, shown
    (engine,) = stack.addresses("engine", "metrics")
    assert ["engine", engine] in [line[:2] for line in tables], shown
