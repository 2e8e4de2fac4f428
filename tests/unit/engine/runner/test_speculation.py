"""Speculation changes how many steps an output takes, and never the output."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import llguidance
import numpy as np
import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st

from engine.config import SpeculationConfig
from engine.runner.runner import ModelRunner
from engine.runner.speculation.economics import LEAST_MARGIN, DraftProgress, Economics, StepCost
from engine.runner.speculation.ngram import continuation
from engine.types import GrammarSpec, SamplingParams
from tests.unit.engine.checkpoints import make_checkpoint, reference_logits
from tests.unit.engine.runner.driver import GREEDY, Driver, Job, generated, open_runner, prompt_of

BUNDLED = Path("models/millrace-nano")
SCHEMA = {
    "type": "object",
    "properties": {"full_name": {"type": "string", "maxLength": 5}, "birthday": {"type": "boolean"}},
    "required": ["full_name", "birthday"],
    "additionalProperties": False,
}
GRAMMAR = GrammarSpec(
    digest="",
    payload=llguidance.LLMatcher.grammar_from_json_schema(SCHEMA, {"whitespace_flexible": False}).encode(),
    backend="llguidance/1",
)
SAMPLINGS = [
    GREEDY,
    SamplingParams(temperature=0.8, top_p=0.9, seed=3, logprobs=2),
    SamplingParams(temperature=0.7, seed=4, presence_penalty=0.7, frequency_penalty=0.4),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("llama")


@pytest.fixture(scope="module")
def oracle(folder: Path) -> transformers.PreTrainedModel:
    return make_checkpoint(folder, "llama")


@pytest.fixture(scope="module", params=["ngram", "suffix", "draft_model"])
def runner(
    request: pytest.FixtureRequest, folder: Path, oracle: transformers.PreTrainedModel
) -> Iterator[ModelRunner]:
    """The draft model is a noisy copy of the target: often right, not always."""
    draft = folder / "draft"
    with torch.no_grad():
        noisy = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        torch.manual_seed(5)
        for parameter in noisy.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
        noisy.save_pretrained(draft)
    speculation = SpeculationConfig(
        method=request.param, draft_model=str(draft), min_ngram=1, min_acceptance=0.0
    )
    runner = open_runner(folder, speculation=speculation, cache={"block_size": 4})
    yield runner
    runner.close()


def jobs_of(speculate: bool) -> list[Job]:
    """Prompts that repeat themselves, so that prompt lookup finds something, under every kind of sampling."""
    return [
        Job(
            prompt_of(9, 199, seed=index) * 4,
            num_tokens=30,
            sampling=SAMPLINGS[index % 3],
            chunk=17,
            speculate=speculate,
        )
        for index in range(9)
    ]


def test_output_is_the_same_with_and_without(runner: ModelRunner) -> None:
    plain = Driver(runner, seed=1).run(jobs_of(speculate=False))
    drafted = Driver(runner, seed=2).run(jobs_of(speculate=True))
    for one, other in zip(plain, drafted, strict=True):
        assert other.output[:30] == one.output
        assert other.logprobs[: len(one.logprobs)] == one.logprobs
    assert sum(job.num_drafted for job in drafted) > 0
    assert sum(job.num_steps for job in drafted) < sum(job.num_steps for job in plain)


def test_draft_model_agrees_with_itself(folder: Path, oracle: transformers.PreTrainedModel) -> None:
    """The target as its own draft: nearly every draft is accepted, sampled ones included, so the draws are
    coupled.
    """
    jobs = generated(
        folder,
        jobs_of(speculate=True),
        speculation=SpeculationConfig(method="draft_model", draft_model=str(folder), min_acceptance=0.0),
    )
    drafted, accepted = sum(job.num_drafted for job in jobs), sum(job.num_accepted for job in jobs)
    assert drafted > 100
    assert accepted == drafted


def test_distribution_with_drafts_is_exact(runner: ModelRunner, oracle: transformers.PreTrainedModel) -> None:
    """Two tokens drawn with drafts for both, over many seeds, against the product of the exact softmaxes."""
    few, prompt, num_seeds = (3, 50, 120, 7), prompt_of(5, 199, seed=8), 2400
    jobs = [
        Job(
            prompt,
            num_tokens=2,
            sampling=SamplingParams(temperature=3.0, seed=seed, allowed_token_ids=few),
            drafts={0: (few[0], few[1])},
        )
        for seed in range(num_seeds)
    ]
    counts = np.zeros((4, 4))
    for start in range(0, num_seeds, 400):
        for job in Driver(runner).run(jobs[start : start + 400]):
            counts[few.index(job.output[0]), few.index(job.output[1])] += 1

    def exact(context: list[int]) -> np.ndarray:
        row = reference_logits(oracle, context)[-1][torch.tensor(few)].double() / 3.0
        return torch.softmax(row, -1).numpy()

    first = exact(prompt)
    joint = np.stack([first[index] * exact([*prompt, few[index]]) for index in range(4)])
    expected = num_seeds * joint
    statistic = float(((counts - expected) ** 2 / expected).sum())
    assert abs(statistic - 15) / math.sqrt(2 * 15) < 5
    assert sum(job.num_accepted for job in jobs) > 0


def test_guided_decoding_with_drafts_and_forced_tokens() -> None:
    """The grammar forces keys: they come in one step each, and the output is that of plain decoding."""
    prompt = prompt_of(10, 2000)
    outputs = []
    for method in ("off", "ngram", "suffix", "draft_model"):
        speculation = SpeculationConfig(method=method, draft_model=str(BUNDLED), min_acceptance=0.0)
        with closing(open_runner(BUNDLED, speculation=speculation, max_model_len=1024)) as runner:
            driver = Driver(runner)
            for speculate in (False, True):
                jobs = [
                    Job(prompt, num_tokens=60, sampling=sampling, grammar=GRAMMAR, speculate=speculate)
                    for sampling in SAMPLINGS
                ]
                done = driver.run(jobs)
                outputs.append([job.output for job in done])
                assert all(job.grammar_finished for job in done)
                if speculate:
                    assert sum(job.num_steps for job in done) < 0.8 * sum(len(job.output) for job in done)
    assert all(found == outputs[0] for found in outputs)


def measured(*, plain_s: float, per_row_s: float, per_draft_s: float, num_sequences: int = 1) -> Economics:
    """Economics that have seen plain steps, steps with drafts, and proposals."""
    economics = Economics(4, 0.05)
    for num_drafts in (0, 0, 0, 2, 2, 2):
        seconds = plain_s + per_row_s * num_drafts
        economics.stepped(
            StepCost(seconds=seconds, num_sequences=num_sequences, num_drafts=num_drafts, decodes_only=True)
        )
        economics.proposed(num_sequences, 2, 2 * per_draft_s)
    for costs in economics._sizes.values():
        # These steps accepted nothing; what they teach is not the matter here.
        costs.margin, costs.balance = LEAST_MARGIN, 0.0
    return economics


def with_acceptance(share: float) -> DraftProgress:
    return DraftProgress(num_tried=1000, num_accepted=round(1000 * share))


@pytest.mark.parametrize(
    ("share", "per_row_s", "per_draft_s", "expected"),
    [
        # Free drafts: as many as there may be. Then each next one must be worth its cost.
        (0.9, 0.0, 0.0, 4),
        (0.9, 0.01, 0.1, 4),
        (0.5, 0.01, 0.2, 2),
        (0.5, 0.01, 0.3, 1),
        (0.5, 0.0, 0.6, 0),
        (0.1, 0.05, 0.06, 0),
        (0.01, 0.0, 0.0, 0),
    ],
)
def test_drafts_are_as_many_as_pay_in_measured_time(
    share: float, per_row_s: float, per_draft_s: float, expected: int
) -> None:
    economics = measured(plain_s=1.0, per_row_s=per_row_s, per_draft_s=per_draft_s)
    assert economics.drafts([with_acceptance(share)], looks_up=False) == [expected]


def test_drafts_that_turn_out_to_lose_time_stop() -> None:
    """The estimate says that they pay, the steps say otherwise."""
    economics = measured(plain_s=1.0, per_row_s=0.0, per_draft_s=0.2)
    hopeful = with_acceptance(0.6)
    assert economics.drafts([hopeful], looks_up=False) != [0]
    for _ in range(30):
        economics.proposed(1, 2, 0.4)
        economics.stepped(StepCost(seconds=1.0, num_sequences=1, num_drafts=2, decodes_only=True))
    assert economics.drafts([hopeful], looks_up=False) == [0]


def test_a_draft_models_forwards_are_shared_and_paid_by_those_who_profit() -> None:
    economics = measured(plain_s=1.0, per_row_s=0.0, per_draft_s=0.3, num_sequences=4)
    good, bad = with_acceptance(0.9), with_acceptance(0.1)
    # A forward of 0.3 s gains 0.9 tokens of 1 / 4 s for one of them, and four times that for all.
    assert economics.drafts([good, bad, bad, bad], looks_up=False) == [0, 0, 0, 0]
    assert economics.drafts([good] * 4, looks_up=False) == [4, 4, 4, 4]
    few = economics.drafts([good, good, good, bad], looks_up=False)
    assert all(few[:3])
    assert few[3] == 0


def test_what_does_not_pay_is_tried_again_ever_less_often() -> None:
    economics = measured(plain_s=1.0, per_row_s=0.0, per_draft_s=5.0)
    trials = [step for step in range(1000) if economics.drafts([with_acceptance(0.5)], looks_up=False) != [0]]
    assert 4 <= len(trials) <= 8
    gaps = [after - before for before, after in itertools.pairwise(trials)]
    assert gaps == sorted(gaps)


def test_nothing_is_proposed_until_a_plain_step_was_measured_and_it_is_measured_again() -> None:
    economics = Economics(4, 0.05)
    fine = with_acceptance(0.9)
    assert economics.drafts([fine], looks_up=False) == [0]
    economics.stepped(StepCost(seconds=1.0, num_sequences=1, num_drafts=0, decodes_only=True))
    proposals = []
    for _ in range(200):
        (count,) = economics.drafts([fine], looks_up=False)
        proposals.append(count)
        economics.stepped(StepCost(seconds=1.0, num_sequences=1, num_drafts=count, decodes_only=True))
    assert 1 <= proposals.count(0) <= 4


def test_new_sequences_begin_with_what_others_accepted() -> None:
    economics = Economics(4, 0.05)
    for _ in range(100):
        economics.verified(DraftProgress(), 4, 0)
    fresh = economics.acceptance(DraftProgress())
    assert fresh < 0.1
    assert economics.acceptance(with_acceptance(0.9)) > 0.85


@given(
    tokens=st.lists(st.integers(0, 3), min_size=1, max_size=40),
    longest=st.integers(1, 5),
    shortest=st.integers(1, 3),
    num_drafts=st.integers(1, 6),
)
def test_prompt_lookup_finds_what_brute_force_finds(
    tokens: list[int], longest: int, shortest: int, num_drafts: int
) -> None:
    expected: tuple[int, ...] = ()
    for size in range(longest, shortest - 1, -1):
        starts = [at for at in range(len(tokens) - size) if tokens[at : at + size] == tokens[-size:]]
        if starts and size < len(tokens):
            expected = tuple(tokens[starts[-1] + size : starts[-1] + size + num_drafts])
            break
    found = continuation(np.array(tokens), longest=longest, shortest=shortest, num_drafts=num_drafts)
    assert found == expected
