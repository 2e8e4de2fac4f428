"""Every declared metric is written by some process of a stack that is driven through everything it can do."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import suppress

import httpx
import openai
import pytest

from observability.emit import experts, hand_overs, names, retention
from observability.emit.names import METRICS, Metric
from tests.e2e.conftest import needs_weights
from tests.e2e.stack import CONFIG, LIMITED_KEY, Stack, eventually, running_stack

# A small cache, a small batch and host memory: blocks are evicted, moved and brought back, places are lost.
TIGHT = {
    "MILLRACE_ENGINE__SIMULATION__STEP_MS": "5",
    "MILLRACE_ENGINE__SIMULATION__NUM_BLOCKS": "64",
    "MILLRACE_ENGINE__SCHEDULER__MAX_NUM_SEQS": "2",
    # Simulated tokens have a byte each: room for forty blocks.
    "MILLRACE_ENGINE__CACHE__HOST_BYTES": "640",
}
# Prices, so that there is a cost, and targets, so that there is something to meet.
_CONFIG = (
    CONFIG.replace(
        "[tiers.standard]\n",
        '[tiers.standard]\nttft_target_ms = 1000\ntpot_target_ms = 100\nadmission = "best_effort"\n',
    )
    + """
[gateway.prices."*"]
prompt = 1.0
completion = 2.0
"""
)


@pytest.fixture(scope="module")
def tight(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("metrics")
    with running_stack(folder, "--simulated", config=_CONFIG, environment=TIGHT) as stack:
        yield stack


def _complete(stack: Stack, first: int, count: int, max_tokens: int, tier: str = "standard") -> None:
    with stack.openai() as client:
        client.completions.create(
            model=stack.model,
            prompt=[300 + (first + index) % 500 for index in range(count)],
            max_tokens=max_tokens,
            extra_body={"ignore_eos": True, "service_tier": tier},
        )


def _drive_simulated(stack: Stack) -> None:
    # Two prompts that do not fit together, and the first again: evicted, moved out, brought back.
    for first in (0, 250, 0):
        _complete(stack, first, 600, 2)
    with stack.openai() as client:
        stream = client.completions.create(model=stack.model, prompt=[300], max_tokens=900, stream=True)
        next(iter(stream))
        stream.close()
    batch = [threading.Thread(target=_complete, args=(stack, 0, 8, 300, "batch")) for _ in range(2)]
    for each in batch:
        each.start()
    assert eventually(lambda: stack.metrics("engine")[0].value(names.REQUESTS_RUNNING) == 2)
    _complete(stack, 0, 8, 20, "interactive")
    for each in batch:
        each.join()
    with stack.openai(LIMITED_KEY) as client:
        for _ in range(4):
            try:
                client.completions.create(model=stack.model, prompt=[300], max_tokens=1)
            except openai.RateLimitError:
                break


def _run_a_batch(stack: Stack) -> None:
    body = {"model": stack.model, "prompt": [300], "max_tokens": 2}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body}
    with stack.openai() as client:
        file = client.files.create(file=("lines.jsonl", json.dumps(line).encode()), purpose="batch")
        batch = client.batches.create(
            input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
        )
        assert eventually(lambda: client.batches.retrieve(batch.id).status == "completed")


def _lose_the_engine(stack: Stack) -> None:
    # A stream whose engine ends is continued, or counted as not; the engine comes back.
    with stack.openai() as client:
        stream = client.completions.create(model=stack.model, prompt=[300], max_tokens=400, stream=True)
        next(iter(stream))
        os.kill(stack.pid("engine-0"), signal.SIGKILL)
        try:
            for _ in stream:
                pass
        except openai.APIError:
            pass


def _lose_the_gateway(stack: Stack) -> None:
    # The next one finds its journal.
    with stack.openai() as client:
        stream = client.completions.create(model=stack.model, prompt=[300], max_tokens=400, stream=True)
        next(iter(stream))
        os.kill(stack.pid("gateway-0"), signal.SIGKILL)
        with pytest.raises(openai.APIError):
            list(stream)


def _drive_guided(stack: Stack) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    with stack.openai() as client:
        for refused in (False, True):
            # No finite automaton accepts a reference to what was matched before: strictly, that is refused.
            kind = {"type": "string", "pattern": r"(a+)b\1"} if refused else schema
            try:
                client.chat.completions.create(
                    model=stack.model,
                    messages=[{"role": "user", "content": "Yes or no?"}],
                    max_tokens=40,
                    response_format={
                        "type": "json_schema",
                        "json_schema": {"name": "a", "schema": kind, "strict": refused},
                    },
                )
            except openai.BadRequestError:
                assert refused


def _call_a_tool(stack: Stack) -> None:
    tool = {"name": "open", "parameters": {"type": "object", "properties": {"door": {"type": "boolean"}}}}
    with stack.openai() as client:
        client.chat.completions.create(
            model=stack.model,
            messages=[{"role": "user", "content": "Open it."}],
            max_tokens=40,
            tools=[{"type": "function", "function": tool}],  # type: ignore[typeddict-item]
            tool_choice="required",
        )


def _written(stack: Stack) -> set[str]:
    """Families with at least one series, in any process."""
    kinds = ("gateway", "tokenizer", "engine")
    return {
        metric.name
        for kind in kinds
        for reading in stack.metrics(kind)
        for metric in METRICS.values()
        if any(name.startswith(metric.name) for name, _ in reading.samples)
    }


# Of the local span store, which a stack starts without an endpoint of its own, of a limit store that
# gateways share, of devices whose peak is known, of aliases, of drafts and of experts on several ranks, which
# these stacks do not ask for, and of models beside the one that they have: their unit tests read them.
_OF_OTHERS: frozenset[Metric] = frozenset(
    {
        names.SPANS_STORED,
        names.SPANS_DROPPED,
        names.LIMIT_STORE_UP,
        names.PEAK,
        names.FALLBACKS,
        names.SHADOW_REQUESTS,
        names.SHADOW_AGREEMENT,
        names.SHADOW_OUTPUTS,
        names.SHADOW_PAIRS,
        names.SHADOW_TTFT,
        names.SHADOW_TPOT,
        names.SHADOW_COST,
        names.ROUTE_SHARE,
        names.ROUTE_ENGINES,
        names.ROLLOUT_SILENCE,
        names.SPECULATION_SECONDS,
        *hand_overs.ALL,
        *experts.ALL,
        retention.KV_LOST,
    }
)


@needs_weights
def test_no_declared_metric_is_without_a_producer(stack: Stack, tight: Stack) -> None:
    _drive_guided(stack)
    _call_a_tool(stack)
    _drive_simulated(tight)
    _run_a_batch(tight)
    before = _written(tight)
    _lose_the_engine(tight)
    assert eventually(lambda: names.RESUBMISSIONS.name in _written_by_gateways(tight))
    before |= _written_by_gateways(tight)
    _lose_the_gateway(tight)
    assert eventually(lambda: _is_written_by_gateways(tight, names.LEDGER_JOURNALS.name))
    written = before | _written(stack) | _written_by_gateways(tight)
    missing = METRICS.keys() - written - {metric.name for metric in _OF_OTHERS}
    assert not missing, json.dumps(sorted(missing))


def _written_by_gateways(stack: Stack) -> set[str]:
    return {name for reading in stack.metrics("gateway") for name, _ in reading.samples}


def _is_written_by_gateways(stack: Stack, name: str) -> bool:
    # One that was killed is not back at once.
    with suppress(httpx.TransportError):
        return name in _written_by_gateways(stack)
    return False
