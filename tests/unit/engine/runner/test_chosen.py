"""What stays of a prompt under snapkv and h2o is what their papers say, and answers are those of a model that
sees no more, whatever becomes of the memory.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from msgspec.structs import replace
from numpy.typing import NDArray

from contract.retention import Retention
from engine.config import CacheConfig, KvDtype, SchedulerConfig
from engine.runner.forgotten.votes import LayerVotes, Votes, choose, chosen_of
from engine.runner.runner import ModelRunner
from engine.scheduler import Scheduler
from engine.types import ChoiceStatistics, ChosenTokens, KeptBlocks, Request, SamplingParams
from kernels.paged_cache.host import allocate_host_layer
from kernels.paged_cache.store import allocate_layer
from tests.unit.engine.checkpoints import make_checkpoint
from tests.unit.engine.driver import memory_plan
from tests.unit.engine.runner.cuda.test_device_runner import open_device_runner
from tests.unit.engine.runner.driver import open_runner, prompt_of
from tests.unit.engine.runner.test_moved_forms import FORMS
from tests.unit.engine.runner.test_retention import BLOCK, NUM_TOKENS, check_among_others, generate
from tests.unit.engine.runner.test_window import computed_by, native_or_skip, poison_free_blocks

ASKED: list[tuple[list[int], Retention | None]] = [
    (prompt_of(130, 199, seed=1), Retention(policy="snapkv", keep=0.4)),
    (prompt_of(93, 199, seed=2), Retention(policy="h2o", window_tokens=1)),
    # The same without, which finds the blocks of the first.
    (prompt_of(130, 199, seed=1), None),
    (prompt_of(97, 199, seed=3), Retention(policy="snapkv", window_tokens=60)),
]


def num_kept(num_prompt: int, asked: Retention) -> int:
    """Tokens that stay of a prompt: as asked for, three blocks at least, in whole blocks but for its last."""
    tokens = asked.window_tokens if asked.keep is None else math.ceil(asked.keep * num_prompt)
    assert tokens is not None
    tail = num_prompt % BLOCK
    return math.ceil((max(tokens, 3 * BLOCK) - tail) / BLOCK) * BLOCK + tail


def reference(weights: torch.Tensor, num_kv: int, asked: Retention) -> torch.Tensor:
    """Which positions [K, P] stay by the weights [H, P, P] of the prompt's attention, as the papers say."""
    num_prompt = weights.shape[-1]
    count = num_kept(num_prompt, asked)
    last = 32 if asked.policy == "snapkv" else count // 2
    if asked.policy == "snapkv":
        votes = weights[:, -32:, :-32].mean(1)
        votes = torch.nn.functional.avg_pool1d(votes, kernel_size=5, padding=2, stride=1)
    else:
        votes = weights.sum(1)[:, :-last]
    votes = votes.view(num_kv, -1, votes.shape[1]).mean(1)
    kept = torch.zeros(num_kv, num_prompt, dtype=torch.bool)
    kept[:, -last:] = True
    return kept.scatter(1, votes.topk(count - last).indices, True)


