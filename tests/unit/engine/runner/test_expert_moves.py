"""Experts that change ranks under way: loads become even, and answers keep the bits of one process."""

from __future__ import annotations

import signal
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file, save_file

from engine.config import CacheConfig, EngineConfig, ParallelConfig, SchedulerConfig
from engine.model.families import read_spec
from engine.model.rank_checks import check_ranks
from engine.runner.base import RunnerBroken
from engine.runner.build import build_here
from engine.runner.ranks import balance, group
from engine.runner.ranks.balance import BalanceRule, ExpertBalance
from engine.runner.ranks.placement import group_loads, imbalance
from engine.runner.runner import ModelRunner
from engine.scheduler import Scheduler
from engine.types import Request, SamplingParams
from engine.types.experts import ExpertSpread
from kernels.native.library import NativeUnavailableError, load_native
from runtime.config import ModelConfig
from runtime.errors import ConfigError
from tests.unit.engine.checkpoints import make_checkpoint
from tests.unit.engine.driver import memory_plan
from tests.unit.engine.forked import running_ranks
from tests.unit.engine.model.test_families import CASES
from tests.unit.engine.quantization.test_gguf import SIZES, write_experts
from tests.unit.engine.runner.driver import Driver, Job, open_runner, prompt_of
from tests.unit.engine.runner.ranked import shared

pytestmark = pytest.mark.usefixtures("no_rank_stays", "parts_are_kept")
GREEDY = SamplingParams(temperature=0.0, logprobs=5)
# Of a few steps, and rows.
RULE = BalanceRule(look_steps=4, least_rows=64, half_life_rows=512)
NUM_EXPERTS = 8
# What is left where a group has one expert that is used, and one of these is used more.
EVEN = 1.3

try:
    load_native()
except NativeUnavailableError as reason:
    pytest.skip(f"no native kernels: {reason}", allow_module_level=True)


def skewed(folder: Path, **changes: Any) -> None:
    """A checkpoint of which every token takes two of the first four experts, one of each two."""
    sizes = {"num_local_experts": NUM_EXPERTS, "num_experts_per_tok": 2, "num_hidden_layers": 3}
    make_checkpoint(folder, "mixtral", **sizes, **changes)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for name, gate in tensors.items():
        if name.endswith(".gate.weight"):
            gate[4:] = 0.0
            gate[1], gate[3] = -gate[0], -gate[2]
    save_file(tensors, path, metadata={"format": "pt"})


