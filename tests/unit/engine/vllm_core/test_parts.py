"""The parts of the border by themselves: calls, turns, prefixes, the door, the table."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import msgspec
import numpy as np
import pytest
import torch

from contract.prefix import PrefixHasher, event_hash
from contract.sampling import SamplingParams
from contract.thinking import ThinkingTags
from engine.config import EngineConfig, SchedulerConfig, VllmConfig
from engine.core.messages import StepDone
from engine.model.pooled_heads import ACTIVATIONS
from engine.speculation_config import SpeculationConfig
from engine.types import (
    FinishReason,
    GrammarSpec,
    MemoryPlan,
    Request,
    SchedulerCounters,
    SchedulerLoad,
    TokenEvent,
)
from engine.vllm_core import launch
from engine.vllm_core.door import FrontDoor
from engine.vllm_core.environment import find_python
from engine.vllm_core.inside import plugin, pooling
from engine.vllm_core.inside.calls import calls_of, seed_of
from engine.vllm_core.inside.engine import CannotStart, _memory, check_libraries
from engine.vllm_core.inside.meter import CoreMeter
from engine.vllm_core.inside.order import FairOrder
from engine.vllm_core.inside.prefixes import CorePrefixes
from engine.vllm_core.inside.thinking import ThinkingGrammar, thought_of
from engine.vllm_core.options import EXCEPTIONS, OPTIONS, refuse, table
from runtime.errors import ConfigError


def request(**fields: Any) -> Request:
    sampling = SamplingParams(**{"max_tokens": 10, **fields.pop("sampling", {})})
    return Request(
        **{"request_id": 1, "external_id": "a", "prompt_token_ids": (5, 6, 7), "sampling": sampling, **fields}
    )


def plain(asked: Request) -> dict[str, Any]:
    """As it comes through the socket."""
    found: dict[str, Any] = msgspec.msgpack.decode(msgspec.msgpack.encode(asked), strict=False)
    return found


def test_every_option_stands_in_the_table() -> None:
    assert set(EXCEPTIONS) <= set(OPTIONS)
    assert set(SamplingParams.__struct_fields__) <= set(OPTIONS), "what becomes of it at vLLM? say so there"
    assert set(OPTIONS) <= {*SamplingParams.__struct_fields__, *Request.__struct_fields__}
    assert all(support.note for support in OPTIONS.values() if support.verdict != "honoured")


USED: dict[str, Any] = {
    "logit_bias": {3: 1.0},
    "allowed_token_ids": (3,),
    "stop_token_ids": (3,),
    "ignore_eos": True,
    "n": 2,
    "best_of": 2,
    "beam_width": 2,
    "repetition_penalty": 1.5,
}


@pytest.mark.parametrize("name", SamplingParams.__struct_fields__)
def test_an_option_that_nobody_named_is_refused_where_it_is_used(name: str) -> None:
    named = {option: support for option, support in OPTIONS.items() if option != name}
    neutral = {"n": 1, "best_of": 1} if name == "n" else {}
    assert refuse(request(sampling={"max_tokens": 16, **neutral}), named) is None
    used = {"best_of": 2} if name == "n" else {}
    asked = request(sampling={"max_tokens": 16, **used, name: USED.get(name, 0.5 if "_p" in name else 3)})
    refusal = refuse(asked, named)
    assert refusal is not None
    assert refusal.field == f"sampling.{name}"
    if OPTIONS[name].verdict != "refused":
        assert refuse(asked) is None


def test_what_is_known_counts_towards_every_limit() -> None:
    asked = request(
        output_token_ids=(9, 9, 8),
        sampling={
            "min_tokens": 4,
            "frequency_penalty": 0.5,
            "presence_penalty": 0.25,
            "logit_bias": {8: 1.0},
        },
    )
    (call,) = calls_of(plain(asked), 100, (2,))
    assert call.prompt_token_ids == [5, 6, 7, 9, 9, 8]
    assert (call.sampling["max_tokens"], call.sampling["min_tokens"]) == (7, 1)
    # Penalties for what another engine wrote: twice 9, once 8.
    assert call.sampling["logit_bias"] == {9: -1.25, 8: 0.25}
    assert call.sampling["ignore_eos"]
    (tight,) = calls_of(plain(request(sampling={"min_tokens": 9})), 8, ())
    assert (tight.sampling["max_tokens"], tight.sampling["min_tokens"]) == (5, 5)


def test_choices_and_continuations_draw_on_their_own() -> None:
    first, second = calls_of(plain(request(sampling={"n": 2, "best_of": 2, "prompt_logprobs": 1})), 100, ())
    (later,) = calls_of(plain(request(output_token_ids=(9,))), 100, ())
    seeds = {each.sampling["seed"] for each in (first, second, later)}
    assert len(seeds) == 3
    assert first.sampling["seed"] == seed_of(0, 0, 0)
    assert (first.prompt_logprobs, second.prompt_logprobs) == (1, None)


def test_a_grammar_travels_with_what_it_has_seen() -> None:
    grammar = GrammarSpec(digest="", payload=b'{"grammars": []}', backend="llguidance/1")
    asked = request(grammar=grammar, output_token_ids=(9,), sampling={"ignore_eos": True})
    (call,) = calls_of(plain(asked), 100, (2, 3))
    found = plugin.unwrapped(call.grammar)
    assert found == {"millrace_grammar": '{"grammars": []}', "thinking": None, "replay": [9]}
    assert plugin.unwrapped('{"grammars": []}') is None
    assert call.sampling["stop_token_ids"] == [2, 3], "its end is the stop token"


def test_an_adapter_changes_nobody_elses_rows() -> None:
    def expand(inputs: Any, weights: Any, output: Any, indices: Any, add_inputs: bool = True) -> None:
        """As vLLM's does it on CPUs: an index of -1 is the last adapter's."""
        assert add_inputs
        output += torch.einsum("bi,boi->bo", inputs, weights[indices])

    output, weights = torch.zeros(3, 2), torch.tensor([1.0, 10.0]).reshape(2, 1, 1).expand(2, 2, 1)
    plugin.for_its_own(expand)(torch.ones(3, 1), weights, output, torch.tensor([0, -1, 1]), add_inputs=True)
    assert output.tolist() == [[1.0, 1.0], [0.0, 0.0], [10.0, 10.0]]


class Runner:
    """As much of vLLM's model runner as draws."""

    def __init__(self, discarded: list[bool], generators: dict[int, str]) -> None:
        self.discard_request_mask = SimpleNamespace(np=np.array([*discarded, True, True]))
        self.input_batch = SimpleNamespace(num_reqs=len(discarded), generators=generators)
        self.fails = False

    def sample_tokens(self, grammar: str) -> dict[int, str]:
        if self.fails:
            raise RuntimeError(grammar)
        return dict(self.input_batch.generators)