class Choosing:
    """A transformers model whose answer sees what stays of its prompt."""

    def __init__(self, model: transformers.PreTrainedModel) -> None:
        self.model = model
        self.num_prompt = 0
        self.asked: Retention | None = None
        # [K, P] by layer.
        self.kept: dict[int, torch.Tensor] = {}
        # Of each layer and position [H, T], the part of full attention that it does not see.
        self.lost: dict[int, torch.Tensor] = {}

    def attend(self, layer: Any, q: Any, k: Any, v: Any, mask: Any, scaling: float, **_: Any) -> Any:
        num_kv, num_prompt = k.shape[1], self.num_prompt
        group = q.shape[1] // num_kv
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        scores = (q @ k.transpose(2, 3)) * scaling
        hidden = torch.ones(scores.shape[2:], dtype=torch.bool).triu(1).repeat(q.shape[1], 1, 1)
        whole = scores[0].masked_fill(hidden, float("-inf")).softmax(-1)
        if self.asked is not None and num_prompt // BLOCK * BLOCK > self.num_kept():
            kept = self.stays(layer.layer_idx, whole[:, :num_prompt, :num_prompt], num_kv)
            self.kept[layer.layer_idx] = kept
            hidden[:, num_prompt:, :num_prompt] = ~kept.repeat_interleave(group, 0)[:, None]
        self.lost[layer.layer_idx] = whole.masked_fill(~hidden, 0.0).sum(-1)
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        return (weights @ v).transpose(1, 2).contiguous(), None

    def num_kept(self) -> int:
        assert self.asked is not None
        return num_kept(self.num_prompt, self.asked)

    def stays(self, layer: int, whole: torch.Tensor, num_kv: int) -> torch.Tensor:
        """Which positions [K, P], by the weights [H, P, P] of the prompt's attention."""
        assert self.asked is not None
        return reference(whole, num_kv, self.asked)

    def said(self, prompt: list[int], asked: Retention | None, tokens: list[int]) -> list[int]:
        """What it says after the prompt and each of the tokens but the last."""
        self.num_prompt, self.asked = len(prompt), asked
        transformers.AttentionInterface.register("choosing", self.attend)
        self.model.config._attn_implementation = "choosing"
        try:
            with torch.no_grad():
                logits = self.model(torch.tensor([prompt + tokens[:-1]]), use_cache=False).logits
        finally:
            self.model.config._attn_implementation = "eager"
        found: list[int] = logits[0, len(prompt) - 1 :].argmax(-1).tolist()
        return found


@pytest.fixture(scope="module")
def expected(folder: Path, oracle: transformers.PreTrainedModel) -> list[list[int]]:
    """Answers that are the model's, one after another."""
    with closing(open_runner(folder, kv_cache_bytes=60 * 6144)) as runner:
        answers = [answer(runner, prompt, asked)[0][0] for prompt, asked in ASKED]
    model = Choosing(oracle)
    for tokens, (prompt, asked) in zip(answers, ASKED, strict=True):
        assert model.said(prompt, asked, tokens) == tokens
        assert (model.said(prompt, None, tokens) == tokens) == (asked is None)
    return answers


@pytest.mark.parametrize(
    ("kernels", "num_blocks", "prefix_caching", "budget", "host_bytes"),
    [
        ("torch", 40, True, 48, 0),
        ("torch", 40, False, 48, 0),
        ("native", 40, True, 48, 1 << 17),
        ("native", 40, False, 23, 0),
        ("native", 90, True, 512, 0),
    ],
)
def test_tokens_equal_a_model_that_sees_no_more(
    folder: Path,
    expected: list[list[int]],
    kernels: str,
    num_blocks: int,
    prefix_caching: bool,
    budget: int,
    host_bytes: int,
) -> None:
    options = computed_by(kernels) | {"cache": {"host_bytes": host_bytes}}
    with closing(open_runner(folder, kv_cache_bytes=num_blocks * 6144, **options)) as runner:
        assert runner.storage.num_blocks == num_blocks
        check_among_others(
            runner,
            expected,
            prefix_caching=prefix_caching,
            num_host_blocks=host_bytes // 6144,
            asked_of=ASKED,
            max_num_batched_tokens=budget,
        )


@pytest.mark.parametrize("overlap", [False, True])
def test_answers_of_chosen_tokens_run_beside_captured_ones(
    folder: Path, expected: list[list[int]], overlap: bool
) -> None:
    """Graphs of a GPU, whose rules are checked on a CPU."""
    with closing(open_device_runner(folder, kv_cache_bytes=60 * 6144)) as runner:
        tokens, preemptions = generate(
            runner, prefix_caching=True, max_num_seqs=3, overlap=overlap, asked_of=ASKED
        )
    assert preemptions.total() > 0
    assert tokens == {(number, 0): each for number, each in enumerate(expected)}


