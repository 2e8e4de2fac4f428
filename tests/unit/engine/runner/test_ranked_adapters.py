"""Adapters of a model that ranks share: rows get what one process gives them, and each rank has its part."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import llguidance
import pytest
import transformers

from engine.adapters.peft import AdapterFile
from engine.adapters.version import WEIGHTS, AdapterError
from engine.config import AdaptersConfig, EngineConfig, ParallelConfig
from engine.model.adapter_memory import adapter_bytes
from engine.runner.build import build_here
from engine.runner.ranks import group as rank_group
from engine.runner.runner import ModelRunner
from engine.types import GrammarSpec, SamplingParams, ScheduledSequence, SchedulerOutput
from kernels.native.library import NativeUnavailableError, load_native
from runtime.config import ModelConfig
from tests.unit.engine.adapters.broken import one_value, without
from tests.unit.engine.adapters.test_merged import load
from tests.unit.engine.adapters.written import write_adapter
from tests.unit.engine.checkpoints import make_checkpoint
from tests.unit.engine.forked import running_ranks
from tests.unit.engine.model.test_families import CASES
from tests.unit.engine.runner.driver import Driver, Job, new_sequence, open_runner, prompt_of
from tests.unit.engine.runner.ranked import shared
from tests.unit.engine.runner.test_ranks import FLOAT32_TOLERANCE, assert_near, bits

try:
    load_native()
except NativeUnavailableError as reason:
    pytest.skip(f"no native kernels: {reason}", allow_module_level=True)

pytestmark = pytest.mark.usefixtures("no_rank_stays", "parts_are_kept")
Degrees = tuple[int, int, int]
GREEDY = SamplingParams(temperature=0.0, logprobs=5)
BUNDLED = Path("models/millrace-nano")
# Slots of the rows of a step: the plain model's, and both adapters' between each other.
SLOTS = (0, -1, 1, 0, 1, -1)


def written(folder: Path, model: transformers.PreTrainedModel, *adapters: dict[str, Any]) -> AdaptersConfig:
    """Two adapters of all that a model's layers take, or those that are given."""
    paths = {}
    for index, given in enumerate(adapters or ({"r": 4}, {"r": 16, "targets": ("q_proj", "down_proj")})):
        write_adapter(folder / f"a{index}", model, seed=index, **given)
        paths[f"a{index}"] = str(folder / f"a{index}")
    return AdaptersConfig(paths=paths)


def answers(
    runner: ModelRunner, names: Any, vocab_size: int = 199, slots: tuple[int, ...] = SLOTS
) -> list[Job]:
    """Greedy answers of rows that have adapters and of some that have none, together and in chunks."""
    jobs = [
        Job(prompt_of(length, 199, seed=length), 12, sampling=GREEDY, chunk=61, adapter_slot=slot)
        for length, slot in zip((5, 40, 100, 1, 3, 7), slots, strict=True)
    ]
    with closing(runner):
        load(runner, *names)
        done = Driver(runner).run(jobs)
    assert [len(job.output) for job in done] == [12] * len(done), [job.failure for job in done]
    return done


LATENT = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj")
# Shapes, changes of them, degrees, and adapters. Keys and values are divided, or the same on several ranks;
# layers have the checkpoint's own names, or are fused; steps of stages are in micro-batches.
SHAPES: list[tuple[str, dict[str, Any], Degrees, tuple[dict[str, Any], ...]]] = [
    ("llama", {}, (2, 1, 1), ()),
    ("llama", {}, (4, 1, 1), ()),
    ("llama-mqa", {}, (2, 1, 1), ()),
    ("phi", {}, (2, 1, 1), ({"targets": ("dense", "fc1", "q_proj")}, {"r": 9, "targets": ("fc2",)})),
    ("llama", {"num_hidden_layers": 3}, (1, 1, 2), ()),
    ("llama", {"num_hidden_layers": 5}, (1, 1, 3), ()),
    ("llama", {"num_hidden_layers": 3}, (2, 1, 2), ()),
    ("phi3", {}, (1, 1, 2), ({"r": 6, "targets": ("qkv_proj", "gate_up_proj")}, {"targets": ("o_proj",)})),
    ("mixtral", {}, (2, 2, 1), ({"targets": ("q_proj", "o_proj")}, {"targets": ("v_proj",)})),
    ("bamba", {}, (2, 1, 1), ({"targets": ("in_proj", "out_proj")}, {"r": 9, "targets": ("in_proj",)})),
    ("lfm2", {}, (2, 1, 2), ({"targets": ("in_proj", "q_proj")}, {"targets": ("w1", "out_proj")})),
    ("deepseek-v3", {}, (2, 2, 1), ({"targets": LATENT}, {"targets": ("shared_experts.down_proj",)})),
    ("deepseek-v3", {}, (1, 2, 1), ({"targets": LATENT}, {"targets": ("shared_experts.up_proj",)})),
]


