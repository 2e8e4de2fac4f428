"""Answers that forget keys which are rounded by channel: the same however they came about, and they are told
what that loses.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from contract.retention import Retention
from engine.runner.forgotten.votes import Votes, choose, chosen_of
from engine.runner.runner import ModelRunner
from engine.types import ChoiceStatistics, ChosenTokens, KeptBlocks
from kernels.paged_cache.host import KEY_GROUP, allocate_host_layer
from tests.unit.engine.checkpoints import make_checkpoint
from tests.unit.engine.runner.driver import open_runner, prompt_of
from tests.unit.engine.runner.test_chosen import NUM_TOKENS, answer
from tests.unit.engine.runner.test_kvzap import config_of, trained
from tests.unit.engine.runner.test_retention import check_among_others, generate

CACHE: dict[str, Any] = {"kv_dtype": "kivi4", "block_size": KEY_GROUP}
LENGTH = 640
SIZES: dict[str, Any] = {"kv_dtype": "kivi4", "max_model_len": LENGTH}
ASKED: list[tuple[list[int], Retention | None]] = [
    (prompt_of(450, 199, seed=1), Retention(policy="snapkv", keep=0.4)),
    (prompt_of(410, 199, seed=2), Retention(policy="h2o", window_tokens=1)),
    # The same without, which finds the blocks of the first.
    (prompt_of(450, 199, seed=1), None),
    # Their answers leave a block where they begin another.
    (prompt_of(250, 199, seed=3), Retention(policy="window+sinks", window_tokens=1)),
    (prompt_of(384, 199, seed=4), Retention(policy="window+sinks", keep=0.6)),
    (prompt_of(448, 199, seed=5), Retention(policy="snapkv", window_tokens=200)),
    (prompt_of(430, 199, seed=6), Retention(policy="kvzap", keep=0.5)),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a scorer for kvzap beside it."""
    place = tmp_path_factory.mktemp("llama")
    model = make_checkpoint(place, "llama", head_dim=16, max_position_embeddings=1024)
    trained(model).save(place / "kvzap", config_of(model))
    return place


def opened(folder: Path, native: str, cache: dict[str, Any] = CACHE, **options: Any) -> Any:
    return closing(open_runner(folder, native=native, cache=cache, max_model_len=LENGTH, **options))


@pytest.fixture(scope="module", params=["required", "off"])
def native(request: pytest.FixtureRequest) -> str:
    """Whether the native kernels compute, or torch."""
    return str(request.param)


@pytest.fixture(scope="module")
def runner(folder: Path, native: str) -> Iterator[ModelRunner]:
    with opened(folder, native) as runner:
        yield runner


@pytest.fixture(scope="module")
def expected(runner: ModelRunner) -> list[list[int]]:
    """Answers one after another."""
    answers = [answer(runner, prompt, asked, budget=512, **SIZES)[0][0] for prompt, asked in ASKED]
    # What is forgotten shows.
    assert answers[0] != answers[2]
    return answers


@pytest.mark.parametrize(
    ("num_blocks", "prefix_caching", "budget", "num_host_blocks"),
    [(23, True, 48, 0), (23, False, 131, 0), (23, True, 48, 20), (90, True, 512, 0)],
)
def test_answers_among_others_and_preempted(
    folder: Path,
    native: str,
    expected: list[list[int]],
    num_blocks: int,
    prefix_caching: bool,
    budget: int,
    num_host_blocks: int,
) -> None:
    """With NaN in all that nobody holds; some come back from the host."""
    with opened(folder, native) as plain:
        per_block = sum(part[0].nbytes for layer in plain.storage.layers for part in layer.tensors())
    cache = CACHE | {"host_bytes": num_host_blocks * per_block}
    with opened(folder, native, cache, kv_cache_bytes=num_blocks * per_block) as runner:
        check_among_others(
            runner,
            expected,
            prefix_caching=prefix_caching,
            num_host_blocks=num_host_blocks,
            asked_of=ASKED,
            max_num_batched_tokens=budget,
            **SIZES,
        )


def test_choices_and_what_another_engine_began(runner: ModelRunner, expected: list[list[int]]) -> None:
    for number in (0, 1, 3, 5, 6):
        prompt, asked = ASKED[number]
        choices, _ = answer(runner, prompt, asked, n=3, **SIZES)
        assert choices == dict.fromkeys(range(3), expected[number])
        for cut in (9, 64):
            rest, _ = answer(runner, prompt, asked, output=expected[number][:cut], budget=29, **SIZES)
            assert rest[0] == expected[number][cut:]


