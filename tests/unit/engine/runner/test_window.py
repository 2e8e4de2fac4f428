"""Where layers have a window, giving up what lies behind it changes no token, whatever becomes of it."""

from __future__ import annotations

import mmap
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest
import transformers

from engine.config import CacheConfig, EngineConfig, KvDtype, SchedulerConfig
from engine.core.__main__ import make_scheduler
from engine.model.families import read_spec
from engine.model.kv_memory import kv_bytes_per_token
from engine.model.plan import make_plan, plan_input, window_room_of
from engine.runner.build import build_here
from engine.runner.kv_storage import KvStorage
from engine.runner.runner import ModelRunner
from engine.scheduler import Scheduler
from engine.types import MemoryPlan, Request, SamplingParams, SchedulerOutput
from kernels.host import HOST
from kernels.native.library import NativeUnavailableError, load_native
from runtime.config import ModelConfig
from tests.unit.engine.checkpoints import make_checkpoint, reference_greedy
from tests.unit.engine.driver import memory_plan
from tests.unit.engine.runner.driver import Job, generated, open_runner, prompt_of

WINDOW = 32
NUM_TOKENS = 48
# The last comes later, with a higher priority.
LENGTHS = (150, 20, 97, 70, 5, 9, 131)
LATE_STEP = 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("mistral")


@pytest.fixture(scope="module")
def oracle(folder: Path) -> transformers.PreTrainedModel:
    return make_checkpoint(folder, "mistral", sliding_window=WINDOW)


@pytest.fixture(scope="module")
def expected(folder: Path, oracle: transformers.PreTrainedModel) -> list[list[int]]:
    return said_by(oracle, folder)


def said_by(oracle: transformers.PreTrainedModel, folder: Path) -> list[list[int]]:
    """What transformers answers to the prompts, in few steps, since it looks at what an engine guesses."""
    guesses = generated(folder, [Job(prompt, NUM_TOKENS) for prompt in prompts()])
    return [reference_greedy(oracle, job.prompt, NUM_TOKENS, job.output) for job in guesses]


def prompts() -> list[list[int]]:
    return [prompt_of(length, 199, seed=length) for length in LENGTHS]


def poison_free_blocks(scheduler: Scheduler, runner: ModelRunner) -> None:
    """What nobody holds, and the spare block, turn into NaN: a weight of 0 would not hide it."""
    cache, storage = scheduler._state.cache, runner.storage
    windows = cache._windows
    free = [*cache._pool._free, *cache._pool._absent, storage.num_blocks]
    free_in_windows = [storage.num_window_blocks]
    free_in_windows += [] if windows is None else [*windows._free, *windows._absent]
    for layer in storage.layers:
        for tensor in layer.tensors():
            if "float" in str(tensor.dtype):
                tensor[free_in_windows if layer.in_windows else free] = float("nan")


def generate(
    runner: ModelRunner,
    *,
    window: int | None,
    prefix_caching: bool,
    num_host_blocks: int,
    n: int = 1,
    memory: MemoryPlan | None = None,
    kv_dtype: KvDtype = "auto",
    beams: int = 0,
) -> tuple[dict[tuple[int, int], list[int]], Counter[str], int]:
    """Tokens by (request, choice), preemptions by cause, and the most blocks that were held at once."""
    scheduler = Scheduler(
        SchedulerConfig(max_num_batched_tokens=48, long_prefill_tokens=32),
        CacheConfig(prefix_caching=prefix_caching, kv_dtype=kv_dtype),
        memory
        or memory_plan(
            runner.storage.num_blocks,
            runner.storage.block_size,
            256,
        ),
        model="m",
        num_host_blocks=num_host_blocks,
        window=window,
    )
    sampling = SamplingParams(
        temperature=0.0, max_tokens=NUM_TOKENS, n=n, best_of=max(n, beams), beam_width=beams
    )
    requests = [
        Request(
            request_id=number,
            external_id="",
            prompt_token_ids=tuple(prompt),
            sampling=sampling,
            priority=10 if number == len(LENGTHS) - 1 else 0,
        )
        for number, prompt in enumerate(prompts())
    ]
    for request in requests[:-1]:
        scheduler.submit(request, 0.0)
    tokens: dict[tuple[int, int], list[int]] = {}
    most = step = 0
    while scheduler.has_work:
        step += 1
        if step == LATE_STEP:
            scheduler.submit(requests[-1], 5.0)
        plan = scheduler.schedule(10.0)
        scheduler.update(runner.launch(plan).wait(), 10.0)
        scheduler.check_invariants()
        most = max(most, scheduler.num_total_blocks - scheduler.num_unreferenced_blocks)
        poison_free_blocks(scheduler, runner)
        for event in scheduler.drain_events():
            assert event.failure is None, event.failure
            tokens.setdefault((event.request_id, event.choice_index), []).extend(event.token_ids)
    assert runner.num_states() == 0
    assert scheduler.num_unreferenced_blocks == scheduler.num_total_blocks
    cache = scheduler._state.cache
    assert cache.num_available_window_blocks == cache.num_present_window_blocks
    return tokens, Counter(scheduler.load(10.0).counters.preemptions), most