def test_rows_whose_token_is_discarded_draw_nothing_from_their_generators() -> None:
    # Rows beyond the step's own are those of earlier steps.
    runner = Runner([True, False, True, False], {0: "a", 1: "b", 3: "d", 4: "e"})
    sample = plugin.without_discarded(Runner.sample_tokens)
    assert sample(runner, "g") == {1: "b", 3: "d", 4: "e"}
    assert runner.input_batch.generators == {0: "a", 1: "b", 3: "d", 4: "e"}
    runner.fails = True
    with pytest.raises(RuntimeError, match="g"):
        sample(runner, "g")
    assert runner.input_batch.generators == {0: "a", 1: "b", 3: "d", 4: "e"}


@pytest.mark.parametrize("activation", ["sigmoid", "softmax", "none"])
def test_a_classifiers_numbers_are_those_of_our_engine(activation: str) -> None:
    asked = {"tasks": ["classify"], "num_dimensions": 0}
    files = {"kind": "cls", "activation": activation, "normalized": False, "asked": asked}
    assert "seq_pooling_type" not in pooling.arguments(files, caches=True)["pooler_config"]
    row = np.array([0.5, -2.0, 3.0], np.float32)
    found = pooling.numbers_of(torch.tensor(row), files, 0)
    assert found is not None
    np.testing.assert_allclose(np.frombuffer(found, "<f4"), ACTIVATIONS[activation](row), rtol=1e-6)


def test_tenants_take_turns_by_weight() -> None:
    order = FairOrder()

    def take(tenant: str, weight: float = 1.0) -> float:
        return order.tag(plain(request(tenant=tenant, weight=weight)))

    busy = [take("busy") for _ in range(3)]
    heavy = [take("heavy", 2.0) for _ in range(3)]
    assert busy[0] == heavy[0] == 0.0
    assert busy[2] == pytest.approx(2 * heavy[2])
    order.begins(0, busy[2])
    assert take("late") == busy[2], "who was silent gains nothing by it"


