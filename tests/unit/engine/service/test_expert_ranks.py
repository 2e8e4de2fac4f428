"""Experts of a real engine change ranks under its streams, which nobody notices but the metrics."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from checkpoint.vocabulary import checkpoint_fingerprint
from kernels.native.library import NativeUnavailableError, load_native
from observability.emit import experts
from tests.unit.engine.runner.driver import prompt_of
from tests.unit.engine.runner.test_expert_moves import skewed
from tests.unit.engine.service.engine_client import ROOT, Engine, Gateway, start_engine, tokens

VOCAB_SIZE, NUM_REQUESTS = 2048, 16
SETTINGS = {
    "SIMULATED": "false",
    "NATIVE": "required",
    "NUM_THREADS": "2",
    "CACHE__KV_CACHE_BYTES": str(16 << 20),
    "METRICS_LISTEN": "127.0.0.1:0",
}

try:
    load_native()
except NativeUnavailableError as reason:
    pytest.skip(f"no native kernels: {reason}", allow_module_level=True)


async def answers(gateway: Gateway, first: int) -> list[list[int]]:
    """Of prompts that are the same each time but for their numbers."""
    for number in range(NUM_REQUESTS):
        prompt = prompt_of(100 + number, VOCAB_SIZE, seed=number)
        options = {"temperature": number % 2 * 0.8, "seed": number, "ignore_eos": True}
        await gateway.submit(first + number, prompt, max_tokens=80, **options)
    outputs = await gateway.until_ended(NUM_REQUESTS)
    return [tokens(outputs[first + number, 0]) for number in range(NUM_REQUESTS)]


async def metric(engine: Engine, name: str) -> float:
    """As the engine's page has it."""
    async with httpx.AsyncClient(trust_env=False) as client:
        page = (await client.get(f"http://{engine.metrics}/metrics")).text
    found = [each for family in text_string_to_metric_families(page) for each in family.samples]
    (value,) = [each.value for each in found if each.name == name]
    return value


async def test_experts_of_an_engine_change_ranks_under_its_streams(tmp_path: Path) -> None:
    skewed(tmp_path, vocab_size=VOCAB_SIZE)
    for path in (ROOT / "models/millrace-nano").glob("tokenizer*"):
        shutil.copy(path, tmp_path)
    found = []
    for ranks in ({}, {"PARALLEL__EXPERT": "2"}):
        async with start_engine(str(tmp_path), **SETTINGS, **ranks) as engine:
            gateway = Gateway(engine, checkpoint_fingerprint(str(tmp_path)))
            await gateway.hello()
            found.append(await answers(gateway, 0))
            if not ranks:
                continue
            async with asyncio.timeout(120):
                first = NUM_REQUESTS
                while await metric(engine, experts.MOVES.name) < 6 or (
                    await metric(engine, experts.IMBALANCE.name) > 1.3
                ):
                    assert await answers(gateway, first) == found[0]
                    first += NUM_REQUESTS
            books = await engine.wait_until_idle()
            assert books.ok, books.violation
    assert found[0] == found[1]