def native_or_skip() -> str:
    try:
        load_native()
    except NativeUnavailableError as reason:
        pytest.skip(f"no native kernels: {reason}")
    return "required"


def computed_by(kernels: str) -> dict[str, Any]:
    """Options of a runner: the native kernels, or torch with the attention back end of that name."""
    if kernels == "native":
        return {"native": native_or_skip()}
    return {"native": "off", "attention_backend": kernels}


@pytest.mark.parametrize("kernels", ["torch", "reference", "native"])
@pytest.mark.parametrize(("prefix_caching", "host_bytes"), [(False, 0), (True, 0), (True, 1 << 17)])
def test_tokens_equal_transformers(
    folder: Path, expected: list[list[int]], kernels: str, prefix_caching: bool, host_bytes: int
) -> None:
    """Chunked prompts, several sequences and preemption on a cache of 17 blocks."""
    options = computed_by(kernels) | {"cache": {"host_bytes": host_bytes}}
    with closing(open_runner(folder, kv_cache_bytes=17 * 6144, **options)) as runner:
        assert runner.storage.num_blocks == 17
        tokens, preemptions, _ = generate(
            runner, window=WINDOW, prefix_caching=prefix_caching, num_host_blocks=host_bytes // 6144
        )
    assert preemptions.total() > 0
    assert tokens == {(number, 0): each for number, each in enumerate(expected)}


def test_choices_share_what_is_left_of_the_prompt(folder: Path, expected: list[list[int]]) -> None:
    with closing(open_runner(folder, kv_cache_bytes=200 * 6144)) as runner:
        tokens, _, held = generate(runner, window=WINDOW, prefix_caching=True, num_host_blocks=0, n=3)
        _, _, without = generate(runner, window=None, prefix_caching=True, num_host_blocks=0, n=3)
    for number, each in enumerate(expected):
        assert [tokens[number, choice] for choice in range(3)] == [each] * 3
    assert held < without


def test_the_scheduler_hears_of_the_window(folder: Path, oracle: transformers.PreTrainedModel) -> None:
    config = EngineConfig(cache=CacheConfig(kv_cache_bytes=1 << 20))
    model = ModelConfig(path=str(folder))
    runner, memory, facts = build_here(config, model, lambda phase, part: None)
    runner.close()
    assert facts.window == WINDOW
    assert make_scheduler(config, model, memory, facts)._state.cache.window == WINDOW


TURNS = ["sliding_attention", "sliding_attention", "full_attention"]
# Of which only some layers have a window; the last reads keys and values of layers before it.
PARTIAL = {
    "gemma3_text": {"head_dim": 16, "num_hidden_layers": 3, "layer_types": TURNS},
    "gpt_oss": {"num_local_experts": 3, "num_experts_per_tok": 2, "layer_types": TURNS[1:]},
    "gemma4_text": {
        "head_dim": 16,
        "global_head_dim": 24,
        "num_hidden_layers": 6,
        "layer_types": 2 * TURNS,
        "vocab_size_per_layer_input": 199,
        "hidden_size_per_layer_input": 12,
        "num_kv_shared_layers": 3,
    },
}
# Of a step, so that a prompt is computed in several chunks.
STEPS = SchedulerConfig(max_num_batched_tokens=48)


@pytest.fixture(scope="module", params=list(PARTIAL))
def partial(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[list[int]]]:
    """A checkpoint, and what transformers answers."""
    folder = tmp_path_factory.mktemp(request.param)
    oracle = make_checkpoint(folder, request.param, sliding_window=WINDOW, **PARTIAL[request.param])
    return folder, said_by(oracle, folder)