@pytest.mark.parametrize("salt", [b"", b"\x01tenant"])
def test_hashes_are_those_that_gateways_compute(salt: bytes) -> None:
    tokens = list(range(40))
    hasher = PrefixHasher(model="/m", adapter="", salt=salt, block_size=16)
    hasher.extend(tokens, 40)
    ours = [event_hash(each) for each in hasher.hashes]
    prefixes = CorePrefixes("/m")

    def stored(index: int, parent: bytes | None) -> Any:
        kind = type("BlockStored", (SimpleNamespace,), {})
        return kind(
            block_hashes=[b"their%d" % index],
            parent_block_hash=parent,
            token_ids=tokens[16 * index : 16 * index + 16],
            block_size=16,
            lora_name=None,
            extra_keys=[(salt.hex(),)] if salt and not index else None,
            group_idx=0,
        )

    told = prefixes.take([stored(0, None), stored(1, b"their0")])
    assert [each["block_hashes"][0] for each in told] == ours
    assert [each["parent_hash"] for each in told] == [0, ours[0]]
    assert prefixes.take([stored(1, b"their0")]) == [], "another copy of what is held"
    copy = type("BlockRemoved", (SimpleNamespace,), {})(block_hashes=[b"their1"], group_idx=0)
    assert prefixes.take([copy]) == []
    removed = type("BlockRemoved", (SimpleNamespace,), {})(block_hashes=[b"their1", b"unknown"], group_idx=0)
    assert prefixes.take([removed]) == [{"type": "evicted", "block_hashes": [ours[1]]}]


def _load(**fields: Any) -> SchedulerLoad:
    return SchedulerLoad(num_cached_blocks=0, counters=SchedulerCounters(), **fields)


def test_who_would_be_late_is_told_when_to_come() -> None:
    door = FrontDoor(SchedulerConfig(max_num_seqs=1))
    door.opens(
        MemoryPlan(
            total_bytes=1, weights_bytes=1, workspace_bytes=0, headroom_bytes=0, kv_cache_bytes=1,
            kv_bytes_per_token=1, block_size=16, num_blocks=64, max_model_len=512,
        )
    )  # fmt: skip
    now = 100.0
    door.passes(StepDone(1, [], (), _load(prefill_tokens_per_s=10.0)), now)

    def ask(number: int, priority: int = 0) -> Request:
        return request(
            request_id=number, prompt_token_ids=(5,) * 100, arrival_s=now, queue_deadline_s=now + 5.0,
            priority=priority, tenant=f"t{number}",
        )  # fmt: skip

    assert door.refusal(ask(1), now) is None
    # 100 tokens at 10 a second are ahead of it.
    refused = door.refusal(ask(2), now)
    assert refused is not None
    assert refused.reason == "QUEUE_LIMIT_EXCEEDED"
    assert refused.retry_after_s is not None
    assert door.refusal(ask(3, priority=1), now) is None, "lower tiers are not ahead"
    for number in (1, 3):
        end = TokenEvent(request_id=number, finish_reason=FinishReason.LENGTH)
        door.passes(StepDone(2, [end], (), _load(prefill_tokens_per_s=10.0)), now)
    assert door.refusal(ask(4), now) is None


def test_who_was_refused_is_back_before_newcomers_as_at_our_own_engine() -> None:
    door = FrontDoor(SchedulerConfig(max_num_seqs=1))
    door.opens(
        MemoryPlan(
            total_bytes=1, weights_bytes=1, workspace_bytes=0, headroom_bytes=0, kv_cache_bytes=1,
            kv_bytes_per_token=1, block_size=16, num_blocks=64, max_model_len=512,
        )
    )  # fmt: skip
    waits: list[int] = []
    now, number, refused = 0.0, 0, (0.0, ())

    def ask(prompt: tuple[int, ...]) -> float | None:
        nonlocal number
        number += 1
        asked = request(
            request_id=number, prompt_token_ids=prompt, arrival_s=now, queue_deadline_s=now + 2.0, tenant="a"
        )
        failure = door.refusal(asked, now)
        if failure is None:
            waits.append(number)
        return None if failure is None else failure.retry_after_s

    def answers(seconds: float) -> None:
        """Ten answers a second, one after the other."""
        nonlocal now
        for _ in range(round(10 * seconds)):
            now += 0.1
            ended = [TokenEvent(request_id=waits.pop(0), finish_reason=FinishReason.LENGTH)] if waits else []
            door.passes(StepDone(1, ended, (), _load(prefill_tokens_per_s=1e4)), now)

    for index in range(200):
        ask((index, 1))
        answers(0.1)
    for index in range(100):
        told_s = ask((index, 2))
        if told_s is not None:
            refused = now + told_s, (index, 2)
            break
    due_s, prompt = refused
    while now < due_s:
        ask((number, 3))
        answers(0.1)
    assert ask((number, 4)) is not None, "newcomers make way"
    assert ask(prompt) is None, "it is back as told"