@pytest.mark.parametrize(("case", "changes", "degrees", "adapters"), SHAPES)
def test_rows_with_adapters_get_the_tokens_of_one_process(
    case: str, changes: dict[str, Any], degrees: Degrees, adapters: Any, tmp_path: Path
) -> None:
    model_type, others = CASES[case]
    model = make_checkpoint(tmp_path / "base", model_type, **{**others, **changes})
    config = written(tmp_path, model, *adapters)
    ours = answers(shared(tmp_path / "base", *degrees, adapters=config), config.paths)
    theirs = answers(open_runner(tmp_path / "base", native="required", adapters=config), config.paths)
    plain = answers(open_runner(tmp_path / "base", native="required"), (), slots=(-1,) * 6)
    assert [job.output for job in ours] == [job.output for job in theirs]
    changed = [job.output != other.output for job, other in zip(theirs, plain, strict=True)]
    assert changed[0], "the first adapter says something"
    if degrees[0] == 1:
        assert bits(ours) == bits(theirs)
    else:
        assert_near(ours, theirs, FLOAT32_TOLERANCE)


@pytest.mark.parametrize(
    ("options", "degrees", "tolerance"),
    [
        ({"quantize": "int8"}, (1, 1, 2), 0.0),
        ({"dtype": "bfloat16"}, (1, 1, 3), 0.0),
        # Parts of rows are rounded apart, as without adapters.
        ({"quantize": "int8"}, (2, 1, 1), 0.15),
        ({"dtype": "bfloat16"}, (2, 1, 1), 0.15),
    ],
)
def test_rounded_numbers_with_adapters(
    options: dict[str, Any], degrees: Degrees, tolerance: float, tmp_path: Path
) -> None:
    model = make_checkpoint(tmp_path / "base", "llama", num_hidden_layers=3)
    config = written(tmp_path, model)
    runner = shared(tmp_path / "base", *degrees, adapters=config, **options)
    alone = open_runner(tmp_path / "base", native="required", adapters=config, **options)
    ours, theirs = answers(runner, config.paths), answers(alone, config.paths)
    if not tolerance:
        assert bits(ours) == bits(theirs)
        return
    for job, other in zip(ours, theirs, strict=True):
        assert job.logprobs[0].logprob == pytest.approx(other.logprobs[0].logprob, abs=tolerance)


@pytest.mark.parametrize("degrees", [(2, 1, 1), (1, 1, 2)])
def test_guided_answers_beams_and_prefixes_under_adapters(degrees: Degrees) -> None:
    """Of the bundled adapters: each as one process has them."""
    paths = {name: str(BUNDLED / "adapters" / name) for name in ("entries", "pirate")}
    config = AdaptersConfig(paths=paths)
    by = GrammarSpec(
        digest="", payload=llguidance.grammar_from("regex", "[a-z]{3,40}").encode(), backend="llguidance/1"
    )

    def run(runner: ModelRunner) -> list[object]:
        with closing(runner):
            load(runner, *paths)
            driver, prompt = Driver(runner), prompt_of(32, 2048)
            guided = [
                Job(prompt_of(20, 2048), num_tokens=20, sampling=each, grammar=by, adapter_slot=slot)
                for each in (GREEDY, SamplingParams(temperature=0.8, seed=7, top_p=0.9))
                for slot in (0, 1, -1)
            ]
            beams = Job(prompt, 1, sampling=SamplingParams(logprobs=8, beam_width=4), adapter_slot=1)
            driver.run([*guided, beams])
            blocks = driver.take_blocks(32)
            row = (ScheduledSequence(999, 0, 32, (), True),)
            first = new_sequence(999, Job(prompt, adapter_slot=1), blocks)
            driver.step(SchedulerOutput(1000, (first,), row))
            driver.step(SchedulerOutput(1001, released=(999,)))
            ends = [Job([*prompt, *prompt_of(9, 2048, seed=seed)], adapter_slot=1) for seed in (1, 2)]
            hits = driver.run(ends, prefix=(blocks, 32))
            return [*(job.output for job in (*guided, *hits)), beams.logprobs[0].top_ids]

    theirs = run(open_runner(BUNDLED, native="required", adapters=config))
    assert run(shared(BUNDLED, *degrees, adapters=config)) == theirs


