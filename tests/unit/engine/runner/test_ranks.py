"""Ranks that share a model: the tokens of one process, the same bits every time, and nothing left behind."""

from __future__ import annotations

import shutil
import signal
from contextlib import closing
from pathlib import Path
from typing import Any

import llguidance
import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.config import EngineConfig, ParallelConfig, SchedulerConfig
from engine.model.native_decoder import NativeDecoder
from engine.model.spec import CheckpointError
from engine.runner.base import RunnerBroken
from engine.runner.build import build_here
from engine.runner.runner import ModelRunner
from engine.speculation_config import SpeculationConfig
from engine.types import GrammarSpec, SamplingParams, ScheduledSequence, SchedulerOutput
from kernels.native.library import NativeUnavailableError, load_native
from runtime.config import ModelConfig
from runtime.errors import ConfigError
from tests.unit.engine.checkpoints import make_checkpoint
from tests.unit.engine.forked import running_ranks
from tests.unit.engine.model.test_families import CASES
from tests.unit.engine.quantization import writers
from tests.unit.engine.runner.driver import Driver, Job, new_sequence, open_runner, prompt_of
from tests.unit.engine.runner.ranked import shared

pytestmark = pytest.mark.usefixtures("no_rank_stays", "parts_are_kept")
BUNDLED = Path("models/millrace-nano")
GREEDY = SamplingParams(temperature=0.0, logprobs=5)
# Where a sum over inputs is cut, its terms are added in another order: float32 differs in its last bits, and
# what is rounded to bfloat16 behind it now and then in one of eight.
FLOAT32_TOLERANCE, BFLOAT16_TOLERANCE = 1e-4, 0.08
LENGTHS = (1, 5, 40, 100, 3)

try:
    load_native()
except NativeUnavailableError as reason:
    pytest.skip(f"no native kernels: {reason}", allow_module_level=True)


def answers(runner: ModelRunner, vocab_size: int = 199, num_tokens: int = 16, chunk: int = 29) -> list[Job]:
    """Greedy answers to prompts of many lengths, together and in chunks."""
    jobs = [
        Job(prompt_of(length, vocab_size, seed=length), num_tokens=num_tokens, sampling=GREEDY, chunk=chunk)
        for length in LENGTHS
    ]
    with closing(runner):
        done = Driver(runner).run(jobs)
    assert [len(job.output) for job in done] == [num_tokens] * len(done), [job.failure for job in done]
    return done


def bits(jobs: list[Job]) -> list[tuple[list[int], list[float]]]:
    return [(job.output, [entry.logprob for entry in job.logprobs]) for job in jobs]


def assert_near(ours: list[Job], theirs: list[Job], tolerance: float) -> None:
    for job, other in zip(ours, theirs, strict=True):
        for entry, expected in zip(job.logprobs, other.logprobs, strict=True):
            assert entry.logprob == pytest.approx(expected.logprob, abs=tolerance)
            assert entry.top_logprobs == pytest.approx(expected.top_logprobs, abs=tolerance)


# Shapes, parts of layers, and groups of experts. Heads of keys and values are divided, one for each rank, or
# the same on several; experts are whole, in parts, or both.
SHAPES = [
    ("llama", 2, 1),
    ("llama", 4, 1),
    ("llama-tied", 2, 1),
    ("llama-biases", 2, 1),
    ("llama-mqa", 2, 1),
    ("mistral-window", 2, 1),
    ("gemma2", 2, 1),
    ("qwen2", 2, 1),
    ("qwen3", 4, 1),
    ("mixtral", 2, 1),
    ("mixtral", 2, 2),
    ("mixtral", 4, 2),
    ("mixtral", 2, 4),
    ("deepseek-v3", 2, 2),
    # What is no expert's is computed by all ranks alike.
    ("qwen3-moe", 1, 3),
    ("deepseek-v3", 1, 2),
    ("gpt-oss", 1, 2),
    ("qwen2-moe", 1, 2),
]


