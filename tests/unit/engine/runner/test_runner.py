"""The runner's contract: failures stay with their sequence, copies, forks, overlap, reports."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch
import transformers

from engine.config import EngineConfig
from engine.runner.build import build_here
from engine.runner.runner import ModelRunner
from engine.types import SamplingParams, ScheduledSequence, SchedulerOutput
from runtime.config import ModelConfig
from runtime.errors import ConfigError
from tests.unit.engine.checkpoints import reference_greedy, reference_logits
from tests.unit.engine.runner.driver import (
    Driver,
    Job,
    generated,
    new_sequence,
    open_runner,
    prompt_of,
)

BUNDLED = Path("models/millrace-nano")


@pytest.fixture
def runner(folder: Path, oracle: transformers.PreTrainedModel) -> Iterator[ModelRunner]:
    runner = open_runner(folder, cache={"host_bytes": 1 << 20})
    yield runner
    runner.close()


def prompted(sequence_id: int, prompt: list[int], blocks: list[int]) -> SchedulerOutput:
    """A step that computes a whole prompt and draws."""
    new = new_sequence(sequence_id, Job(prompt), blocks)
    return SchedulerOutput(0, (new,), (row(sequence_id, 0, len(prompt)),))


def row(sequence_id: int, start: int, count: int = 1) -> ScheduledSequence:
    return ScheduledSequence(sequence_id, start, count, (), True)


def test_bundled_model_equals_transformers() -> None:
    oracle = transformers.AutoModelForCausalLM.from_pretrained(BUNDLED, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(BUNDLED)
    texts = ["Once upon a time", "The capital of", "name: Ada\nage:", "12 + 35 ="]
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is 12 + 35?"}], add_generation_prompt=True
    )
    prompts = [tokenizer(text)["input_ids"] for text in texts] + [list(chat["input_ids"])]
    jobs = generated(BUNDLED, [Job(prompt, num_tokens=24, chunk=16) for prompt in prompts])
    for job in jobs:
        assert job.output == reference_greedy(oracle, job.prompt, 24, job.output)


@pytest.mark.parametrize(("kv_dtype", "tolerance"), [("bfloat16", 0.15), ("int8", 0.3)])
def test_smaller_caches_stay_close(kv_dtype: str, tolerance: float) -> None:
    """The bundled model's log-probabilities of a long prompt hardly change with a compressed cache."""
    oracle = transformers.AutoModelForCausalLM.from_pretrained(BUNDLED, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(BUNDLED)
    prompt = tokenizer("Once upon a time there was a small boat. The boat had a red sail. " * 8)["input_ids"]
    with closing(open_runner(BUNDLED, cache={"kv_dtype": kv_dtype})) as runner:
        scored = SamplingParams(temperature=0.0, prompt_logprobs=0)
        (job,) = Driver(runner).run([Job(prompt, num_tokens=1, sampling=scored, chunk=50)])
    expected = torch.log_softmax(reference_logits(oracle, prompt), -1)[:-1].gather(
        1, torch.tensor(prompt[1:])[:, None]
    )
    ours = torch.tensor([entry.logprob for entry in job.prompt_logprobs])
    assert (ours - expected[:, 0]).abs().mean() < tolerance / 10
    assert (ours - expected[:, 0]).abs().max() < tolerance * 2


def test_beams_get_only_alternatives_that_masks_allow(
    runner: ModelRunner, oracle: transformers.PreTrainedModel
) -> None:
    prompt = prompt_of(20, 199)
    few = (9, 4, 77)
    options = {"temperature": 0.0, "logprobs": 8, "allowed_token_ids": few}
    beam, plain = Driver(runner).run(
        [
            Job(prompt, num_tokens=1, sampling=SamplingParams(**options, beam_width=4)),
            Job(prompt, num_tokens=1, sampling=SamplingParams(**options)),
        ]
    )
    expected = torch.log_softmax(reference_logits(oracle, prompt)[-1], -1)
    ranked = sorted(few, key=lambda token: -float(expected[token]))
    assert list(beam.logprobs[0].top_ids) == ranked
    assert list(beam.logprobs[0].top_logprobs) == pytest.approx(
        [float(expected[token]) for token in ranked], abs=1e-4
    )
    assert len(plain.logprobs[0].top_ids) == 8


def test_a_poisoned_sequence_fails_alone(runner: ModelRunner, oracle: transformers.PreTrainedModel) -> None:
    """An id outside the vocabulary, a bias outside it, and a contradiction of masks end their own sequence
    only.
    """
    good = prompt_of(12, 199)
    jobs = Driver(runner).run(
        [
            Job(good),
            Job([5, 999, 7]),
            Job(good, sampling=SamplingParams(temperature=0.0, logit_bias={-1: 1.0})),
            Job(
                good,
                sampling=SamplingParams(
                    temperature=0.0, allowed_token_ids=(3,), logit_bias={3: float("-inf")}
                ),
            ),
            Job([]),
            Job(prompt_of(257, 199)),
        ]
    )
    assert jobs[0].output == reference_greedy(oracle, good, 8)
    causes = [
        "",
        "token id 999",
        "logit_bias: token id -1",
        "no token is allowed",
        "prompt is empty",
        "257 tokens exceed the 256",
    ]
    for job, cause in zip(jobs, causes, strict=True):
        assert bool(job.failure) == bool(cause)
        assert cause in job.failure


def test_non_finite_logits_fail_their_own_row(
    runner: ModelRunner, oracle: transformers.PreTrainedModel
) -> None:
    """Keys that are NaN, as after a fault of the memory, spoil one history and no other."""
    good, bad = prompt_of(20, 199, seed=1), prompt_of(20, 199, seed=2)
    driver = Driver(runner)
    blocks = driver.take_blocks(40), driver.take_blocks(40)
    new = tuple(new_sequence(index, Job(prompt), blocks[index]) for index, prompt in enumerate((good, bad)))
    first = driver.step(SchedulerOutput(0, new, (row(0, 0, 20), row(1, 0, 20))))
    runner.storage.layers[0].tensors()[0][blocks[1][0]] = float("nan")
    plan = SchedulerOutput(1, scheduled=(row(0, 20), row(1, 20)))
    second = driver.step(plan)
    assert [bool(result.failure) for result in second.results] == [False, True]
    assert "not finite" in second.results[1].failure
    tokens = [result.token_ids[0] for result in (first.results[0], second.results[0])]
    assert tokens == reference_greedy(oracle, good, 2)
    third = driver.step(SchedulerOutput(2, scheduled=plan.scheduled[1:], released=(0,)))
    assert third.results[0].failure == second.results[1].failure
    driver.step(SchedulerOutput(3, released=(0, 1)))
    assert runner.num_states() == 0


def test_overlapped_launch_finds_the_token_of_the_step_before(
    runner: ModelRunner, oracle: transformers.PreTrainedModel
) -> None:
    prompt = prompt_of(30, 199)
    blocks = Driver(runner).take_blocks(60)
    pending = [runner.launch(prompted(1, prompt, blocks))]
    tokens = []
    for step in range(9):
        pending.append(runner.launch(SchedulerOutput(step + 1, (), (row(1, 30 + step),))))
        tokens.extend(pending.pop(0).wait().results[0].token_ids)
    tokens.extend(pending.pop().wait().results[0].token_ids)
    assert tokens == reference_greedy(oracle, prompt, 10)


def test_fork_continues_both_ways(runner: ModelRunner, oracle: transformers.PreTrainedModel) -> None:
    """A child with a copied last block goes its own way: both continue from what they share."""
    prompt = prompt_of(20, 199)
    driver = Driver(runner)
    blocks = driver.take_blocks(48)
    spare = driver.take_blocks(16)[0]
    driver.step(prompted(1, prompt, blocks))
    biased = SamplingParams(temperature=0.0, logit_bias={4: 1e4})
    child = new_sequence(2, Job(prompt, sampling=biased), [blocks[0], spare])
    results = []
    for step in range(3):
        plan = SchedulerOutput(
            step + 1,
            (child,) if step == 0 else (),
            (row(1, 20 + step), row(2, 19 + step)),
            block_copies=((blocks[1], spare),) if step == 0 else (),
            forks=((1, 2),) if step == 0 else (),
        )
        results.append(driver.step(plan).results)
    assert [result[0].token_ids[0] for result in results] == reference_greedy(oracle, prompt, 4)[1:]
    assert [result[1].token_ids[0] for result in results] == [4, 4, 4]


def test_fork_without_a_new_sequence_copies_everything(
    runner: ModelRunner, oracle: transformers.PreTrainedModel
) -> None:
    prompt = prompt_of(16, 199)
    driver = Driver(runner)
    blocks = driver.take_blocks(16)
    driver.step(prompted(1, prompt, blocks))
    fresh = driver.take_blocks(32)
    scheduled = tuple(ScheduledSequence(index + 1, 16, 1, (fresh[index],), True) for index in (0, 1))
    results = driver.step(SchedulerOutput(1, scheduled=scheduled, forks=((1, 2),))).results
    assert results[0].token_ids == results[1].token_ids == (reference_greedy(oracle, prompt, 2)[1],)


def test_offload_and_restore_bring_a_history_back(
    runner: ModelRunner, oracle: transformers.PreTrainedModel
) -> None:
    prompt = prompt_of(32, 199)
    driver = Driver(runner)
    blocks = driver.take_blocks(32)
    driver.step(prompted(1, prompt, blocks))
    driver.step(SchedulerOutput(1, offloads=((blocks[0], 3), (blocks[1], 0)), released=(1,)))
    for tensor in (tensor for layer in runner.storage.layers for tensor in layer.tensors()):
        tensor[blocks] = float("nan")
    elsewhere = driver.take_blocks(48)
    first = reference_greedy(oracle, prompt, 2)
    plan = SchedulerOutput(
        2,
        (new_sequence(2, Job(prompt + first[:1]), elsewhere),),
        (row(2, 32),),
        restores=((3, elsewhere[0]), (0, elsewhere[1])),
    )
    assert driver.step(plan).results[0].token_ids == (first[1],)


def test_logprobs_are_the_models_own(runner: ModelRunner, oracle: transformers.PreTrainedModel) -> None:
    """Log-probabilities are of the model's distribution, not of what penalties and temperature made of it."""
    prompt = prompt_of(25, 199)
    sampling = SamplingParams(temperature=2.0, seed=3, top_k=4, frequency_penalty=1.0, logprobs=5)
    (job,) = Driver(runner).run([Job(prompt, sampling=sampling)])
    expected = torch.log_softmax(reference_logits(oracle, prompt + job.output[:-1]), -1)[len(prompt) - 1 :]
    for entry, token, row in zip(job.logprobs, job.output, expected, strict=True):
        assert entry.token_id == token
        assert entry.logprob == pytest.approx(float(row[token]), abs=1e-4)
        best = torch.topk(row, 5)
        assert list(entry.top_ids) == best.indices.tolist()
        assert list(entry.top_logprobs) == pytest.approx(best.values.tolist(), abs=1e-4)


def test_a_step_that_breaks_raises_and_the_next_one_works(
    runner: ModelRunner, oracle: transformers.PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = prompt_of(10, 199)
    driver = Driver(runner)
    plan = prompted(1, prompt, driver.take_blocks(32))
    with monkeypatch.context() as patch:
        patch.setattr(runner.model, "forward", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            runner.launch(plan).wait()
    again = SchedulerOutput(1, scheduled=plan.scheduled)
    assert driver.step(again).results[0].token_ids == (reference_greedy(oracle, prompt, 1)[0],)


def test_unknown_attention_back_end_is_refused_by_name(
    folder: Path, oracle: transformers.PreTrainedModel
) -> None:
    with pytest.raises(ConfigError, match=r"attention_backend = 'warp'.*reference, torch"):
        build_here(
            EngineConfig(attention_backend="warp"), ModelConfig(path=str(folder)), lambda phase, part: None
        )
