"""Where every layer has a window, giving up blocks changes no token, whatever becomes of the blocks."""

from __future__ import annotations

from collections import Counter
from contextlib import closing
from pathlib import Path

import pytest
import transformers

from engine.config import CacheConfig, EngineConfig, SchedulerConfig
from engine.core.__main__ import make_scheduler
from engine.model.families import read_spec
from engine.runner.build import build_here
from engine.runner.runner import ModelRunner
from engine.scheduler import Scheduler
from engine.types import Request, SamplingParams
from kernels.native.library import NativeUnavailableError, load_native
from runtime.config import ModelConfig
from tests.unit.engine.checkpoints import make_checkpoint, reference_greedy
from tests.unit.engine.driver import memory_plan
from tests.unit.engine.runner.driver import open_runner, prompt_of

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
def expected(oracle: transformers.PreTrainedModel) -> list[list[int]]:
    return [reference_greedy(oracle, prompt, NUM_TOKENS) for prompt in prompts()]


def prompts() -> list[list[int]]:
    return [prompt_of(length, 199, seed=length) for length in LENGTHS]


def poison_free_blocks(scheduler: Scheduler, runner: ModelRunner) -> None:
    """What nobody holds, and the spare block, turn into NaN: a weight of 0 would not hide it."""
    free = [*scheduler._state.cache._pool._free, runner.storage.num_blocks]
    for layer in runner.storage.layers:
        for tensor in layer.tensors():
            if "float" in str(tensor.dtype):
                tensor[free] = float("nan")


def generate(
    runner: ModelRunner, *, window: int | None, prefix_caching: bool, num_host_blocks: int, n: int = 1
) -> tuple[dict[tuple[int, int], list[int]], Counter[str], int]:
    """Tokens by (request, choice), preemptions by cause, and the most blocks that were held at once."""
    scheduler = Scheduler(
        SchedulerConfig(max_num_batched_tokens=48, long_prefill_tokens=32),
        CacheConfig(prefix_caching=prefix_caching),
        memory_plan(runner.storage.num_blocks, runner.storage.block_size, 256),
        model="m",
        num_host_blocks=num_host_blocks,
        window=window,
    )
    sampling = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, n=n, best_of=n)
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
    return tokens, Counter(scheduler.load(10.0).counters.preemptions), most


def native_or_skip() -> str:
    try:
        load_native()
    except NativeUnavailableError as reason:
        pytest.skip(f"no native kernels: {reason}")
    return "required"


@pytest.mark.parametrize("kernels", ["torch", "reference", "native"])
@pytest.mark.parametrize(("prefix_caching", "host_bytes"), [(False, 0), (True, 0), (True, 1 << 17)])
def test_tokens_equal_transformers(
    folder: Path, expected: list[list[int]], kernels: str, prefix_caching: bool, host_bytes: int
) -> None:
    """Chunked prompts, several sequences and preemption on a cache of 17 blocks."""
    options = {"native": native_or_skip()} if kernels == "native" else {"attention_backend": kernels}
    if kernels != "native":
        options["native"] = "off"
    with closing(
        open_runner(folder, kv_cache_bytes=17 * 6144, cache={"host_bytes": host_bytes}, **options)
    ) as runner:
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


def test_one_layer_without_a_window_keeps_every_block(tmp_path: Path) -> None:
    kinds = ["sliding_attention", "full_attention"]
    make_checkpoint(tmp_path, "qwen2", use_sliding_window=True, sliding_window=9, layer_types=kinds)
    assert read_spec(tmp_path).windows == (9, None)
    assert read_spec(tmp_path).window is None