@pytest.fixture
def piece_bytes(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Has so much of an expert go over before a step; and experts move after a few steps."""
    monkeypatch.setattr(balance, "RULE", RULE)
    shape = group.ranks_shape

    def set_to(num_bytes: int) -> None:
        monkeypatch.setattr(
            group, "ranks_shape", lambda *given: replace(shape(*given), piece_bytes=num_bytes)
        )

    return set_to


def answers(driver: Driver, *lengths: int, num_tokens: int = 40) -> list[tuple[list[int], list[float]]]:
    """Tokens and log-probabilities of prompts of these lengths, in chunks."""
    jobs = [Job(prompt_of(each, 199, seed=each), num_tokens, GREEDY, chunk=29) for each in lengths]
    return [(job.output, [each.logprob for each in job.logprobs]) for job in driver.run(jobs)]


def balance_of(runner: ModelRunner) -> ExpertBalance:
    assert runner.expert_balance is not None
    return runner.expert_balance


# Tensor, expert, pipeline, options, and bytes of a piece: experts of 13 to 51 KB go over in one or several.
DEGREES = [
    (1, 2, 1, {}, 1 << 20),
    (1, 2, 1, {"num_threads": 4}, 4096),
    (1, 4, 1, {"dtype": "bfloat16"}, 8192),
    (1, 2, 1, {"quantize": "int8"}, 5000),
    (1, 2, 2, {}, 8192),
    # Pairs of ranks have parts of the same experts.
    (4, 2, 1, {}, 8192),
]


@pytest.mark.parametrize(("tensor", "expert", "pipeline", "options", "num_bytes"), DEGREES)
def test_loads_become_even_and_no_bit_changes(
    tensor: int,
    expert: int,
    pipeline: int,
    options: dict[str, Any],
    num_bytes: int,
    piece_bytes: Callable[[int], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    skewed(tmp_path)
    piece_bytes(num_bytes)
    lengths = (20, 61, 5, 33)
    with monkeypatch.context() as patch:
        # One process, or the same degrees where these add in an order of their own; and nothing moves.
        patch.setattr(balance, "RULE", BalanceRule(threshold=100.0))
        still = shared(tmp_path, tensor, expert, pipeline, **options)
        if tensor == 1:
            still.close()
            still = open_runner(tmp_path, native="required", **options)
        with closing(still):
            expected = answers(Driver(still), *lengths)
    with closing(shared(tmp_path, tensor, expert, pipeline, **options)) as runner:
        driver, found = Driver(runner), balance_of(runner)
        for _ in range(30):
            assert answers(driver, *lengths) == expected
            if found.spread.num_moves >= 6 and not found._pairs and found.spread.imbalance < EVEN:
                break
        # The first groups had everything, and by the same rows would have it still.
        by_number = np.tile(np.arange(NUM_EXPERTS), (3, 1))
        assert imbalance(group_loads(by_number, found._loads, expert)).min() > 1.9
        assert found.spread.imbalance < EVEN
        settled = found.spread.num_moves
        assert settled >= 6
        assert answers(driver, *lengths) == answers(driver, *lengths) == expected
        # What is even stays.
        assert found.spread.num_moves == settled


@pytest.mark.parametrize(
    ("case", "expert", "options"),
    [
        # Biases; experts beside one that all pass, behind a dense layer, in groups; three of several each.
        ("gpt-oss", 2, {}),
        ("deepseek-v3", 2, {}),
        ("qwen3-moe", 3, {}),
        # Scales and minimums; gates in another form than what they gate.
        ("mixtral", 2, {"quantize": "int4"}),
        ("gguf", 2, {}),
    ],
)
def test_whatever_experts_consist_of_moves(
    case: str,
    expert: int,
    options: dict[str, Any],
    piece_bytes: Callable[[int], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = tmp_path / "model.gguf" if case == "gguf" else tmp_path
    if case == "gguf":
        counts = {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 128}
        oracle = make_checkpoint(tmp_path / "original", "mixtral", **SIZES | counts)
        kinds, metadata = (
            {"ffn_gate_inp": Kind.F32, "": Kind.F16},
            {"expert_count": 4, "expert_used_count": 2},
        )
        types = {"gate": Kind.Q8_0, "up": Kind.Q4_0, "down": Kind.Q8_0}
        write_experts(path, oracle, "llama", kinds, metadata, types)
    else:
        model_type, changes = CASES[case]
        make_checkpoint(tmp_path, model_type, **changes)
    piece_bytes(1 << 14)
    # What came last decides, and the least of it: something moves all the time.
    restless = BalanceRule(look_steps=2, least_rows=4, half_life_rows=8, threshold=1.01, margin=0.01)
    monkeypatch.setattr(balance, "RULE", restless)
    lengths = (20, 61, 5, 33)
    with closing(open_runner(path, native="required", **options)) as alone:
        expected = answers(Driver(alone), *lengths)
    with closing(shared(path, 1, expert, **options)) as runner:
        driver = Driver(runner)
        for _ in range(4):
            assert answers(driver, *lengths) == expected
        assert balance_of(runner).spread.num_moves > 10


def test_even_loads_stay_where_they_are(piece_bytes: Callable[[int], None], tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "mixtral", num_local_experts=2, num_experts_per_tok=2)
    piece_bytes(1 << 20)
    with closing(shared(tmp_path, 1, 2)) as runner:
        answers(Driver(runner), 20, 61, 5)
        assert runner.expert_spread() == ExpertSpread(imbalance=1.0, num_moves=0)


def test_one_process_and_parts_of_layers_say_nothing_of_experts(tmp_path: Path) -> None:
    skewed(tmp_path)
    for runner in (open_runner(tmp_path, native="required"), shared(tmp_path, 2, 1)):
        with closing(runner):
            answers(Driver(runner), 20, num_tokens=2)
            assert runner.expert_spread() is None


def test_other_back_ends_are_refused_by_name(tmp_path: Path) -> None:
    skewed(tmp_path)
    parallel = ParallelConfig(expert=2)
    refused = r"engine\.parallel\.expert = 2: ranks compute by the native kernels"
    with pytest.raises(ConfigError, match=refused):
        open_runner(tmp_path, native="off", num_threads=2, parallel=parallel)
    refused = r"engine\.parallel\.expert = 2: ranks of this make compute on CPUs, and engine\.device is cuda"
    with pytest.raises(ConfigError, match=refused):
        check_ranks(read_spec(tmp_path), EngineConfig(parallel=parallel), tmp_path, "cuda", {})


def served(runner: ModelRunner) -> tuple[dict[int, list[int]], Scheduler]:
    """The answers of a scheduler with little memory, by request: prompts have beginnings in common, some
    tokens are drawn, and all come one after another.
    """
    scheduler = Scheduler(
        SchedulerConfig(max_num_batched_tokens=64, max_num_seqs=6),
        CacheConfig(),
        memory_plan(26, runner.storage.block_size, 200),
        model="m",
    )
    found: dict[int, list[int]] = {}
    waiting = [
        Request(
            request_id=number,
            external_id=str(number),
            prompt_token_ids=(*prompt_of(48, 199, seed=number % 3), *prompt_of(number % 7, 199, seed=number)),
            sampling=SamplingParams(temperature=number % 2 * 0.8, seed=number, max_tokens=40 + number),
        )
        for number in range(1, 25)
    ]
    while waiting or scheduler.has_work:
        if waiting and scheduler.num_requests < 8:
            scheduler.submit(waiting.pop(0), 0.0)
        scheduler.update(runner.launch(scheduler.schedule(0.0)).wait(), 0.0)
        for event in scheduler.drain_events():
            assert event.failure is None
            found.setdefault(event.request_id, []).extend(event.token_ids)
        scheduler.check_invariants()
    assert runner.num_states() == 0
    return found, scheduler


def test_prefixes_preemptions_and_draws_are_those_of_one_process(
    piece_bytes: Callable[[int], None], tmp_path: Path
) -> None:
    skewed(tmp_path)
    piece_bytes(1024)
    with closing(open_runner(tmp_path, native="required")) as alone:
        expected, _ = served(alone)
    with closing(shared(tmp_path, 1, 2)) as runner:
        found, scheduler = served(runner)
        assert found == expected
        counters = scheduler.load(0.0).counters
        assert counters.prefix_hit_tokens
        assert counters.num_preemptions
        assert balance_of(runner).spread.num_moves


def test_a_rank_that_is_killed_during_a_move_breaks_the_runner(
    piece_bytes: Callable[[int], None], tmp_path: Path
) -> None:
    skewed(tmp_path)
    # An expert is on its way for hundreds of steps.
    piece_bytes(64)
    lost: list[str] = []
    config = EngineConfig(native="required", num_threads=2, parallel=ParallelConfig(expert=2))
    runner, _, _ = build_here(
        config, ModelConfig(path=str(tmp_path)), lambda stage, part: None, on_lost=lost.append
    )
    assert isinstance(runner, ModelRunner)
    with closing(runner):
        driver = Driver(runner)
        answers(driver, 20, 61)
        assert balance_of(runner)._pairs
        (rank,) = running_ranks()
        rank.send_signal(signal.SIGKILL)
        with pytest.raises(RunnerBroken):
            answers(driver, 5, num_tokens=1000)
    assert lost == ["rank 1 of 2 ended (killed by SIGKILL)"]