def test_load_is_that_of_all_data_parallel_ranks() -> None:
    meter = CoreMeter(num_blocks=200, num_ranks=2)

    def told(num_open: int) -> tuple[int, int, int]:
        load = meter.load(num_open, 0, 0.0)
        return load["num_running"], load["num_waiting"], load["num_free_blocks"]

    meter.record(0, 3, 0.5)
    assert told(6) == (3, 3, 150), "the other rank has said nothing yet"
    meter.record(1, 2, 0.1)
    assert told(6) == (5, 1, 140)
    meter.record(0, 1, 0.0)
    assert told(4) == (3, 1, 190)
    # What a rank lost without a step of its own stands in its books.
    meter.counted([{"running": 0, "free": 100, "total": 100}, {"running": 1, "free": 80, "total": 100}])
    assert told(1) == (1, 0, 180)
    meter.idle()
    assert told(0) == (0, 0, 180)


@pytest.mark.parametrize(("use_mla", "per_token"), [(False, 2 * 16 * 61 * 576 * 2), (True, 61 * 576 * 2)])
def test_latent_attention_keeps_one_vector_a_token(tmp_path: Path, use_mla: bool, per_token: int) -> None:
    model = SimpleNamespace(
        use_mla=use_mla, dtype=torch.bfloat16, max_model_len=256,
        get_total_num_kv_heads=lambda: 16, get_total_num_hidden_layers=lambda: 61, get_head_size=lambda: 576,
    )  # fmt: skip
    settings = SimpleNamespace(
        model_config=model,
        cache_config=SimpleNamespace(num_gpu_blocks=65, block_size=16, cache_dtype="auto"),
        parallel_config=SimpleNamespace(data_parallel_size=1),
    )
    found = _memory(settings, tmp_path)
    assert (found["kv_bytes_per_token"], found["kv_cache_bytes"]) == (per_token, 64 * 16 * per_token)


def test_a_library_that_is_missing_is_named_with_its_package() -> None:
    check_libraries({})
    with pytest.raises(CannotStart, match=r"libmissing\.so\.9.*apt-get install libnuma1"):
        check_libraries({"libmissing.so.9": "libnuma1"})


def test_what_is_meant_for_our_core_is_refused() -> None:
    asked = EngineConfig(make="vllm", speculation=SpeculationConfig(method="ngram"))
    with pytest.raises(ConfigError, match=r"speculation\.method"):
        asked.validate()
    with pytest.raises(ConfigError, match="millrace engine install vllm"):
        find_python(VllmConfig(python="/nowhere/python"))


def test_ranks_get_processors_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch.os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr(launch, "num_cores", lambda: 8)

    def bound(threads: int, **sizes: int) -> dict[str, str]:
        return launch._threads(EngineConfig(make="vllm", num_threads=threads, vllm=VllmConfig(**sizes)))

    assert bound(8)["VLLM_CPU_OMP_THREADS_BIND"] == "0,1,2,3,4,5,6,7"
    assert bound(8, tensor_parallel_size=2)["VLLM_CPU_OMP_THREADS_BIND"] == "0,1,2,3|4,5,6,7"
    assert bound(4) == {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "4"}


def test_the_page_has_the_table() -> None:
    page = (Path(__file__).resolve().parents[4] / "docs/engines.md").read_text()
    told = page.partition("<!-- options -->\n")[2].partition("<!-- /options -->")[0]
    assert told == table(), table()


