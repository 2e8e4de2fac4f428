"""Answers of models whose layers carry a state are the same with drafts as without, bit by bit, whoever
drafts and however well: by the real scheduler and runner, in batches of greedy, sampled and guided requests.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

import pytest

from engine.config import EngineConfig, SchedulerConfig
from engine.model.plan import make_plan, plan_input
from engine.model.state_memory import state_room
from engine.runner.speculation.draft_model import DraftModel
from engine.speculation_config import SpeculationConfig
from runtime.config import ModelConfig
from tests.unit.engine.checkpoints import make_checkpoint
from tests.unit.engine.driver import Driver
from tests.unit.engine.model.hybrids import HYBRIDS
from tests.unit.engine.runner.drafting import BUNDLED, GRAMMAR
from tests.unit.engine.runner.driver import poison_floats, prompt_of
from tests.unit.engine.runner.test_states import engine

VOCABULARY = 2048
# The delta rule, Mamba 2, short convolutions; real-gated units, in layers that have a window beside them.
FAMILIES = ["qwen3-next", "granite-4", "lfm2", "recurrent-gemma", "kimi-linear", "minimax"]
Method = Literal["ngram", "suffix", "draft_model"]
# Who drafts: by looking up, by the model itself and by others, which are wrong nearly always.
DRAFTERS: dict[str, tuple[Method, str]] = {
    "ngram": ("ngram", ""),
    "suffix": ("suffix", ""),
    "itself": ("draft_model", "target"),
    "hopeless hybrid": ("draft_model", "other"),
    "hopeless llama": ("draft_model", "llama"),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """By family: models with a tokenizer, so that grammars hold."""
    made = tmp_path_factory.mktemp("hybrids")

    def write(folder: Path, model_type: str, **changes: Any) -> None:
        make_checkpoint(folder, model_type, **changes, vocab_size=VOCABULARY)
        shutil.copy(BUNDLED / "tokenizer.json", folder)

    write(made / "llama", "llama", num_hidden_layers=1)

    @cache
    def of(family: str) -> Path:
        model_type, changes = HYBRIDS[family]
        for name, seed in (("target", 0), ("other", 1)):
            write(made / family / name, model_type, seed=seed, **changes)
        (made / family / "llama").symlink_to(made / "llama")
        return made / family

    return of


@dataclass
class Told:
    """What requests were told, and what it took."""

    answers: list[Any] = field(default_factory=list)
    num_drafted: int = 0
    num_accepted: int = 0
    num_cached: int = 0


def serve(folder: Path, speculation: SpeculationConfig, **options: Any) -> Told:
    """Everything at once, then what begins with an answer, then an answer that another engine began."""
    motif = prompt_of(6, VOCABULARY - 1)
    prompts = [[*motif, 5 + number, *motif, 9, *motif[: 2 + number], *motif] for number in range(4)]
    found = Told()
    with engine(folder, speculation=speculation, **options) as driver:
        _poison_draft(driver)
        requests = [
            driver.submit(prompts[0], max_tokens=48, temperature=0.0, logprobs=2),
            # Of few tokens, so that what comes was there before.
            driver.submit(
                prompts[1],
                max_tokens=40,
                temperature=0.05,
                seed=3,
                logprobs=1,
                allowed_token_ids=tuple(motif),
            ),
            driver.submit(prompts[2], max_tokens=40, temperature=0.4, seed=4, frequency_penalty=0.4),
            driver.submit(prompts[3], max_tokens=40, temperature=0.2, seed=5, grammar=GRAMMAR),
            driver.submit(prompts[3], max_tokens=24, temperature=0.3, seed=6, n=2),
        ]
        driver.run()
        said = driver.tokens(requests[0])
        turn = [*prompts[0], *said, 7]
        requests.append(driver.submit(turn, max_tokens=12, temperature=0.0))
        driver.run()
        known = tuple(said[:20])
        requests.append(driver.submit(prompts[0], max_tokens=40, temperature=0.0, output_token_ids=known))
        driver.run()
        for request in requests:
            events = [each for each in driver.events[request] if each.token_ids or each.finish_reason]
            choices = range(driver.requests[request].sampling.n)
            logprobs = [each for event in events for each in event.logprobs]
            found.answers.append(([driver.tokens(request, each) for each in choices], logprobs))
        ended = [each.statistics for events in driver.events.values() for each in events if each.statistics]
        found.num_drafted = sum(count for each in ended for count, _ in _drafts(each, speculation.method))
        found.num_accepted = sum(count for each in ended for _, count in _drafts(each, speculation.method))
        found.num_cached = driver.scheduler.load(driver.now).counters.prefix_hit_tokens
        assert found.answers[6][0][0] == said[20:40]
    return found


def _drafts(statistics: Any, method: str) -> Iterator[tuple[int, int]]:
    if method in statistics.drafts:
        yield statistics.drafts[method]


def _poison_draft(driver: Driver) -> None:
    drafter = driver.runner.proposer.drafter  # type: ignore[attr-defined]
    if isinstance(drafter, DraftModel):
        for layer in drafter.storage.layers:
            for tensor in layer.tensors():
                poison_floats(tensor)


@pytest.mark.parametrize(
    ("family", "native", "overlap"),
    [
        *((family, "required", False) for family in FAMILIES),
        ("qwen3-next", "required", True),
        ("granite-4", "off", False),
    ],
)
def test_answers_are_those_without_drafts(family: str, native: str, overlap: bool, folders: Any) -> None:
    folder = folders(family)
    options: dict[str, Any] = {"native": native, "overlap": overlap}
    plain = serve(folder / "target", SpeculationConfig(), **options)
    assert plain.num_cached
    for name, (method, draft) in DRAFTERS.items():
        if native == "off" and method == "suffix":
            continue
        speculation = SpeculationConfig(
            method=method, draft_model=str(folder / draft), min_ngram=1, min_acceptance=0.0
        )
        drafted = serve(folder / "target", speculation, **options)
        assert drafted.answers == plain.answers, name
        assert drafted.num_drafted, name
        if name == "itself":
            assert drafted.num_accepted > 0.8 * drafted.num_drafted
        elif draft:
            assert drafted.num_accepted < 0.3 * drafted.num_drafted
        else:
            assert 0 < drafted.num_accepted < drafted.num_drafted


@pytest.mark.parametrize("family", FAMILIES)
def test_preempted_answers_are_those_without_drafts(family: str, folders: Any) -> None:
    folder = folders(family)
    plain, _, _ = grown(folder / "target", SpeculationConfig())
    num_preempted = 0
    for name in ("ngram", "itself", "hopeless hybrid"):
        method, draft = DRAFTERS[name]
        speculation = SpeculationConfig(
            method=method, draft_model=str(folder / draft), min_ngram=1, min_acceptance=0.0
        )
        size = scarce(folder / "target", speculation)
        answers, num_drafted, num = grown(folder / "target", speculation, kv_cache_bytes=size)
        num_preempted += num
        assert num_drafted, name
        assert answers == plain, name
    assert num_preempted


def grown(folder: Path, speculation: SpeculationConfig, **options: Any) -> tuple[list[Any], int, int]:
    """Six answers that grow to five blocks each; how many tokens were drafted, and sequences preempted."""
    motif = prompt_of(8, VOCABULARY - 1)
    with engine(folder, speculation=speculation, **options) as driver:
        _poison_draft(driver)
        requests = [
            driver.submit([*motif, 5 + number, *motif, 9, *motif], max_tokens=44, temperature=0.1 * number)
            for number in range(6)
        ]
        driver.run()
        ended = [each.statistics for events in driver.events.values() for each in events if each.statistics]
        drafted = sum(count for each in ended for count, _ in _drafts(each, speculation.method))
        counters = driver.scheduler.load(driver.now).counters
        return [driver.tokens(request) for request in requests], drafted, counters.num_preemptions


def scarce(folder: Path, speculation: SpeculationConfig) -> int:
    """Bytes of a cache of ten blocks, with as few states as there can be."""
    config = EngineConfig(
        dtype="float32",
        max_model_len=128,
        speculation=speculation,
        scheduler=SchedulerConfig(max_num_seqs=6, max_num_batched_tokens=40),
    )
    given = plan_input(config, ModelConfig(path=str(folder)), device="cpu", available_bytes=8 << 30)
    plan, room = make_plan(given), state_room(given.spec, config, 1)
    return 10 * plan.block_size * plan.kv_bytes_per_token + room.least_bytes