def answer(
    runner: ModelRunner,
    prompt: list[int],
    asked: Retention | None,
    output: Sequence[int] = (),
    n: int = 1,
    budget: int = 48,
    max_model_len: int = 256,
    kv_dtype: KvDtype = "auto",
) -> tuple[dict[int, list[int]], ChoiceStatistics]:
    """Tokens by choice, and the last one's statistics."""
    scheduler = Scheduler(
        SchedulerConfig(max_num_batched_tokens=budget),
        CacheConfig(kv_dtype=kv_dtype),
        memory_plan(runner.storage.num_blocks, runner.storage.block_size, max_model_len),
        model="m",
    )
    request = Request(
        request_id=1,
        external_id="",
        prompt_token_ids=tuple(prompt),
        output_token_ids=tuple(output),
        sampling=SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, n=n, best_of=n),
        retention=asked,
    )
    scheduler.submit(request, 0.0)
    tokens: dict[int, list[int]] = defaultdict(list)
    statistics = ChoiceStatistics()
    while scheduler.has_work:
        plan = scheduler.schedule(1.0)
        scheduler.update(runner.launch(plan).wait(), 1.0)
        scheduler.check_invariants()
        poison_free_blocks(scheduler, runner)
        for event in scheduler.drain_events():
            assert event.failure is None, event.failure
            tokens[event.choice_index] += event.token_ids
            statistics = event.statistics or statistics
    assert scheduler.num_unreferenced_blocks == scheduler.num_total_blocks
    return tokens, statistics


def test_choices_and_what_another_engine_began_are_the_same_answer(
    folder: Path, expected: list[list[int]]
) -> None:
    with closing(open_runner(folder, kv_cache_bytes=60 * 6144)) as runner:
        choices, _ = answer(runner, *ASKED[0], n=3)
        rest, _ = answer(runner, *ASKED[1], output=expected[1][:37])
    assert choices == dict.fromkeys(range(3), expected[0])
    assert rest[0] == expected[1][37:]


@pytest.mark.parametrize("form", ["int8", "fp8"])
def test_other_forms_of_keys_and_values_choose_alike_everywhere(
    folder: Path, expected: list[list[int]], form: str
) -> None:
    assert expected
    answers = []
    for native in (native_or_skip(), "off"):
        options: dict[str, Any] = {"cache": {"kv_dtype": form}, "native": native}
        with closing(open_runner(folder, kv_cache_bytes=60 * 6144, **options)) as runner:
            answers.append([answer(runner, prompt, asked)[0][0] for prompt, asked in ASKED])
    assert answers[0] == answers[1]
    assert answers[0][0] != answers[0][2]


@pytest.mark.parametrize("form", FORMS)
def test_every_form_goes_on_elsewhere_as_it_began(tmp_path: Path, form: str) -> None:
    """What is chosen once more, from blocks that were computed in other steps, is the same."""
    make_checkpoint(tmp_path, "llama", head_dim=16, num_hidden_layers=4)
    with closing(open_runner(tmp_path, cache=FORMS[form], native=native_or_skip())) as runner:
        for prompt, asked in ASKED[:2]:
            told, _ = answer(runner, prompt, asked)
            rest, _ = answer(runner, prompt, asked, output=told[0][:37], budget=29)
            assert rest[0] == told[0][37:]


def test_what_was_not_chosen_is_measured(
    folder: Path, oracle: transformers.PreTrainedModel, expected: list[list[int]]
) -> None:
    prompt, asked = ASKED[0]
    assert asked is not None
    model = Choosing(oracle)
    model.said(prompt, asked, expected[0])
    lost = torch.stack(list(model.lost.values()))[:, :, len(prompt) :].mean((0, 1)).sum()
    with closing(open_runner(folder, kv_cache_bytes=60 * 6144)) as runner:
        tokens, statistics = answer(runner, prompt, replace(asked, max_lost=1.0))
        assert tokens[0] == expected[0]
        assert float(lost) <= statistics.lost_tokens <= 1.1 * float(lost)
        # Computed anew with all of it, before anything was lost.
        tokens, _ = answer(runner, prompt, replace(asked, max_lost=1e-9))
        assert tokens[0] == expected[2]


