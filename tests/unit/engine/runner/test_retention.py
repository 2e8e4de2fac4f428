"""Answers that forget are those of a model whose attention is masked so, by every back end, whatever becomes
of the memory.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from contract.retention import Retention
from engine.config import CacheConfig, EngineConfig, KvDtype, SchedulerConfig
from engine.runner.base import PendingStep
from engine.runner.build import build_here
from engine.runner.runner import ModelRunner
from engine.scheduler import Scheduler
from engine.types import Request, SamplingParams
from runtime.config import ModelConfig
from tests.unit.engine.checkpoints import make_checkpoint
from tests.unit.engine.driver import memory_plan
from tests.unit.engine.runner.cuda.test_device_runner import open_device_runner
from tests.unit.engine.runner.driver import open_runner, prompt_of
from tests.unit.engine.runner.test_window import computed_by, poison_free_blocks

BLOCK = 16
NUM_TOKENS = 70
LATE_STEP = 45
LENGTHS = (130, 20, 97, 64)
KEEPS = (
    Retention(policy="window+sinks", keep=0.4),
    Retention(policy="window+sinks", window_tokens=1),
    None,
    Retention(policy="window+sinks", window_tokens=60),
)


@pytest.fixture(scope="module")
def expected(oracle: transformers.PreTrainedModel) -> list[list[int]]:
    return [masked_greedy(oracle, prompt, keep) for prompt, keep in zip(prompts(), KEEPS, strict=True)]


def prompts() -> list[list[int]]:
    return [prompt_of(length, 199, seed=length) for length in LENGTHS]


def mask_of(num_tokens: int, num_prompt: int, keep: Retention | None) -> torch.Tensor:
    """[1, 1, T, T], added to scores: what is written in DESIGN.md, position by position."""
    queries, keys = torch.arange(num_tokens)[:, None], torch.arange(num_tokens)[None]
    hidden = keys > queries
    if keep is not None:
        asked = keep.window_tokens if keep.keep is None else keep.keep * num_prompt
        assert asked is not None
        num_blocks = max(3, int(-(-asked // BLOCK)))
        forgets = queries >= max(num_prompt, num_blocks * BLOCK)
        is_old = keys // BLOCK <= queries // BLOCK - (num_blocks - 1)
        hidden |= forgets & is_old & (keys >= BLOCK)
    return torch.zeros(num_tokens, num_tokens).masked_fill(hidden, float("-inf"))[None, None]


def masked_greedy(
    model: transformers.PreTrainedModel,
    prompt: list[int],
    keep: Retention | None,
    num_tokens: int = NUM_TOKENS,
) -> list[int]:
    """Greedy continuation, every step computed from scratch."""
    ids = list(prompt)
    for _ in range(num_tokens):
        with torch.no_grad():
            logits = model(
                torch.tensor([ids]), attention_mask=mask_of(len(ids), len(prompt), keep), use_cache=False
            ).logits
        ids.append(int(logits[0, -1].argmax()))
    return ids[len(prompt) :]


def test_forgetting_changes_the_answer(
    oracle: transformers.PreTrainedModel, expected: list[list[int]]
) -> None:
    whole = [masked_greedy(oracle, prompt, None) for prompt in prompts()]
    assert [ours == theirs for ours, theirs in zip(expected, whole, strict=True)] == [
        False,
        False,
        True,
        False,
    ]


def generate(
    runner: ModelRunner,
    *,
    prefix_caching: bool,
    num_host_blocks: int = 0,
    max_num_seqs: int = 8,
    overlap: bool = False,
    asked_of: Sequence[tuple[list[int], Retention | None]] = (),
    max_num_batched_tokens: int = 48,
    max_model_len: int = 256,
    kv_dtype: KvDtype = "auto",
    **sampling: Any,
) -> tuple[dict[tuple[int, int], list[int]], Counter[str]]:
    """Tokens by (request, choice), and preemptions by cause; NaN in all that nobody holds. The last request
    comes late and goes first. `asked_of`: other prompts than those above, with what may be forgotten of them.
    """
    asked_of = asked_of or list(zip(prompts(), KEEPS, strict=True))
    scheduler = Scheduler(
        SchedulerConfig(
            max_num_batched_tokens=max_num_batched_tokens, long_prefill_tokens=32, max_num_seqs=max_num_seqs
        ),
        CacheConfig(prefix_caching=prefix_caching, kv_dtype=kv_dtype),
        memory_plan(runner.storage.num_blocks, runner.storage.block_size, max_model_len),
        model="m",
        num_host_blocks=num_host_blocks,
    )
    asked = SamplingParams(**{"temperature": 0.0, "max_tokens": NUM_TOKENS} | sampling)
    requests = [
        Request(
            request_id=number,
            external_id="",
            prompt_token_ids=tuple(prompt),
            sampling=asked,
            priority=10 * (number == len(asked_of) - 1),
            retention=keep,
        )
        for number, (prompt, keep) in enumerate(asked_of)
    ]
    for request in requests[:-1]:
        scheduler.submit(request, 0.0)
    tokens: dict[tuple[int, int], list[int]] = {}
    pending: deque[PendingStep] = deque()
    step = 0
    while scheduler.has_work or pending:
        step += 1
        if step == LATE_STEP:
            scheduler.submit(requests[-1], 5.0)
        plan = scheduler.schedule(10.0)
        launched = bool(plan.scheduled or plan.released)
        if launched:
            pending.append(runner.launch(plan))
        while len(pending) > (overlap and launched):
            scheduler.update(pending.popleft().wait(), 10.0)
        scheduler.check_invariants()
        poison_free_blocks(scheduler, runner)
        for event in scheduler.drain_events():
            assert event.failure is None, event.failure
            tokens.setdefault((event.request_id, event.choice_index), []).extend(event.token_ids)
    assert runner.num_states() == 0
    assert scheduler.num_unreferenced_blocks == scheduler.num_total_blocks
    return tokens, Counter(scheduler.load(10.0).counters.preemptions)


def check_among_others(runner: ModelRunner, expected: list[list[int]], **options: Any) -> None:
    """Answers that run together are `expected`; where there are few blocks, they are preempted."""
    is_scarce = runner.storage.num_blocks < 60
    tokens, preemptions = generate(runner, max_num_seqs=3 if is_scarce else 8, **options)
    assert (preemptions.total() > 0) == is_scarce
    assert tokens == {(number, 0): each for number, each in enumerate(expected)}


@pytest.mark.parametrize("kernels", ["torch", "reference", "native"])
@pytest.mark.parametrize(
    ("num_blocks", "prefix_caching", "host_bytes"), [(30, False, 0), (30, True, 1 << 17), (60, True, 0)]
)
def test_tokens_equal_a_masked_model(
    folder: Path,
    expected: list[list[int]],
    kernels: str,
    num_blocks: int,
    prefix_caching: bool,
    host_bytes: int,
) -> None:
    options = computed_by(kernels) | {"cache": {"host_bytes": host_bytes}}
    with closing(open_runner(folder, kv_cache_bytes=num_blocks * 6144, **options)) as runner:
        assert runner.storage.num_blocks == num_blocks
        check_among_others(
            runner, expected, prefix_caching=prefix_caching, num_host_blocks=host_bytes // 6144
        )


@pytest.mark.parametrize("overlap", [False, True])
def test_answers_that_forget_run_beside_captured_ones(
    folder: Path, expected: list[list[int]], overlap: bool
) -> None:
    """Graphs of a GPU, whose rules are checked on a CPU."""
    with closing(open_device_runner(folder, kv_cache_bytes=60 * 6144)) as runner:
        tokens, preemptions = generate(runner, prefix_caching=True, max_num_seqs=3, overlap=overlap)
    assert preemptions.total() > 0
    assert tokens == {(number, 0): each for number, each in enumerate(expected)}


def test_choices_and_beams_of_one_are_the_same_answer(folder: Path, expected: list[list[int]]) -> None:
    with closing(open_runner(folder, kv_cache_bytes=200 * 6144)) as runner:
        choices, _ = generate(runner, prefix_caching=True, n=3, best_of=3)
        beams, _ = generate(runner, prefix_caching=True, beam_width=1)
    for number, each in enumerate(expected):
        assert [choices[number, choice] for choice in range(3)] == [each] * 3
        assert beams[number, 0] == each


@pytest.mark.parametrize(
    ("family", "changes", "because"),
    [
        ("llama", {}, ""),
        ("mistral", {"sliding_window": 32}, "layers of it have a window of their own"),
    ],
)
def test_a_model_says_why_it_forgets_nothing(
    tmp_path: Path, family: str, changes: dict[str, Any], because: str
) -> None:
    make_checkpoint(tmp_path, family, **changes)
    config = EngineConfig(cache=CacheConfig(kv_cache_bytes=1 << 20))
    runner, _, facts = build_here(config, ModelConfig(path=str(tmp_path)), lambda phase, part: None)
    runner.close()
    assert facts.remembers_because == because
