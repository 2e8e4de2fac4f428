"""Beam search under a grammar, on the bundled model with the real scheduler and runner."""

from __future__ import annotations

from pathlib import Path

import llguidance
import pytest
from tokenizers import Tokenizer

from engine.config import CacheConfig, SchedulerConfig
from engine.runner.runner import ModelRunner
from engine.runner.sequence_table import SequenceTable
from engine.scheduler import Scheduler
from engine.types import GrammarSpec, NewSequence, Request, SamplingParams, TokenEvent
from tests.unit.engine.driver import memory_plan
from tests.unit.engine.runner.driver import open_runner

BUNDLED = Path("models/millrace-nano")
WIDTH = 4


def guided_by(pattern: str) -> GrammarSpec:
    payload = llguidance.grammar_from("regex", pattern).encode()
    return GrammarSpec(digest="", payload=payload, backend="llguidance/1")


def search(runner: ModelRunner, prompt: tuple[int, ...], grammar: GrammarSpec) -> list[TokenEvent]:
    """The answers of one guided beam search, alone on the engine."""
    memory = memory_plan(64, runner.storage.block_size, 256)
    scheduler = Scheduler(SchedulerConfig(), CacheConfig(), memory, model="m")
    sampling = SamplingParams(
        n=WIDTH,
        best_of=WIDTH,
        beam_width=WIDTH,
        max_tokens=24,
        stop_token_ids=runner.model.spec.eos_token_ids,
    )
    scheduler.submit(
        Request(request_id=1, external_id="1", prompt_token_ids=prompt, sampling=sampling, grammar=grammar),
        0.0,
    )
    events = []
    while scheduler.has_work:
        plan = scheduler.schedule(0.0)
        scheduler.update(runner.launch(plan).wait(), 0.0)
        events += [event for event in scheduler.drain_events() if not event.withheld_tokens]
        scheduler.check_invariants()
    assert runner.num_states() == 0
    return events


def test_answers_obey_the_grammar_and_copied_states_equal_replayed_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    add = SequenceTable.add

    def add_and_replay(table: SequenceTable, new: NewSequence, *, forked: bool = False) -> None:
        add(table, new)

    tokenizer = Tokenizer.from_file(str(BUNDLED / "tokenizer.json"))
    prompt = tuple(tokenizer.encode("The colour of the sky is", add_special_tokens=False).ids)
    runner = open_runner(BUNDLED)
    try:
        for pattern in ("(red|blue|green|a pale grey|[0-9]{3}-[0-9]{2})", "yes|no"):
            grammar = guided_by(pattern)
            events = search(runner, prompt, grammar)
            assert not any(event.failure for event in events)
            assert [event.choice_index for event in events] == list(range(WIDTH))
            for event in events:
                # Raises where a token is not allowed.
                walked = runner.grammar.matcher(grammar, event.token_ids)
                assert walked.finished
            with monkeypatch.context() as patch:
                patch.setattr(SequenceTable, "add", add_and_replay)
                patch.setattr(SequenceTable, "fork", lambda *_: None)
                replayed = search(runner, prompt, grammar)
            assert [event.token_ids for event in replayed] == [event.token_ids for event in events]
    finally:
        runner.close()
