"""What an answer lost of its attention is reported, and never less than full attention beside it says."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Mapping
from contextlib import closing
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import transformers

import engine.runner.forgotten.keys as module
from contract.retention import Retention
from engine.config import CacheConfig, SchedulerConfig
from engine.runner.base import PendingStep
from engine.runner.forgotten.keys import LayerKeys
from engine.runner.runner import ModelRunner
from engine.scheduler import Scheduler
from engine.types import Request, SamplingParams, TokenEvent
from tests.unit.engine.checkpoints import make_checkpoint
from tests.unit.engine.driver import memory_plan
from tests.unit.engine.runner.cuda.test_device_runner import open_device_runner
from tests.unit.engine.runner.driver import open_runner
from tests.unit.engine.runner.test_retention import (
    BLOCK,
    KEEPS,
    LATE_STEP,
    NUM_TOKENS,
    mask_of,
    masked_greedy,
    prompts,
)
from tests.unit.engine.runner.test_window import native_or_skip, poison_free_blocks


@pytest.fixture(scope="module")
def forgetful(oracle: transformers.PreTrainedModel) -> list[list[int]]:
    return [masked_greedy(oracle, prompt, keep) for prompt, keep in zip(prompts(), KEEPS, strict=True)]


def true_shares(
    model: transformers.PreTrainedModel, ids: list[int], num_prompt: int, keep: Retention | None
) -> list[float]:
    """Of each position the share of attention, on average over layers and heads, that it has not for what is
    hidden; from the queries and keys of the masked model, over everything.
    """
    found: list[torch.Tensor] = []

    def attend(layer: Any, q: Any, k: Any, v: Any, mask: Any, scaling: float, **_: Any) -> Any:
        group = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        scores = (q.double() @ k.double().transpose(2, 3)) * scaling
        future = torch.ones(scores.shape[2:], dtype=torch.bool).triu(1)
        whole = scores.masked_fill(future, float("-inf")).softmax(-1)
        found.append(whole.masked_fill(mask == 0, 0.0).sum(-1))
        return ((scores + mask).softmax(-1).float() @ v).transpose(1, 2).contiguous(), None

    transformers.AttentionInterface.register("told", attend)
    model.config._attn_implementation = "told"
    try:
        with torch.no_grad():
            model(torch.tensor([ids]), attention_mask=mask_of(len(ids), num_prompt, keep), use_cache=False)
    finally:
        model.config._attn_implementation = "eager"
    shares: list[float] = torch.cat(found).mean((0, 1)).tolist()
    return shares


def answered(
    runner: ModelRunner, keeps: Mapping[int, Retention | None], *, overlap: bool = False, **given: Any
) -> tuple[dict[int, list[TokenEvent]], dict[int, dict[int, float]], Counter[str]]:
    """Events of the prompts by number, and what the runner said of each position of the first choices; NaN in
    all that nobody holds.
    """
    options = {"max_num_seqs": 8, "prefix_caching": True} | given
    scheduler = Scheduler(
        SchedulerConfig(
            max_num_batched_tokens=48, long_prefill_tokens=32, max_num_seqs=options.pop("max_num_seqs")
        ),
        CacheConfig(prefix_caching=options.pop("prefix_caching")),
        memory_plan(runner.storage.num_blocks, BLOCK, 256),
        model="m",
    )
    outputs = options.pop("outputs", {})
    requests = [
        Request(
            request_id=number,
            external_id="",
            prompt_token_ids=tuple(prompts()[number]),
            output_token_ids=tuple(outputs.get(number, ())),
            sampling=SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, **options),
            # The last one comes late and goes first.
            priority=10 * (number == len(KEEPS) - 1),
            retention=keep,
        )
        for number, keep in keeps.items()
    ]
    for request in requests:
        if not request.priority:
            scheduler.submit(request, 0.0)
    events: dict[int, list[TokenEvent]] = defaultdict(list)
    said: dict[int, dict[int, float]] = defaultdict(dict)
    pending: deque[tuple[Any, PendingStep]] = deque()
    for step in count(1):
        if not scheduler.has_work and not pending and step > LATE_STEP:
            break
        if step == LATE_STEP:
            for request in requests:
                if request.priority:
                    scheduler.submit(request, 5.0)
        plan = scheduler.schedule(10.0)
        launched = bool(plan.scheduled or plan.released)
        if launched:
            pending.append((plan, runner.launch(plan)))
        while len(pending) > (overlap and launched):
            done, outstanding = pending.popleft()
            result = outstanding.wait()
            rows = {row.sequence_id: row for row in done.scheduled}
            owners = {each.sequence_id: each.group.request.request_id for each in scheduler._state.running}
            for each in result.results:
                if each.lost and each.sequence_id in owners:
                    start = rows[each.sequence_id].start
                    said[owners[each.sequence_id]].update(enumerate(each.lost, start))
            scheduler.update(result, 10.0)
        scheduler.check_invariants()
        poison_free_blocks(scheduler, runner)
        for event in scheduler.drain_events():
            events[event.request_id].append(event)
    assert runner.num_states() == 0
    assert scheduler.num_unreferenced_blocks == scheduler.num_total_blocks
    return events, said, Counter(scheduler.load(10.0).counters.preemptions)


def measured(most: float = 1.0, **more: Any) -> dict[int, Retention | None]:
    return {
        number: keep and msgspec.structs.replace(keep, max_lost=most, **more)
        for number, keep in enumerate(KEEPS)
    }


def tokens_of(events: list[TokenEvent], choice: int = 0) -> list[int]:
    return [token for event in events for token in event.token_ids if event.choice_index == choice]


def lost_by(events: list[TokenEvent], choice: int = 0) -> float:
    (found,) = [each.statistics for each in events if each.statistics and each.choice_index == choice]
    return found.lost_tokens


@pytest.mark.parametrize("kernels", ["torch", "native", "device"])
@pytest.mark.parametrize("num_blocks", [30, 80])
def test_a_loss_is_never_above_what_is_said(
    folder: Path,
    oracle: transformers.PreTrainedModel,
    forgetful: list[list[int]],
    kernels: str,
    num_blocks: int,
) -> None:
    options: dict[str, Any] = {"kv_cache_bytes": num_blocks * 6144}
    if kernels == "device":
        opened = open_device_runner(folder, **options)
    else:
        native = {"native": native_or_skip()} if kernels == "native" else {"native": "off"}
        opened = open_runner(folder, **options, **native)
    with closing(opened) as runner:
        assert runner.storage.num_blocks == num_blocks
        events, said, preemptions = answered(
            runner, measured(), overlap=kernels == "device", max_num_seqs=3 if num_blocks == 30 else 8
        )
    assert (preemptions.total() > 0) == (num_blocks == 30)
    for number, keep in enumerate(KEEPS):
        prompt, tokens = prompts()[number], tokens_of(events[number])
        assert tokens == forgetful[number]
        true = true_shares(oracle, [*prompt, *tokens[:-1]], len(prompt), keep)
        assert all(share >= true[position] for position, share in said[number].items())
        assert sum(true) <= lost_by(events[number]) <= 1.1 * sum(true)
        # Every position that forgot something was told.
        assert [each for each, share in enumerate(true) if share > 0] == sorted(said[number])
    assert lost_by(events[2]) == 0.0


@pytest.mark.parametrize(
    ("most", "overlap", "num_blocks"), [(0.05, False, 80), (0.2, True, 80), (0.2, False, 40)]
)
def test_what_would_lose_more_goes_on_as_if_nothing_were_forgotten(
    folder: Path,
    oracle: transformers.PreTrainedModel,
    forgetful: list[list[int]],
    most: float,
    overlap: bool,
    num_blocks: int,
) -> None:
    with closing(open_runner(folder, kv_cache_bytes=num_blocks * 6144)) as runner:
        events, _, preemptions = answered(
            runner, measured(most), overlap=overlap, max_num_seqs=8 if num_blocks == 80 else 3
        )
    assert preemptions["forgotten"] > 0
    for number, keep in enumerate(KEEPS):
        prompt, tokens = prompts()[number], tokens_of(events[number])
        # The tokens that were sent stay: those up to where the answer would have lost too much.
        shares = true_shares(oracle, [*prompt, *tokens[:-1]], len(prompt), keep)[len(prompt) - 1 :]
        sums = np.cumsum(shares) * 1.0001
        over = np.flatnonzero(sums > most * np.arange(1, len(sums) + 1))
        num_sent = int(over[0]) if over.size else len(tokens)
        masked = forgetful[number][:num_sent]
        assert tokens[:num_sent] == masked
        assert tokens == [*masked, *masked_greedy(oracle, [*prompt, *masked], None, NUM_TOKENS - num_sent)]
        assert lost_by(events[number]) <= most * NUM_TOKENS
        assert lost_by(events[number]) == pytest.approx(sum(shares[:num_sent]), rel=0.1)


def test_or_ends_with_an_error_where_the_tier_says_so(folder: Path) -> None:
    with closing(open_runner(folder, kv_cache_bytes=80 * 6144)) as runner:
        events, _, _ = answered(runner, measured(0.05, beyond="refuse"))
    (failure,) = [each.failure for each in events[1] if each.failure]
    assert failure.field == "kv.max_lost"
    assert "more than 0.05; keep more of the prompt" in failure.message
    assert events[2][-1].failure is None


def test_choices_and_a_continued_answer_lose_the_same(folder: Path) -> None:
    with closing(open_runner(folder, kv_cache_bytes=200 * 6144)) as runner:
        keeps = {0: measured()[0]}
        alone, _, _ = answered(runner, keeps)
        choices, _, _ = answered(runner, keeps, n=3, best_of=3)
        rest, _, _ = answered(runner, keeps, outputs={0: tokens_of(alone[0])[:41]})
    whole = lost_by(alone[0])
    assert whole > 0.0
    assert [lost_by(choices[0], choice) for choice in range(3)] == pytest.approx([whole] * 3, rel=1e-6)
    assert tokens_of(rest[0]) == tokens_of(alone[0])[41:]
    assert lost_by(rest[0]) == pytest.approx(whole, rel=1e-6)


@pytest.mark.parametrize(("most_whole", "most_boxes"), [(512, 256), (5, 256), (3, 2)])
@pytest.mark.parametrize("soft_cap", [None, 5.0])
def test_summaries_stay_above_however_little_is_kept(
    monkeypatch: pytest.MonkeyPatch, most_whole: int, most_boxes: int, soft_cap: float | None
) -> None:
    """Random shapes, of keys that have outliers and of which blocks come in several portions."""
    monkeypatch.setattr(module, "MOST_WHOLE_BLOCKS", most_whole)
    monkeypatch.setattr(module, "MOST_BOXES", most_boxes)
    random = np.random.default_rng(7)
    for num_kv, group, dim, size in ((1, 1, 8, 16), (2, 3, 64, 16), (3, 1, 128, 4)):
        layer, portions = LayerKeys(), []
        spread = random.exponential(2.0, dim) * (1 + 10 * (np.arange(dim) % 8 == 0))
        for num_blocks in (1, 7, 2, 1, 12):
            keys = (random.normal(size=(num_kv, num_blocks, size, dim)) * spread).astype(np.float32)
            layer.add(keys)
            portions.append(keys.reshape(num_kv, -1, dim))
            q = (random.normal(size=(num_kv, group, dim), scale=dim**-0.5) / spread).astype(np.float32)
            scores = q.astype(np.float64) @ np.concatenate(portions, 1).swapaxes(1, 2).astype(np.float64)
            scores = scores if soft_cap is None else soft_cap * np.tanh(scores / soft_cap)
            true = np.log(np.exp(scores).sum(-1))
            said = layer.log_mass(q, np.zeros((num_kv, group), np.float32), soft_cap)
            assert (said >= true).all()
            if most_whole == 512:
                assert (said <= true + np.log(1.15)).all()
            arrays = (layer._low, layer._step, layer._levels, layer._lengths, layer._off)
            boxes = (*layer._boxes, layer._counts) if layer._boxes else ()
            planned = num_kv * (size * (dim + 4) + 8 * dim + 4)  # bytes of a block: forgotten_block_bytes
            held = sum(each.nbytes for each in (*arrays, *boxes))
            assert held <= planned * min(layer.num_blocks, most_whole + most_boxes)
    assert layer._levels.shape[1] <= max(most_whole, 1)
    assert layer._counts.size <= most_boxes


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "int8", "fp8"])
def test_keys_are_those_that_the_cache_holds(tmp_path: Path, kv_dtype: str) -> None:
    make_checkpoint(tmp_path, "llama", head_dim=16, num_hidden_layers=1)
    said = []
    for native in (native_or_skip(), "off"):
        options = {"kv_cache_bytes": 80 * 6144, "cache": {"kv_dtype": kv_dtype}, "native": native}
        with closing(open_runner(tmp_path, poison=False, **options)) as runner:
            _, found, _ = answered(runner, {0: measured()[0]})
        said.append(found[0])
    assert said[0].keys() == said[1].keys()
    first = min(said[0])
    # Of the same token: later ones may differ by a rounding.
    assert said[0][first] == pytest.approx(said[1][first], rel=0.05)