def test_a_budget_of_thoughts_travels_and_holds_as_a_grammar_of_vllms() -> None:
    tags = ThinkingTags(open_id=14, close_id=15, opened=True, line_breaks=(1, 3), blank_line=(3,))
    asked = request(thinking=tags, output_token_ids=(9,), sampling={"max_thinking_tokens": 5})
    (call,) = calls_of(plain(asked), 100, ())
    assert "max_thinking_tokens" not in call.sampling, "vLLM's own is another one"
    found = plugin.unwrapped(call.grammar)
    assert found is not None
    assert (found["millrace_grammar"], found["replay"]) == ("", [9])
    grammar = ThinkingGrammar(thought_of(found["thinking"], has_grammar=False))
    assert grammar.accept_tokens("replay", found["replay"])
    mask = torch.zeros(3, 2, dtype=torch.int32)

    def allowed() -> set[int]:
        grammar.fill_bitmask(mask, 1)
        assert not mask[0].any()
        return {token for token in range(64) if int(mask[1][token >> 5]) >> (token & 31) & 1}

    assert len(allowed()) == 64
    # Drafts are refused where the end is due, and what was tried is taken back. Padding is no token.
    assert grammar.validate_tokens([8, 7, 15, 3, 40, -1]) == [8, 7, 15, 3, 40]
    assert grammar.validate_tokens([8, 7, 6, 5, 15]) == [8, 7, 6]
    grammar.accept_tokens("", [8, 7])
    grammar.rollback(2)
    assert len(allowed()) == 64
    for end in ([8, 7, 6], [15]):
        grammar.accept_tokens("", end)
        assert grammar.is_terminated() is False
        # What was closed by force is not closed again.
        assert len(allowed()) == (1 if end == [8, 7, 6] else 63)


def test_the_way_to_the_answer_is_forced_and_no_other_thought_is_opened() -> None:
    tags = {"open_id": 1, "open_rest": [2, 3], "close_id": 4, "opened": False, "lead": [5, 6]}
    tags |= {"answer": [5, 6, 1, 7, 3], "other_ends": [5, 1]}
    asked = request(thinking=ThinkingTags(**tags), sampling={"max_thinking_tokens": 2})
    found = plugin.unwrapped(calls_of(plain(asked), 100, ())[0].grammar)
    assert found is not None
    grammar = ThinkingGrammar(thought_of(found["thinking"], has_grammar=False))
    mask, output = torch.zeros(1, 1, dtype=torch.int32), []
    for token in [1, 2, 3, *[9] * 8, 4, 5, 6, 1, 2]:
        grammar.fill_bitmask(mask, 0)
        allowed = [each for each in range(32) if int(mask[0][0]) >> each & 1]
        output.append(token if token in allowed else allowed[0])
        assert grammar.accept_tokens("", output[-1:])
    assert output == [1, 2, 3, 9, 4, 5, 6, 1, 7, 3, 9, 4, 5, 6, 1, 0]
    assert grammar.validate_tokens([9]) == [9]


def test_a_budget_stands_around_the_grammar_of_the_answer() -> None:
    class Inner:
        """Allows tokens below 32."""

        taken: ClassVar[list[int]] = []

        def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
            self.taken += tokens
            return max(tokens) < 32

        def rollback(self, count: int) -> None:
            del self.taken[-count:]

        def validate_tokens(self, tokens: list[int]) -> list[int]:
            return [token for token in tokens if token < 32]

        def fill_bitmask(self, mask: torch.Tensor, index: int) -> None:
            mask[index] = torch.tensor([-1, 0], dtype=torch.int32)

        def is_terminated(self) -> bool:
            return len(self.taken) > 9

    tags = {"open_id": None, "close_id": 31, "opened": True, "line_breaks": [1], "blank_line": [1, 1]}
    thought = thought_of({"tags": tags, "budget": 7, "prompt": [1]}, has_grammar=True)
    grammar, mask, output = ThinkingGrammar(thought, Inner()), torch.zeros(1, 2, dtype=torch.int32), []
    while not grammar.is_terminated():
        grammar.fill_bitmask(mask, 0)
        # All of the inner one's but the closing tag, which comes once.
        free = int(mask[0][0]) in (-1, (1 << 31) - 1)
        output.append(8 if free else int(mask[0][0] & 0xFFFFFFFF).bit_length() - 1)
        assert grammar.accept_tokens("", output[-1:])
    assert output == [8, 8, 1, 31, 1, 1, 8, 8, 8, 8]
    assert not grammar.accept_tokens("", [40])