def open_partial(folder: Path, *, num_sequences: float, **options: object) -> tuple[ModelRunner, MemoryPlan]:
    """A runner with so many times what one sequence of 256 tokens needs, and no more; and its plan."""
    given = plan_input(
        EngineConfig(dtype="float32", scheduler=STEPS),
        ModelConfig(path=str(folder)),
        device="cpu",
        available_bytes=1 << 33,
    )
    room, per_token = window_room_of(given), kv_bytes_per_token(given.spec, "float32")
    in_windows = room.bytes_per_token * 16
    least = 16 * (per_token * 16 - in_windows) + room.least * in_windows
    num_bytes = int(num_sequences * least)
    cache = msgspec.structs.replace(given.config.cache, kv_cache_bytes=num_bytes)
    plan = make_plan(
        msgspec.structs.replace(given, config=msgspec.structs.replace(given.config, cache=cache))
    )
    runner = open_runner(folder, kv_cache_bytes=num_bytes, scheduler=STEPS, **options)
    # Far fewer than there are blocks for prompts of this length.
    assert 0 < plan.num_window_blocks < plan.num_blocks < runner.storage.num_blocks == plan.num_block_ids
    return runner, plan


@pytest.mark.parametrize("kernels", ["torch", "reference", "native"])
@pytest.mark.parametrize("prefix_caching", [False, True])
def test_tokens_equal_transformers_where_only_some_layers_slide(
    partial: tuple[Path, list[list[int]]], kernels: str, prefix_caching: bool
) -> None:
    """Chunked prompts, several sequences and preemption, and NaN in all that nobody holds."""
    folder, answers = partial
    runner, memory = open_partial(folder, num_sequences=1.3, **computed_by(kernels))
    with closing(runner):
        tokens, preemptions, _ = generate(
            runner, window=None, prefix_caching=prefix_caching, num_host_blocks=0, memory=memory
        )
    assert preemptions.total() > 0
    assert tokens == {(number, 0): each for number, each in enumerate(answers)}


def test_choices_share_a_prompt_where_only_some_layers_slide(
    partial: tuple[Path, list[list[int]]],
) -> None:
    folder, answers = partial
    runner, memory = open_partial(folder, num_sequences=8)
    with closing(runner):
        tokens, _, _ = generate(
            runner, window=None, prefix_caching=True, num_host_blocks=0, n=3, memory=memory
        )
    for number, each in enumerate(answers):
        assert [tokens[number, choice] for choice in range(3)] == [each] * 3


def test_layers_with_a_window_keep_blocks_of_their_own(tmp_path: Path) -> None:
    kinds = ["sliding_attention", "full_attention"]
    make_checkpoint(tmp_path, "qwen2", use_sliding_window=True, sliding_window=9, layer_types=kinds)
    spec = read_spec(tmp_path)
    assert (spec.windows, spec.window) == ((9, None), None)
    assert (spec.sliding_layers, spec.sliding_reach) == ({0}, 9)
    with closing(open_runner(tmp_path, scheduler=STEPS)) as runner:
        assert [layer.in_windows for layer in runner.storage.layers] == [True, False]
        lengths = [layer.keys.shape[0] - 1 for layer in runner.storage.layers]
        assert lengths == [runner.storage.num_window_blocks, runner.storage.num_blocks]


def test_the_system_has_memory_back_that_the_other_kind_needs(tmp_path: Path) -> None:
    make_checkpoint(
        tmp_path,
        "qwen2",
        use_sliding_window=True,
        sliding_window=9,
        layer_types=["sliding_attention", "full_attention"],
    )
    storage = KvStorage(
        read_spec(tmp_path),
        num_blocks=40,
        block_size=64,
        kv_dtype="float32",
        device=HOST,
        num_window_blocks=20,
    )
    for layer in storage.layers:
        for tensor in layer.tensors():
            tensor[:] = 1.0
    storage.apply(SchedulerOutput(0, retired_blocks=(7, 5, 6, 30), retired_window_blocks=(2, 3, 4)))
    for layer, retired, others in zip(
        storage.layers, ([2, 3, 4], [5, 6, 7, 30]), ([0, 1, 5, 20], [4, 8, 29, 31, 40]), strict=True
    ):
        for tensor in layer.tensors():
            assert (tensor[others] == 1.0).all()
            # But for pages in which other blocks end or begin.
            left = int((tensor[retired] != 0.0).sum()) * tensor.itemsize
            assert left <= 4 * mmap.PAGESIZE
            assert left < tensor[retired].nbytes / 2
    storage.close()