def test_beams_forget_alike_however_they_are_computed(runner: ModelRunner, expected: list[list[int]]) -> None:
    """One of width 1 is the answer; those that fork are the same in other chunks, without cached prefixes."""
    # The last one comes late. Answers are long enough to forget a block.
    options = SIZES | {"asked_of": [ASKED[3], ([1], None)], "max_tokens": 20}
    one, _ = generate(runner, prefix_caching=True, beam_width=1, **options)
    assert one[0, 0] == expected[3][:20]
    found, _ = generate(runner, prefix_caching=True, n=2, beam_width=2, **options)
    others, _ = generate(
        runner, prefix_caching=False, n=2, beam_width=2, max_num_batched_tokens=130, **options
    )
    assert found == others


def test_what_is_lost_is_measured_over_whole_keys_and_rounded_ones(
    folder: Path, native: str, runner: ModelRunner, expected: list[list[int]]
) -> None:
    """Row by row, in chunks of a known answer, and near what other keys lose."""

    def lost(runner: ModelRunner, number: int, **options: Any) -> tuple[list[int], ChoiceStatistics]:
        prompt, asked = ASKED[number]
        assert asked is not None
        tokens, told = answer(runner, prompt, replace(asked, max_lost=1.0), **SIZES | options)
        return tokens[0], told

    with opened(folder, native, {"block_size": KEY_GROUP, "kv_dtype": "float32"}) as plain:
        for number in (0, 3):
            tokens, told = lost(runner, number)
            assert tokens == expected[number]
            rest, later = lost(runner, number, output=tokens[: NUM_TOKENS - 1], budget=47)
            assert rest == tokens[-1:]
            assert later.lost_tokens == pytest.approx(told.lost_tokens, rel=1e-4)
            _, others = lost(plain, number, kv_dtype="float32", output=tokens[: NUM_TOKENS - 1])
            assert told.lost_tokens == pytest.approx(others.lost_tokens, rel=0.05)


def test_streams_go_on_beyond_the_positions(folder: Path, native: str) -> None:
    """As a request does whose prompt is what they take along, the least that they may: three blocks."""
    positions, carried = 4 * KEY_GROUP, 3 * KEY_GROUP
    keep = Retention(policy="window+sinks", window_tokens=1)
    sizes = SIZES | {"max_model_len": positions, "prefix_caching": False}
    prompt = prompt_of(200, 199)
    with closing(open_runner(folder, native=native, cache=CACHE, max_model_len=positions)) as runner:
        # The last one comes late.
        tokens, _ = generate(runner, asked_of=[(prompt, keep), ([1], None)], max_tokens=150, **sizes)
        text = prompt + tokens[0, 0]
        behind = text[:KEY_GROUP] + text[positions - carried + KEY_GROUP : positions]
        again, _ = generate(runner, asked_of=[(behind, keep), ([1], None)], max_tokens=KEY_GROUP, **sizes)
    assert again[0, 0] == text[positions : positions + KEY_GROUP]


def test_a_key_that_is_chosen_is_rounded_twice_and_loses_no_more_than_that() -> None:
    """Two roundings that know nothing of each other err by a root of two together."""
    kept = KeptBlocks.of(Retention(policy="h2o", keep=0.5), 16 * KEY_GROUP, KEY_GROUP)
    assert isinstance(kept, ChosenTokens)
    blocks, fresh = np.arange(16), np.arange(16, 16 + kept.num_fresh)
    shape = {"block_size": KEY_GROUP, "num_heads": 2, "key_dim": 32, "value_dim": 32, "shared_value_dim": 0}
    layer = allocate_host_layer(num_blocks=16 + kept.num_fresh, type_name="kivi4", **shape)
    generator = np.random.default_rng(1)
    exact = generator.standard_normal((16, 2, KEY_GROUP, 32), np.float32)
    exact[..., ::5] += 8
    layer.put_keys(exact, blocks)
    votes = Votes(kept, fresh.tolist())
    votes.sums = generator.integers(0, 1 << 40, (2, 16 * KEY_GROUP))
    once, chosen = layer.wide_keys(blocks), chosen_of(votes.sums, kept)
    choose(votes, np.concatenate((blocks, fresh)), [layer], 16 + kept.num_fresh, None)
    assert layer.wide_keys(blocks).tobytes() == once.tobytes()
    twice = layer.wide_keys(fresh)
    for head in range(2):
        before, rounded = (each[:, head].reshape(-1, 32)[chosen[head]] for each in (exact, once))
        errors = [np.linalg.norm(each - before) for each in (rounded, twice[:, head].reshape(-1, 32))]
        assert 1.2 < errors[1] / errors[0] < 1.5