@pytest.mark.parametrize("is_native", [False, True])
@pytest.mark.parametrize("form", ["bfloat16", "int8", "fp8"])
def test_tokens_are_copied_as_they_are_stored(form: str, is_native: bool) -> None:
    """With their scales, where they have some."""
    kept = KeptBlocks.of(Retention(policy="h2o", window_tokens=1), 101, BLOCK)
    assert isinstance(kept, ChosenTokens)
    shape = {"num_blocks": 12, "block_size": BLOCK, "num_heads": 2, "key_dim": 8, "value_dim": 8}
    layer: Any = allocate_host_layer(**shape, shared_value_dim=0, type_name=form)
    if not is_native:
        dtype: Any = torch.float8_e4m3fn if form == "fp8" else getattr(torch, form)
        layer = allocate_layer(**shape, shared_value_dim=0, dtype=dtype, device=torch.device("cpu"))
    generator = np.random.default_rng(1)
    for each in map(bytes_of, layer.tensors()):
        each[:] = generator.integers(0, 256, each.shape, np.uint8)
    votes = Votes(kept, [9, 11, 10])
    votes.sums = sums = generator.integers(0, 1 << 40, (2, kept.num_whole * BLOCK))
    table = np.array([3, 1, 4, 0, 5, 2, 6])
    before = [each.copy() for each in map(bytes_of, layer.tensors())]
    choose(votes, table, [layer], 12, None)
    assert table.tolist() == [9, 11, 10, 12, 12, 12, 6]
    chosen = chosen_of(sums, kept)
    for old, new in zip(before, map(bytes_of, layer.tensors()), strict=True):
        for head in range(2):
            whole = np.concatenate([old[block, head] for block in (3, 1, 4, 0, 5, 2)])
            found = np.concatenate([new[block, head] for block in (9, 11, 10)])
            assert (found == whole[chosen[head]]).all()


def bytes_of(tensor: Any) -> NDArray[np.uint8]:
    """[N, K, P, bytes] of a cache's tensor."""
    found: NDArray[Any] = tensor if isinstance(tensor, np.ndarray) else tensor.view(torch.uint8).numpy()
    return found.view(np.uint8)


@pytest.mark.parametrize("policy", ["snapkv", "h2o"])
def test_votes_do_not_depend_on_the_cuts(policy: str) -> None:
    """To the bit: an answer that is computed once more chooses the same."""
    kept = KeptBlocks.of(Retention(policy=policy, window_tokens=50), 141, BLOCK)
    assert isinstance(kept, ChosenTokens)
    generator = np.random.default_rng(3)
    queries = torch.from_numpy(generator.standard_normal((160, 6, 8), np.float32))
    keys = torch.from_numpy(generator.standard_normal((2, 160, 8), np.float32))
    found = []
    for cuts in ([], [1, 109, 110, 130], list(range(0, 141, 7)), [128]):
        sums = np.zeros((2, kept.num_whole * BLOCK), np.int64)
        votes = LayerVotes(kept, sums)
        ends = [*cuts, 160]
        for start, end in zip([0, *cuts], ends, strict=True):
            votes.take(queries[start:end], start, lambda count: keys[:, :count], None)
            # Some are computed twice.
            votes.take(queries[start:end], start, lambda count: keys[:, :count], None)
        found.append(sums)
    assert all((each == found[0]).all() for each in found)


SHAPES = [(130, 6, 2), (141, 4, 4), (333, 8, 1)]