@pytest.mark.parametrize(("case", "tensor", "expert"), SHAPES)
def test_ranks_give_the_tokens_of_one_process(case: str, tensor: int, expert: int, tmp_path: Path) -> None:
    model_type, changes = CASES[case]
    make_checkpoint(tmp_path, model_type, **changes)
    runner, alone = shared(tmp_path, tensor, expert), open_runner(tmp_path, native="required")
    assert isinstance(runner.model, NativeDecoder)
    # A rank holds its heads' keys and values alone; latents belong to all heads.
    for layer, whole in zip(runner.storage.layers, alone.storage.layers, strict=True):
        assert layer.keys.shape[1] == max(1, whole.keys.shape[1] // tensor)
    ours, theirs = answers(runner), answers(alone)
    assert [job.output for job in ours] == [job.output for job in theirs]
    if tensor == 1:
        assert bits(ours) == bits(theirs)
    else:
        assert_near(ours, theirs, FLOAT32_TOLERANCE)


# Shapes, changes of them, and degrees. Layers are no multiple of the stages; some are dense, have a window,
# or a norm behind what they add; the embedding is the head; parts, groups and stages go together.
STAGES = [
    ("llama", {"num_hidden_layers": 5}, (1, 1, 3)),
    ("llama", {"num_hidden_layers": 3, "dtype": "bfloat16"}, (1, 1, 2)),
    ("llama-tied", {"num_hidden_layers": 3}, (2, 1, 2)),
    ("gemma2", {"num_hidden_layers": 3}, (1, 1, 2)),
    ("deepseek-v3", {}, (1, 1, 3)),
    ("mixtral", {"num_hidden_layers": 3}, (1, 2, 2)),
]


@pytest.mark.parametrize(("case", "changes", "degrees"), STAGES)
def test_stages_give_the_bits_of_one_process(
    case: str, changes: dict[str, Any], degrees: tuple[int, int, int], tmp_path: Path
) -> None:
    """Of steps of many rows, in micro-batches, and of few."""
    model_type, others = CASES[case]
    options = {"dtype": changes.get("dtype", "float32")}
    make_checkpoint(tmp_path, model_type, **{**others, **changes, "dtype": "float32"})
    runner = shared(tmp_path, *degrees, **options)
    alone = open_runner(tmp_path, native="required", **options)
    assert len(runner.storage.layers) < len(alone.storage.layers)
    # All but the longest prompt begin together.
    ours, theirs = answers(runner, chunk=61), answers(alone, chunk=61)
    assert [job.output for job in ours] == [job.output for job in theirs]
    if degrees[0] == 1:
        assert bits(ours) == bits(theirs)
    else:
        assert_near(ours, theirs, FLOAT32_TOLERANCE)


@pytest.mark.parametrize("case", ["llama", "bamba"])
def test_long_steps_are_cut_into_more_micro_batches(case: str, tmp_path: Path) -> None:
    """Of 150, 600 and 1,200 rows in two, four and eight; which changes no bit."""
    model_type, changes = CASES[case]
    make_checkpoint(tmp_path, model_type, **changes)

    def run(runner: ModelRunner) -> list[Any]:
        with closing(runner):
            return [
                bits(
                    Driver(runner).run(
                        [Job(prompt_of(150, 199, seed=each), 3, GREEDY) for each in range(count)]
                    )
                )
                for count in (1, 4, 8)
            ]

    options = {"scheduler": SchedulerConfig(max_num_batched_tokens=1200)}
    staged = shared(tmp_path, 1, 1, 2, **options)
    assert isinstance(staged.model, NativeDecoder)
    assert staged.model.ranks is not None
    assert [staged.model.ranks.shape.num_micro_batches(150 * count) for count in (1, 4, 8)] == [2, 4, 8]
    assert run(staged) == run(open_runner(tmp_path, native="required", **options))


@pytest.mark.parametrize("options", [{"dtype": "bfloat16"}, {"quantize": "int8"}], ids=["bfloat16", "int8"])
def test_experts_apart_have_the_bits_of_one_process(options: dict[str, Any], tmp_path: Path) -> None:
    """A token's experts are added up in its own order, wherever they were computed."""
    make_checkpoint(tmp_path, "mixtral", num_local_experts=4, num_experts_per_tok=2)
    ours = answers(shared(tmp_path, 1, 2, **options))
    assert bits(ours) == bits(answers(open_runner(tmp_path, native="required", **options)))


def test_a_stage_takes_the_types_of_its_own_layers(tmp_path: Path) -> None:
    """Of keys and values; the second stage has the last two layers, which it numbers from 0."""
    make_checkpoint(tmp_path, "llama", num_hidden_layers=3, head_dim=16)
    cache = {"kv_dtype": "fp8", "kv_dtype_layers": {"1": "int8"}}
    alone = bits(answers(open_runner(tmp_path, native="required", cache=cache), num_tokens=4))
    assert bits(answers(shared(tmp_path, 1, 1, 2, cache=cache), num_tokens=4)) == alone
    cache["kv_dtype_layers"] = {"2": "int8"}
    assert bits(answers(open_runner(tmp_path, native="required", cache=cache), num_tokens=4)) != alone


@pytest.mark.parametrize(
    ("case", "changes", "degrees"),
    [
        ("llama", {"num_hidden_layers": 3}, (1, 1, 2)),
        ("mistral-window", {"num_hidden_layers": 3}, (1, 1, 3)),
        ("mixtral", {}, (1, 2, 1)),
        ("llama", {}, (2, 1, 1)),
        ("llama-mqa", {"num_hidden_layers": 3}, (2, 1, 2)),
    ],
)
def test_keys_by_channel_are_whole_in_every_rank(
    case: str, changes: dict[str, Any], degrees: tuple[int, int, int], tmp_path: Path
) -> None:
    """Prompts in chunks, in micro-batches of stages, and answers that go on into another block; then beside
    layers by token, which the first stage has alone.
    """
    model_type, others = CASES[case]
    make_checkpoint(tmp_path, model_type, **{**others, **changes, "head_dim": 16})
    whole = {"kv_dtype": "kivi4", "block_size": 64}
    for cache in (whole, whole | {"kv_dtype_layers": {"0": "int8"}}):
        # A number that falls on the other side of a level's edge may change a later token.
        sizes = {"num_tokens": 40 if degrees[0] == 1 else 1, "chunk": 61}
        ours = answers(shared(tmp_path, *degrees, cache=cache), **sizes)
        theirs = answers(open_runner(tmp_path, native="required", cache=cache), **sizes)
        if degrees[0] == 1:
            assert bits(ours) == bits(theirs)
        else:
            assert_near(ours, theirs, BFLOAT16_TOLERANCE)


def test_experts_that_are_quantized_are_spread_as_they_are(tmp_path: Path) -> None:
    """Blocks of MXFP4, all experts' in one tensor; a head of codes is not cut."""
    model_type, changes = CASES["gpt-oss"]
    sizes = {"hidden_size": 64, "intermediate_size": 96}
    tensors = writers.mxfp4_experts(tmp_path, make_checkpoint(tmp_path, model_type, **changes | sizes))
    ours = answers(shared(tmp_path, 1, 2))
    assert bits(ours) == bits(answers(open_runner(tmp_path, native="required")))
    tensors["lm_head.weight_scale"] = torch.ones(199, 1)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"parallel\.expert = 2: the head of .* is quantized"):
        shared(tmp_path, 1, 2)


