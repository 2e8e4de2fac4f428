"""Answers that are longer than the model has positions are those of a model that reads, at its first
positions, what they take along; whatever becomes of the memory, and whoever computes them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import llguidance
import pytest
import tokenizers
import torch
import transformers

from contract.retention import Retention
from contract.thinking import ThinkingTags
from engine.config import CacheConfig, SchedulerConfig
from engine.runner.runner import ModelRunner
from engine.scheduler import Scheduler
from engine.types import FinishReason, GrammarSpec, Request, SamplingParams
from tests.unit.engine.checkpoints import make_checkpoint
from tests.unit.engine.driver import memory_plan
from tests.unit.engine.runner.cuda.test_device_runner import open_device_runner
from tests.unit.engine.runner.drafting import BUNDLED
from tests.unit.engine.runner.driver import open_runner, prompt_of
from tests.unit.engine.runner.test_retention import BLOCK, generate, mask_of
from tests.unit.engine.runner.test_window import native_or_skip

POSITIONS = 80
# The prompts' lengths, and how many tokens each answer looks at.
LENGTHS = (70, 20, 33)
WINDOWS = (1, 48, 900)
# Four times as many as there are positions.
NUM_TOKENS = 4 * POSITIONS - 20
KEEPS = [Retention(policy="window+sinks", window_tokens=each) for each in WINDOWS]
# What each takes along: three blocks are the least, and more than half of the positions.
CARRIED = 48
SMALL = 40 * 6144


def prompts() -> list[list[int]]:
    return [prompt_of(length, 199, seed=length) for length in LENGTHS]


def stretches(prompt: list[int], answer: list[int]) -> Iterator[tuple[list[int], int]]:
    """What is looked back on at the end of each stretch of positions, and how much of it was before."""
    view, num_before = list(prompt), len(prompt)
    for token in answer:
        if len(view) == POSITIONS:
            yield view, num_before
            view, num_before = view[:BLOCK] + view[BLOCK - CARRIED :], CARRIED
        view.append(token)
    yield view, num_before


def check_greedy(model: transformers.PreTrainedModel, tokens: dict[tuple[int, int], list[int]]) -> None:
    """Every token is the likeliest behind those before it."""
    for number, (prompt, keep) in enumerate(zip(prompts(), KEEPS, strict=True)):
        assert len(tokens[number, 0]) == NUM_TOKENS
        # A window has no more blocks than there are positions.
        kept = Retention(policy="window+sinks", window_tokens=min(keep.tokens_of(0), POSITIONS))
        for view, num_before in stretches(prompt, tokens[number, 0]):
            with torch.no_grad():
                mask = mask_of(len(view), num_before, kept)
                logits = model(torch.tensor([view]), attention_mask=mask, use_cache=False).logits
            assert logits[0, num_before - 1 : -1].argmax(-1).tolist() == view[num_before:]


def streams(runner: ModelRunner, **options: Any) -> dict[tuple[int, int], list[int]]:
    options = {"prefix_caching": True, "max_tokens": NUM_TOKENS, "max_model_len": POSITIONS} | options
    tokens, preemptions = generate(runner, asked_of=list(zip(prompts(), KEEPS, strict=True)), **options)
    assert (preemptions.total() > 0) == (options.get("max_num_seqs") == 2)
    return tokens


@pytest.mark.parametrize(("kernels", "max_num_seqs"), [("torch", 8), ("native", 8), ("native", 2)])
def test_tokens_equal_a_model_that_reads_what_is_taken_along(
    folder: Path, oracle: transformers.PreTrainedModel, kernels: str, max_num_seqs: int
) -> None:
    """In chunks of 13 tokens, beside others, and preempted."""
    options: dict[str, Any] = {"native": native_or_skip() if kernels == "native" else "off"}
    with closing(open_runner(folder, kv_cache_bytes=SMALL, max_model_len=POSITIONS, **options)) as runner:
        tokens = streams(runner, max_num_seqs=max_num_seqs, max_num_batched_tokens=13)
    check_greedy(oracle, tokens)


def test_streams_run_beside_captured_answers(folder: Path, oracle: transformers.PreTrainedModel) -> None:
    with closing(open_device_runner(folder, kv_cache_bytes=SMALL, max_model_len=POSITIONS)) as runner:
        tokens = streams(runner, overlap=True)
    check_greedy(oracle, tokens)


def test_a_model_that_has_learned_its_positions_has_streams(tmp_path: Path) -> None:
    shape = {"n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": POSITIONS, "n_inner": 90}
    model = make_checkpoint(tmp_path, "gpt2", **shape)
    with closing(open_runner(tmp_path)) as runner:
        tokens = streams(runner)
    check_greedy(model, tokens)


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
def test_every_form_of_keys_has_streams(tmp_path: Path, kv_dtype: str) -> None:
    """They go on as a request does whose prompt is what they take along."""
    make_checkpoint(tmp_path, "llama", head_dim=16)
    options = {"prefix_caching": False, "max_model_len": POSITIONS, "max_tokens": POSITIONS - CARRIED}
    with closing(open_runner(tmp_path, cache={"kv_dtype": kv_dtype}, max_model_len=POSITIONS)) as runner:
        tokens = streams(runner)
        third = [list(stretches(each, tokens[i, 0]))[2][0] for i, each in enumerate(prompts())]
        asked_of = [(view[:CARRIED], keep) for view, keep in zip(third, KEEPS, strict=True)]
        # The last one would come late.
        again, _ = generate(runner, asked_of=[*asked_of, ([1], None)], **options)
    assert [again[number, 0] for number in range(3)] == [view[CARRIED:] for view in third]


SAMPLED: dict[str, Any] = {
    "temperature": 0.9,
    "seed": 5,
    "repetition_penalty": 1.3,
    "frequency_penalty": 0.4,
}


def test_draws_and_penalties_know_all_of_the_stream(folder: Path) -> None:
    """Preempted, a stream is told to the runner anew, with what it has left."""
    with closing(open_runner(folder, kv_cache_bytes=SMALL, max_model_len=POSITIONS)) as runner:
        together = streams(runner, **SAMPLED)
        preempted = streams(runner, max_num_seqs=2, **SAMPLED)
        plain = streams(runner, **SAMPLED | {"frequency_penalty": 0.0})
    assert preempted == together
    assert plain != together


TAGS = ThinkingTags(open_id=14, close_id=15, opened=True, line_breaks=(214, 418), blank_line=(418,))
WORDS = GrammarSpec(
    digest="", payload=llguidance.grammar_from("regex", "[a-z ]{300,}[.]").encode(), backend="llguidance/1"
)


def test_thoughts_and_grammars_go_on_beyond_the_positions() -> None:
    """A thought has its budget, and a grammar is led to its end within all of the answer."""
    asked: dict[str, Any] = {"external_id": "", "retention": KEEPS[1]}
    sampling: dict[str, Any] = {"temperature": 0.8, "seed": 1, "ignore_eos": True}
    thinks = SamplingParams(max_tokens=150, max_thinking_tokens=120, logit_bias={15: -100.0}, **sampling)
    guided = SamplingParams(max_tokens=200, **sampling)
    requests = [
        Request(request_id=0, prompt_token_ids=(300, 214), sampling=thinks, thinking=TAGS, **asked),
        Request(request_id=1, prompt_token_ids=(300, 301), sampling=guided, grammar=WORDS, **asked),
    ]
    tokens: tuple[list[int], list[int]] = [], []
    with closing(open_runner(BUNDLED, max_model_len=POSITIONS)) as runner:
        memory = memory_plan(runner.storage.num_blocks, BLOCK, POSITIONS)
        scheduler = Scheduler(SchedulerConfig(), CacheConfig(), memory, model="m")
        for request in requests:
            scheduler.submit(request, 0.0)
        ends = []
        while scheduler.has_work:
            scheduler.update(runner.launch(scheduler.schedule(1.0)).wait(), 1.0)
            for event in scheduler.drain_events():
                tokens[event.request_id].extend(event.token_ids)
                ends += [(event.request_id, event.finish_reason)] if event.finish_reason else []
    assert sorted(ends) == [(0, FinishReason.LENGTH), (1, FinishReason.STOP)]
    assert 119 <= tokens[0].index(15) + 1 <= 120
    text = tokenizers.Tokenizer.from_file(str(BUNDLED / "tokenizer.json")).decode(tokens[1])
    assert re.fullmatch("[a-z ]{300,}[.]", text)
    assert len(tokens[1]) > POSITIONS