def voted(policy: str, num_prompt: int, num_heads: int, num_kv: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights [H, P, P] of queries and keys of chance, and the positions [K, P] that stay by their votes."""
    asked = Retention(policy=policy, keep=0.4)
    kept = KeptBlocks.of(asked, num_prompt, BLOCK)
    assert isinstance(kept, ChosenTokens)
    generator = np.random.default_rng(num_prompt)
    queries = torch.from_numpy(generator.standard_normal((num_prompt, num_heads, 8), np.float32))
    keys = torch.from_numpy(generator.standard_normal((num_kv, num_prompt, 8), np.float32))
    sums = np.zeros((num_kv, kept.num_whole * BLOCK), np.int64)
    LayerVotes(kept, sums).take(queries, 0, lambda count: keys[:, :count], None)
    stays = torch.zeros(num_kv, num_prompt, dtype=torch.bool)
    stays[:, kept.num_whole * BLOCK :] = True
    stays.scatter_(1, torch.from_numpy(chosen_of(sums, kept)), True)
    by_head = keys.repeat_interleave(num_heads // num_kv, 0)
    scores = queries.transpose(0, 1) @ by_head.transpose(1, 2)
    future = torch.ones(num_prompt, num_prompt, dtype=torch.bool).triu(1)
    return scores.masked_fill(future, float("-inf")).softmax(-1), stays


@pytest.mark.parametrize("policy", ["snapkv", "h2o", "kvzap"])
@pytest.mark.parametrize("block_size", [8, 16, 32])
def test_as_many_stay_as_there_are_fresh_blocks_whatever_the_length(policy: str, block_size: int) -> None:
    """Also where the last tokens of the prompt are all that is kept."""
    for num_prompt in range(100, 420):
        for window in (1, 128, 160):
            kept = KeptBlocks.of(Retention(policy=policy, window_tokens=window), num_prompt, block_size)
            if kept is None:
                continue
            assert isinstance(kept, ChosenTokens)
            size = kept.num_whole * block_size
            chosen = chosen_of(np.arange(2 * size).reshape(2, size) % 7, kept)
            assert chosen.shape == (2, kept.num_fresh * block_size)
            assert (np.diff(chosen) > 0).all()
            assert (chosen[:, -1] == size - 1).all()


@pytest.mark.parametrize("policy", ["snapkv", "h2o"])
@pytest.mark.parametrize(("num_prompt", "num_heads", "num_kv"), SHAPES)
def test_what_stays_is_what_the_papers_say(policy: str, num_prompt: int, num_heads: int, num_kv: int) -> None:
    weights, stays = voted(policy, num_prompt, num_heads, num_kv)
    assert (stays == reference(weights, num_kv, Retention(policy=policy, keep=0.4))).all()


@pytest.mark.parametrize(("num_prompt", "num_heads", "num_kv"), SHAPES)
def test_what_stays_is_what_kvpress_says(num_prompt: int, num_heads: int, num_kv: int) -> None:
    """Its SnapKVPress; and the sums that its ObservedAttentionPress divides by each key's queries."""
    kvpress = pytest.importorskip("kvpress", reason="kvpress is not installed")
    config = SimpleNamespace(num_attention_heads=num_heads, num_key_value_heads=num_kv)
    keys = torch.zeros(1, num_kv, num_prompt, 8)
    given = (SimpleNamespace(config=config), torch.zeros(1, num_prompt, 1), keys, keys)
    weights, stays = voted("snapkv", num_prompt, num_heads, num_kv)
    count = num_kept(num_prompt, Retention(policy="snapkv", keep=0.4))
    scores = kvpress.SnapKVPress(window_size=32).score(*given, weights[None], {})[0]
    assert (torch.zeros_like(stays).scatter(1, scores.topk(count).indices, True) == stays).all()
    weights, stays = voted("h2o", num_prompt, num_heads, num_kv)
    scores = kvpress.ObservedAttentionPress().score(*given, weights[None], {})[0]
    scores *= torch.arange(num_prompt, 0, -1)
    scores[:, num_prompt - count // 2 :] = float("inf")
    assert (torch.zeros_like(stays).scatter(1, scores.topk(count).indices, True) == stays).all()