@pytest.mark.parametrize(
    ("options", "tolerance"),
    [
        ({"dtype": "bfloat16"}, BFLOAT16_TOLERANCE),
        ({"quantize": "int8"}, BFLOAT16_TOLERANCE),
        # Groups of levels begin anew with each part of the inputs.
        ({"quantize": "int4"}, 0.3),
        ({"cache": {"kv_dtype": "int8"}}, BFLOAT16_TOLERANCE),
    ],
    ids=["bfloat16", "int8", "int4", "kv-int8"],
)
def test_rounded_numbers_are_near_those_of_one_process(options: dict[str, Any], tolerance: float) -> None:
    ours = answers(shared(BUNDLED, **options), 2048, num_tokens=1)
    theirs = answers(open_runner(BUNDLED, native="required", **options), 2048, num_tokens=1)
    assert_near(ours, theirs, tolerance)


def test_the_bundled_model_says_the_same_for_long() -> None:
    ours = answers(shared(BUNDLED), 2048, num_tokens=64)
    theirs = answers(open_runner(BUNDLED, native="required"), 2048, num_tokens=64)
    assert [job.output for job in ours] == [job.output for job in theirs]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bits_depend_neither_on_the_batch_nor_on_threads(dtype: str, tmp_path: Path) -> None:
    """Parts are added from the first rank to the last, whoever is there first."""
    make_checkpoint(tmp_path, "llama")
    together = bits(answers(shared(tmp_path, dtype=dtype)))
    assert bits(answers(shared(tmp_path, dtype=dtype, num_threads=4))) == together
    with closing(shared(tmp_path, dtype=dtype)) as runner:
        for length, expected in zip(LENGTHS, together, strict=True):
            alone = [Job(prompt_of(length, 199, seed=length), num_tokens=16, sampling=GREEDY)]
            assert bits(Driver(runner).run(alone)) == [expected]


