"""Models whose layers carry a state, through the real scheduler and runner: what is found again, forked and
preempted gives what transformers computes from scratch.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Literal

import pytest

from engine.config import AdaptersConfig, CacheConfig, EngineConfig, ParallelConfig, SchedulerConfig
from engine.model.adapter_memory import adapter_bytes
from engine.model.families import read_spec
from engine.model.plan import make_plan, plan_and_fullest, plan_input
from engine.runner.build import build_here
from engine.runner.prefix_disk.build import open_disk
from engine.runner.prefix_disk.tier import DiskTier
from engine.speculation_config import SpeculationConfig
from runtime.config import ModelConfig
from runtime.errors import ConfigError
from tests.unit.engine.checkpoints import edit_config, make_checkpoint, reference_greedy
from tests.unit.engine.driver import Driver
from tests.unit.engine.model.hybrids import HYBRIDS
from tests.unit.engine.runner.driver import open_runner, poison_floats, prompt_of

FAMILIES = [
    *("lfm2", "qwen3.5", "bamba", "falcon-h1", "recurrent-gemma"),
    *("kimi-linear-heads", "minimax", "jamba", "mamba", "mamba2"),
]
# Of these no layer attends, and blocks have no bytes.
KEYLESS = ["jamba-keyless", "mamba", "mamba2"]
GIB = 1 << 30


class FinishedDisk:
    """The real tier, for which every step waits until it has done what was asked of it."""

    def __init__(self, tier: DiskTier) -> None:
        self._tier = tier
        self._num_reading = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tier, name)

    def read_later(self, token: int, blocks: Sequence[tuple[bytes, int]]) -> None:
        self._num_reading += 1
        self._tier.read_later(token, blocks)

    def finished(self) -> list[tuple[int, int]]:
        found = self._tier.finished()
        self._num_reading -= len(found)
        return found

    @property
    def is_idle(self) -> bool:
        return not self._num_reading

    def work(self, share: float) -> None:
        tier = self._tier
        while tier._waiting or tier._writing is not None or len(tier._finished) < self._num_reading:
            time.sleep(0.001)


@contextmanager
def engine(
    folder: Path,
    *,
    overlap: bool = False,
    num_blocks: int = 0,
    native: str = "required",
    speculation: SpeculationConfig | None = None,
    parallel: ParallelConfig | None = None,
    **cache: Any,
) -> Iterator[Driver]:
    """A scheduler over the real runner of a checkpoint, whose cache begins with NaN."""
    limits = {"max_num_seqs": 6, "max_num_batched_tokens": 40}
    parallel = parallel or ParallelConfig()
    # Blocks without bytes would be tens of thousands, and after every step all are looked through.
    num_bytes = (1 if read_spec(folder).is_keyless else 8) << 20
    if num_blocks:
        cache["kv_cache_bytes"] = bytes_of(folder, num_blocks, limits, parallel)
    config = EngineConfig(
        dtype="float32",
        num_threads=parallel.degrees.size,
        parallel=parallel,
        native=native,
        cache=CacheConfig(**({"kv_cache_bytes": num_bytes} | cache)),
        scheduler=SchedulerConfig(**limits, long_prefill_tokens=24),
        max_model_len=128,
        speculation=speculation or SpeculationConfig(),
    )
    runner, memory, facts = build_here(config, ModelConfig(path=str(folder)), lambda phase, part: None)
    for layer in runner.storage.layers:
        for tensor in layer.tensors():
            poison_floats(tensor)
    assert memory.num_states
    tier = open_disk(config, ModelConfig(path=str(folder)), memory, facts, runner.block_bytes())
    driver = Driver(
        memory=memory,
        overlap=overlap,
        prefix_caching=config.cache.prefix_caching,
        num_host_blocks=memory.num_host_blocks(config.cache.host_bytes),
        disk=None if tier is None else FinishedDisk(tier),  # type: ignore[arg-type]
        **limits,
    )
    driver.runner = runner
    with closing(runner), closing(tier) if tier else nullcontext():
        yield driver
        assert driver.scheduler.num_requests == 0
        assert driver.runner.num_states() == 0


def bytes_of(folder: Path, num_blocks: int, limits: dict[str, int], parallel: ParallelConfig) -> int:
    """Bytes of a cache that has about so many blocks, and as few states as there can be; of a rank's, where
    there are several.
    """
    config = EngineConfig(
        dtype="float32",
        max_model_len=128,
        scheduler=SchedulerConfig(**limits),
        parallel=parallel,
        num_threads=parallel.degrees.size,
    )
    given = plan_input(config, ModelConfig(path=str(folder)), device="cpu", available_bytes=8 * GIB)
    plan, full = plan_and_fullest(given)
    state = full.spec.state
    assert state is not None
    return num_blocks * plan.kv_bytes_per_token * plan.block_size + 10 * state.num_bytes


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("native", ["required", "off"])
@pytest.mark.parametrize("overlap", [False, True])
def test_prompts_that_begin_alike(family: str, native: str, overlap: bool, tmp_path: Path) -> None:
    oracle = make_checkpoint(tmp_path, HYBRIDS[family][0], **HYBRIDS[family][1])
    shared = prompt_of(43, 199)
    prompts = [shared, shared, *([*shared[:37], *prompt_of(20, 199, seed=seed)] for seed in (1, 2, 3))]
    with engine(tmp_path, overlap=overlap, native=native) as driver:
        requests = []
        for prompt in prompts:
            requests.append(driver.submit(prompt, max_tokens=6, temperature=0.0))
            driver.run()
        together = [driver.submit(prompt, max_tokens=6, temperature=0.0) for prompt in prompts]
        driver.run()
        hits = driver.scheduler.load(driver.now).counters.prefix_hit_tokens
        assert hits >= 32 + 32 + 5 * 32
        for request, again, prompt in zip(requests, together, prompts, strict=True):
            expected = reference_greedy(oracle, prompt, 6, driver.tokens(again))
            assert driver.tokens(request) == driver.tokens(again) == expected


def preempted_answers_go_on(family: str, folder: Path, **options: Any) -> None:
    """Twelve blocks for six answers that grow to five blocks each."""
    oracle = make_checkpoint(folder, HYBRIDS[family][0], **HYBRIDS[family][1])
    with engine(folder, num_blocks=12, **options) as driver:
        prompts = [prompt_of(30 + index, 199, seed=index) for index in range(6)]
        requests = [driver.submit(prompt, max_tokens=40, temperature=0.0) for prompt in prompts]
        driver.run()
        assert driver.scheduler.load(driver.now).counters.num_preemptions
        for request, prompt in zip(requests, prompts, strict=True):
            tokens = driver.tokens(request)
            assert tokens == reference_greedy(oracle, prompt, 40, tokens)


@pytest.mark.parametrize("family", [each for each in FAMILIES if each not in KEYLESS])
@pytest.mark.parametrize("host_bytes", [0, 1 << 20])
def test_preemption_goes_on_where_it_was(family: str, host_bytes: int, tmp_path: Path) -> None:
    preempted_answers_go_on(family, tmp_path, host_bytes=host_bytes)


@pytest.mark.parametrize("family", KEYLESS)
@pytest.mark.parametrize("native", ["required", "off"])
@pytest.mark.parametrize("host_bytes", [0, 1 << 20])
def test_a_higher_tier_displaces_what_keeps_states_alone(
    family: str, native: str, host_bytes: int, tmp_path: Path
) -> None:
    """Slots are what there are too few of, and what was left at ends of blocks is gone on with."""
    oracle = make_checkpoint(tmp_path, HYBRIDS[family][0], **HYBRIDS[family][1])
    with engine(tmp_path, num_blocks=1, native=native, host_bytes=host_bytes) as driver:
        prompts = [prompt_of(30 + index, 199, seed=index) for index in range(9)]
        requests = [driver.submit(prompt, max_tokens=40, temperature=0.0) for prompt in prompts[:6]]
        while not all(map(driver.tokens, requests)):
            driver.step()
        requests += [
            driver.submit(prompt, max_tokens=40, temperature=0.0, priority=10) for prompt in prompts[6:]
        ]
        driver.run()
        assert driver.scheduler.load(driver.now).counters.num_preemptions
        for request, prompt in zip(requests, prompts, strict=True):
            tokens = driver.tokens(request)
            assert tokens == reference_greedy(oracle, prompt, 40, tokens)


@pytest.mark.parametrize("family", FAMILIES)
def test_choices_and_beams_have_states_of_their_own(family: str, tmp_path: Path) -> None:
    oracle = make_checkpoint(tmp_path, HYBRIDS[family][0], **HYBRIDS[family][1])
    prompt = prompt_of(35, 199)
    answers = []
    for prefix_caching in (True, False):
        with engine(tmp_path, prefix_caching=prefix_caching) as driver:
            drawn = driver.submit(prompt, max_tokens=12, n=3, seed=4)
            beams = driver.submit(prompt, max_tokens=12, n=3, best_of=3, beam_width=3, temperature=0.0)
            greedy = driver.submit(prompt, max_tokens=12, temperature=0.0)
            driver.run()
            answers.append(
                [driver.tokens(request, choice) for request in (drawn, beams) for choice in range(3)]
            )
            tokens = driver.tokens(greedy)
            assert tokens == reference_greedy(oracle, prompt, 12, tokens)
    assert answers[0] == answers[1]
    assert len({tuple(tokens) for tokens in answers[0]}) == 6


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("native", ["required", "off"])
def test_copies_that_made_room_come_back_from_the_host(family: str, native: str, tmp_path: Path) -> None:
    oracle = make_checkpoint(tmp_path, HYBRIDS[family][0], **HYBRIDS[family][1])
    hits = []
    with engine(tmp_path, native=native, num_blocks=12, host_bytes=4 << 20) as driver:
        num_slots = driver.memory.num_states
        assert driver.memory.num_host_states(driver.scheduler._state.cache._host.num_blocks) > num_slots
        prompts = [prompt_of(35, 199, seed=seed) for seed in range(num_slots + 2)]
        expected = [reference_greedy(oracle, prompt, 3) for prompt in prompts]
        for _ in range(2):
            for prompt, answer in zip(prompts, expected, strict=True):
                request = driver.submit(prompt, max_tokens=3, temperature=0.0)
                driver.run()
                assert driver.tokens(request) == answer
            counters = driver.scheduler.load(driver.now).counters
            hits.append(counters.prefix_hit_tokens + counters.restored_tokens)
    assert hits == [0, 32 * len(prompts)]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("native", ["required", "off"])
def test_states_go_back_behind_rejected_drafts(family: str, native: str, tmp_path: Path) -> None:
    oracle = make_checkpoint(tmp_path, HYBRIDS[family][0], **HYBRIDS[family][1])
    # Tokens that come back, so that there is something to look up: right and wrong.
    motif = prompt_of(6, 199)
    prompts = [[*motif, 5 + number, *motif, 9, *motif[: 2 + number]] for number in range(3)]
    answers = []
    for method in ("ngram", "off"):
        drafts = SpeculationConfig(method=method, min_ngram=1, min_acceptance=0.0)
        with engine(tmp_path, native=native, speculation=drafts) as driver:
            greedy = [driver.submit(prompt, max_tokens=48, temperature=0.0) for prompt in prompts]
            drawn = driver.submit(prompts[0], max_tokens=40, temperature=0.4, seed=3)
            driver.run()
            # Where the answer ends, copies were left at ends of blocks also by rows with drafts.
            again = driver.submit([*prompts[0], *driver.tokens(greedy[0])], max_tokens=4, temperature=0.0)
            driver.run()
            answers.append([driver.tokens(request) for request in (*greedy, drawn, again)])
            ended = [
                each.statistics for events in driver.events.values() for each in events if each.statistics
            ]
            drafted = sum(each.drafted_tokens for each in ended)
            accepted = sum(each.accepted_tokens for each in ended)
            assert drafted == accepted == 0 if method == "off" else 0 < accepted < drafted
    assert answers[0] == answers[1]
    assert answers[0][0] == reference_greedy(oracle, prompts[0], 48, answers[0][0])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("native", ["required", "off"])
def test_another_engine_finds_prefix_and_state_on_disk(family: str, native: str, tmp_path: Path) -> None:
    folder, kept = tmp_path / "model", tmp_path / "kept"
    oracle = make_checkpoint(folder, HYBRIDS[family][0], **HYBRIDS[family][1])
    prompt = prompt_of(43, 199)
    expected = reference_greedy(oracle, prompt, 6)
    hits = []
    for _ in range(2):
        with engine(folder, native=native, disk_path=str(kept)) as driver:
            request = driver.submit(prompt, max_tokens=6, temperature=0.0)
            driver.run()
            assert driver.tokens(request) == expected
            hits.append(driver.scheduler.load(driver.now).counters.prefix_hit_tokens)
    # Blocks have 16 tokens.
    assert hits == [0, 32]


def test_another_engines_answer_is_gone_on_with(tmp_path: Path) -> None:
    oracle = make_checkpoint(tmp_path, HYBRIDS["qwen3.5"][0], **HYBRIDS["qwen3.5"][1])
    prompt = prompt_of(21, 199)
    expected = reference_greedy(oracle, prompt, 20)
    with engine(tmp_path) as driver:
        request = driver.submit(prompt, max_tokens=20, temperature=0.0, output_token_ids=tuple(expected[:13]))
        driver.run()
        assert driver.tokens(request) == expected[13:]


def test_the_plan_counts_states_and_what_is_allocated_is_what_it_says(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, HYBRIDS["falcon-h1"][0], **HYBRIDS["falcon-h1"][1])
    config = EngineConfig(
        cache=CacheConfig(kv_cache_bytes=4 << 20), scheduler=SchedulerConfig(max_num_seqs=5)
    )
    runner, plan, _ = build_here(config, ModelConfig(path=str(tmp_path)), lambda phase, part: None)
    with closing(runner):
        layers = runner.storage.layers
        assert sum(part.nbytes for layer in layers for part in layer.state.tensors()) == plan.state_bytes
        kept = sum(part[:-1].nbytes for layer in layers for part in layer.keys.tensors())
        assert kept == plan.kv_cache_bytes
    assert plan.num_states > 5 + 4
    assert 0 <= (4 << 20) - plan.kv_cache_bytes - plan.state_bytes < plan.kv_bytes_per_token * plan.block_size
    assert plan.state_interval % plan.block_size == 0


@pytest.mark.parametrize("family", KEYLESS)
def test_the_plan_of_states_alone_gives_them_all_bytes(family: str, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, HYBRIDS[family][0], **HYBRIDS[family][1])
    config = EngineConfig(
        max_model_len=256,
        cache=CacheConfig(kv_cache_bytes=4 << 20),
        scheduler=SchedulerConfig(max_num_seqs=5),
    )
    runner, plan, _ = build_here(config, ModelConfig(path=str(tmp_path)), lambda phase, part: None)
    with closing(runner):
        layers = runner.storage.layers
        assert sum(part.nbytes for layer in layers for part in layer.tensors()) == plan.state_bytes
    assert plan.kv_cache_bytes == plan.kv_bytes_per_token == plan.block_bytes == 0
    assert 0 <= (4 << 20) - plan.state_bytes < plan.state_bytes / plan.num_states
    # Every sequence finds blocks, whatever others hold, and so do all tokens between copies.
    assert plan.num_blocks >= 5 * 16 + plan.num_states * plan.state_interval // plan.block_size
    assert (
        plan.num_host_states(plan.num_host_blocks(1 << 20)) == (1 << 20) * plan.num_states // plan.state_bytes
    )


def test_contexts_of_models_that_know_no_positions(tmp_path: Path) -> None:
    """Far longer ones than the default may be asked for, which hold as many blocks; but not any."""
    make_checkpoint(tmp_path, HYBRIDS["mamba"][0], **HYBRIDS["mamba"][1])
    # transformers writes what it does not know.
    edit_config(tmp_path, max_position_embeddings=None)
    given = {"device": "cpu", "available_bytes": 8 * GIB}
    model = ModelConfig(path=str(tmp_path))
    assert plan_input(EngineConfig(), model, **given).max_model_len == 1 << 15
    plan = make_plan(plan_input(EngineConfig(max_model_len=1 << 20), model, **given))
    assert plan.max_model_len == 1 << 20
    assert 1 << 16 <= plan.num_blocks <= 1 << 18
    beyond = plan_input(EngineConfig(max_model_len=(1 << 20) + 1), model, **given)
    with pytest.raises(ConfigError, match=r"max_model_len = 1048577 exceeds the 1048576 positions of Mamba"):
        make_plan(beyond)


@pytest.mark.parametrize("family", [*FAMILIES, "bailing", "olmo-hybrid"])
def test_room_for_adapters_is_what_products_of_states_take(family: str, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, HYBRIDS[family][0], **HYBRIDS[family][1])
    config = AdaptersConfig(slots=1, max_rank=16)
    with closing(open_runner(tmp_path, attention_backend="torch")) as runner:
        taken = [linear for linear in runner.model.record.linears() if linear.parts]
    elements = sum(
        16 * (linear.inputs * len(linear.parts) + sum(size for _, size in linear.parts)) for linear in taken
    )
    assert adapter_bytes(runner.model.spec, config, 4) == 4 * elements


def test_too_little_memory_for_states_is_said(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, HYBRIDS["lfm2"][0], **HYBRIDS["lfm2"][1])
    config = EngineConfig(
        cache=CacheConfig(kv_cache_bytes=1 << 20), scheduler=SchedulerConfig(max_num_seqs=2000)
    )
    given = plan_input(config, ModelConfig(path=str(tmp_path)), device="cpu", available_bytes=8 * GIB)
    with pytest.raises(ConfigError, match=r"2004 states of its layers .*engine\.scheduler\.max_num_seqs"):
        make_plan(given)


@pytest.mark.parametrize("method", ["ngram", "suffix", "draft_model"])
def test_drafts_that_states_cannot_go_back_behind_are_refused_by_name(
    method: Literal["ngram", "suffix", "draft_model"], tmp_path: Path
) -> None:
    make_checkpoint(tmp_path / "lfm2", HYBRIDS["lfm2"][0], **HYBRIDS["lfm2"][1])
    config = EngineConfig(speculation=SpeculationConfig(method=method, draft_model="/draft"))
    given = {"device": "cuda", "available_bytes": 8 * GIB}
    with pytest.raises(ConfigError, match=rf"\.method = '{method}': Lfm2.* state, .*; set it to off"):
        plan_input(config, ModelConfig(path=str(tmp_path / "lfm2")), **given)
    make_checkpoint(tmp_path / "llama", "llama")
    drafted = SpeculationConfig(method="draft_model", draft_model=str(tmp_path / "lfm2"))
    with pytest.raises(ConfigError, match=r"draft_model = '.*': Lfm2.* state, .*; take one that"):
        plan_input(EngineConfig(speculation=drafted), ModelConfig(path=str(tmp_path / "llama")), **given)


@pytest.mark.parametrize(
    ("family", "keys"),
    [
        ("qwen3.5", {"linear_num_value_heads": 5}),
        ("bamba", {"mamba_d_head": 13}),
        ("bamba", {"time_step_limit": [2.0, 1.0]}),
        ("recurrent-gemma", {"hidden_activation": "silu"}),
        ("recurrent-gemma", {"lru_width": 50}),
        ("falcon-h1", {"attention_bias": True}),
        ("falcon-h1", {"ssm_multipliers": [1.0]}),
        ("kimi-linear", {"moe_router_activation_func": "softmax"}),
        ("kimi-linear", {"linear_attn_config": {"full_attn_layers": [4], "kda_layers": [1, 2]}}),
        ("bailing", {"kda_lower_bound": 0.5}),
        ("minimax", {"linear_attn_alpha_factor": 2.0}),
        ("minimax", {"mlp_alpha_factor": 0.0}),
        ("mamba", {"hidden_act": "gelu"}),
        ("mamba", {"intermediate_size": 88}),
        ("mamba2", {"num_heads": 6}),
    ],
)
def test_what_is_not_computed_is_refused_by_its_name(
    family: str, keys: dict[str, Any], tmp_path: Path
) -> None:
    make_checkpoint(tmp_path, HYBRIDS[family][0], **HYBRIDS[family][1])
    edit_config(tmp_path, **keys)
    with pytest.raises(ConfigError, match=next(iter(keys))):
        plan_input(EngineConfig(), ModelConfig(path=str(tmp_path)), device="cpu", available_bytes=8 * GIB)