@pytest.mark.parametrize("degrees", [(2, 1, 1), (4, 1, 1), (1, 1, 2)])
def test_a_rank_has_its_part_in_memory(degrees: Degrees, tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "base", "llama", num_hidden_layers=4)
    config = written(tmp_path, model)

    def num_bytes(runner: ModelRunner) -> int:
        with closing(runner):
            changes = [each.changes for each in runner.model.record.linears() if each.changes is not None]
            held = sum(each.down.nbytes + each.up.nbytes for each in changes)
            assert held == adapter_bytes(runner.model.spec, config, 4)
            return held

    part = num_bytes(shared(tmp_path / "base", *degrees, adapters=config))
    whole = num_bytes(open_runner(tmp_path / "base", native="required", adapters=config))
    if degrees[0] == 1:
        assert part == whole // 2
    else:
        # Of each product one of both ways is divided.
        assert whole / degrees[0] < part < whole


@pytest.mark.parametrize("degrees", [(2, 1, 1), (1, 1, 2)])
@pytest.mark.parametrize(
    ("damage", "words"),
    [
        # What only the second rank would read.
        (one_value("B", float("nan")), r"layers\.1\.self_attn\.v_proj.*not finite"),
        (without("layers.1.self_attn"), r"no tensors of model\.layers\.1\.self_attn\."),
        (lambda folder: None, r"trained for another model, which is not this model"),
    ],
    ids=["nan", "missing", "other base"],
)
def test_adapters_that_do_not_fit_are_refused_whole(
    degrees: Degrees, damage: Callable[[Path], None], words: str, tmp_path: Path
) -> None:
    model = make_checkpoint(tmp_path / "base", "llama")
    other = make_checkpoint(tmp_path / "other", "llama", hidden_size=64)
    write_adapter(tmp_path / "broken", other if "another" in words else model)
    damage(tmp_path / "broken")
    write_adapter(tmp_path / "good", model)
    with closing(shared(tmp_path / "base", *degrees, adapters=AdaptersConfig(slots=2))) as runner:
        with pytest.raises(AdapterError, match=words):
            runner.adapters.add("broken", str(tmp_path / "broken"))
        runner.adapters.add("good", str(tmp_path / "good"))
        load(runner, "good")
        (job,) = Driver(runner).run([Job(prompt_of(5, 199), adapter_slot=0)])
        assert len(job.output) == 8
    # Of the configuration: at start, and nobody stays.
    config = AdaptersConfig(paths={"broken": str(tmp_path / "broken")})
    with pytest.raises(AdapterError, match=rf"engine\.adapters\.paths: .*{words}"):
        shared(tmp_path / "base", *degrees, adapters=config)


def finished(runner: ModelRunner, name: str) -> str:
    """Why an adapter was not loaded."""
    runner.adapters.begin(0, name)
    found: list[tuple[int, str]] = []
    while not found:
        found = runner.adapters.finished()
    ((_, problem),) = found
    return problem


def test_an_adapter_that_another_rank_cannot_read_is_refused_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file is cut short behind what the leader's stage reads of it."""
    model = make_checkpoint(tmp_path / "base", "llama")
    config = written(tmp_path, model)
    with closing(shared(tmp_path / "base", 1, 1, 2, adapters=config)) as runner:
        path = tmp_path / "a0" / WEIGHTS
        whole = path.read_bytes()
        with monkeypatch.context() as patched:
            patched.setattr(AdapterFile, "check_unchanged", lambda file: None)
            path.write_bytes(whole[:-8])
            assert "a0 has changed since the adapter was added" in finished(runner, "a0")
        path.write_bytes(whole)
        assert not finished(runner, "a0")
        assert not finished(runner, "a1")


@pytest.mark.parametrize(
    ("number", "words", "said"),
    [
        (signal.SIGKILL, "rank 1 is gone", "rank 1 of 2 ended (killed by SIGKILL)"),
        (signal.SIGSTOP, "rank 1 of 2 read no adapter", "rank 1 of 2 read no adapter in 0.5 s"),
    ],
    ids=["killed", "stopped"],
)
def test_a_rank_that_reads_no_adapter_ends_the_engine(
    number: signal.Signals, words: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where no step waits for it."""
    monkeypatch.setattr(rank_group, "_ADAPTER_LIMIT_S", 0.5)
    adapters = written(tmp_path, make_checkpoint(tmp_path / "base", "llama"))
    config = EngineConfig(
        native="required", num_threads=2, parallel=ParallelConfig(tensor=2), adapters=adapters
    )
    lost: list[str] = []
    runner, _, _ = build_here(
        config, ModelConfig(path=str(tmp_path / "base")), lambda stage, part: None, on_lost=lost.append
    )
    with closing(runner):
        (rank,) = running_ranks()
        rank.send_signal(number)
        while number == signal.SIGKILL and not lost:
            # Not `rank.wait()`: whoever is told first of its end, is told how, and the watcher is to be.
            time.sleep(0.01)
        assert words in finished(runner, "a0")
    assert lost[0] == said