@pytest.mark.parametrize(
    ("case", "degrees"), [("llama", (2, 1, 1)), ("mixtral", (1, 2, 1)), ("llama", (1, 1, 2))]
)
def test_prefixes_copies_drafts_and_scores(case: str, degrees: tuple[int, int, int], tmp_path: Path) -> None:
    """Blocks that others computed, blocks that a plan copies, drafts that are looked up, log-probabilities of
    prompts: each as one process has them.
    """
    model_type, changes = CASES[case]
    make_checkpoint(tmp_path, model_type, **changes)

    def run(runner: ModelRunner) -> list[object]:
        with closing(runner):
            driver = Driver(runner)
            prompt = prompt_of(32, 199)
            blocks = driver.take_blocks(32)
            spare = driver.take_blocks(16)[0]
            row = (ScheduledSequence(9, 0, 32, (), True),)
            first = driver.step(SchedulerOutput(0, (new_sequence(9, Job(prompt), blocks),), row))
            found: list[object] = [first.results[0].token_ids]
            # Blocks stay as they are when nobody has them any more.
            driver.step(SchedulerOutput(1, released=(9,)))
            ends = [Job([*prompt, *prompt_of(9, 199, seed=seed)], sampling=GREEDY) for seed in (1, 2)]
            hits = driver.run(ends, prefix=(blocks, 32))
            found.append([job.output for job in hits])
            # A copy of the second block is as good as the block itself.
            other = new_sequence(8, Job(prompt), [blocks[0], spare])
            copied = driver.step(
                SchedulerOutput(
                    2,
                    (other,),
                    (ScheduledSequence(8, 31, 1, (), True),),
                    block_copies=((blocks[1], spare),),
                )
            )
            found.append(copied.results[0].token_ids)
            driver.step(SchedulerOutput(3, released=(8,)))
            loops = Job(prompt_of(6, 199) * 4, num_tokens=24, speculate=True)
            scored = Job(prompt_of(200, 199), sampling=SamplingParams(temperature=0.0, prompt_logprobs=1))
            beams = Job(prompt, num_tokens=1, sampling=SamplingParams(logprobs=8, beam_width=4))
            driver.run([loops, scored, beams])
            assert loops.num_drafted
            assert len(scored.prompt_logprobs) == 199
            found += [
                beams.logprobs[0].top_ids,
                loops.output,
                scored.output,
                [entry.top_ids[0] for entry in scored.prompt_logprobs],
            ]
            return found

    drafts = {"speculation": SpeculationConfig(method="ngram", min_acceptance=0.0)}
    theirs = open_runner(tmp_path, native="required", **drafts)
    assert run(shared(tmp_path, *degrees, **drafts)) == run(theirs)


@pytest.mark.parametrize("degrees", [(2, 1, 1), (1, 2, 1), (2, 1, 2)])
def test_guided_answers_are_those_of_one_process(degrees: tuple[int, int, int], tmp_path: Path) -> None:
    folder = BUNDLED
    if degrees[1] > 1:
        folder = tmp_path
        make_checkpoint(tmp_path, "mixtral", vocab_size=2048, num_local_experts=4, num_experts_per_tok=2)
        for path in BUNDLED.glob("tokenizer*"):
            shutil.copy(path, tmp_path)
    grammar = GrammarSpec(
        digest="", payload=llguidance.grammar_from("regex", "[a-z]{3,40}").encode(), backend="llguidance/1"
    )
    seeded = SamplingParams(temperature=0.8, seed=7, top_p=0.9)
    asked = [(GREEDY, grammar), (seeded, grammar), (seeded, None)]

    def run(runner: ModelRunner) -> list[list[int]]:
        jobs = [Job(prompt_of(20, 2048), num_tokens=30, sampling=each, grammar=by) for each, by in asked]
        with closing(runner):
            return [job.output for job in Driver(runner).run(jobs)]

    assert run(shared(folder, *degrees)) == run(open_runner(folder, native="required"))


@pytest.mark.parametrize("name", ["tensor", "expert", "pipeline"])
def test_a_killed_rank_breaks_the_runner(name: str, tmp_path: Path) -> None:
    model_type, changes = CASES["mixtral" if name == "expert" else "llama"]
    make_checkpoint(tmp_path, model_type, **changes)
    lost: list[str] = []
    config = EngineConfig(native="required", num_threads=2, parallel=ParallelConfig(**{name: 2}))
    runner, _, _ = build_here(
        config, ModelConfig(path=str(tmp_path)), lambda stage, part: None, on_lost=lost.append
    )
    with closing(runner):
        (rank,) = running_ranks()
        rank.send_signal(signal.SIGKILL)
        driver = Driver(runner)
        with pytest.raises(RunnerBroken):
            driver.run([Job(prompt_of(5, 199), num_tokens=1000)])
    assert lost == ["rank 1 of 2 ended (killed by SIGKILL)"]


@pytest.mark.parametrize("degrees", [(2, 1, 1), (1, 1, 2)])
def test_what_is_wrong_with_a_ranks_part_arrives(degrees: tuple[int, int, int], tmp_path: Path) -> None:
    """Numbers that only the second rank reads."""
    make_checkpoint(tmp_path, "llama")
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.1.mlp.down_proj.weight"][:, -1] = float("nan")
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(
        CheckpointError, match=r"layers\.1\.mlp\.down_proj\.weight holds numbers that are not"
    ):
        shared(tmp_path, *degrees)


@pytest.mark.parametrize(
    ("case", "degrees", "words"),
    [
        ("nemotron-h", {"tensor": 2}, "neither divides nor is a multiple of the 3 groups of states"),
        (
            "qwen3-next-heads",
            {"tensor": 2},
            "does not divide the 3 heads of states of .*; set it to one of 1$",
        ),
        ("olmo-hybrid", {"tensor": 2}, "norms over all heads"),
        ("phi3", {"tensor": 2}, "fused projections"),
        ("olmo2", {"tensor": 2}, "norms over all heads"),
        (
            "gpt-oss",
            {"tensor": 2},
            "sinks of heads, which ranks do not share yet; .*engine.parallel.expert spreads experts alone",
        ),
        ("llama", {"tensor": 3}, "does not divide the 4 heads of .*; set it to one of 1, 2, 4"),
        ("llama", {"tensor": 8}, "does not divide the 4 heads"),
        ("llama", {"expert": 2}, "has no experts; set it to 1"),
        ("mixtral", {"expert": 3}, "does not divide the 4 experts of .*; set it to one of 1, 2, 4"),
        ("lfm2", {"expert": 2}, "has no experts; set it to 1"),
        ("kimi-linear", {"tensor": 2}, "states that are not cut by heads"),
        ("jamba", {"tensor": 2}, "states that are not cut by heads"),
        ("minimax", {"pipeline": 2}, "norms that take the stream's place, which stages have not yet"),
        ("llama", {"pipeline": 3}, "a layer at least, and .* has 2; set it to 2 or less"),
    ],
)
def test_what_ranks_cannot_share_is_refused_by_name(
    case: str, degrees: dict[str, int], words: str, tmp_path: Path
) -> None:
    model_type, changes = CASES[case]
    make_checkpoint(tmp_path, model_type, **changes)
    ((name, size),) = degrees.items()
    parallel = ParallelConfig(**degrees)
    with pytest.raises(ConfigError, match=rf"engine\.parallel\.{name} = {size}: .*{words}"):
        shared(tmp_path, parallel=parallel, num_threads=8)


def test_more_ranks_than_threads_are_refused(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama")
    with pytest.raises(ConfigError, match=r"a rank computes on one core at least, and there are 1; lower it"):
        shared(tmp_path, num_threads=1)
