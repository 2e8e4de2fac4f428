"""A head that drafts from the target's hidden states: what it computes, what it refuses, and that no output
changes by it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from engine.config import EngineConfig
from engine.model.eagle3 import HeadRooms, read_head_spec
from engine.model.forward_batch import ForwardBatch
from engine.model.native_decoder import NativeDecoder
from engine.model.plan import make_plan, plan_input, weights_bytes
from engine.runner.runner import ModelRunner
from engine.runner.speculation.head import HeadDrafter
from engine.types import SamplingParams
from kernels.attention.ragged import RaggedBatch
from runtime.config import ModelConfig
from runtime.errors import ConfigError
from services.drafter.head import Head, HeadShape, write_head
from services.drafter.lessons import Lesson
from services.drafter.target import DraftedModel
from tests.unit.engine.checkpoints import edit_config, make_checkpoint
from tests.unit.engine.model.hybrids import SPARSE
from tests.unit.engine.runner.drafting import (
    HEAD_DIM,
    NUM_LAYERS,
    SAMPLINGS,
    poison_head,
    speculating,
    totals,
)
from tests.unit.engine.runner.driver import Driver, Job, generated, open_runner, prompt_of


@pytest.fixture(scope="module")
def folder(target_folder: Path, target_oracle: transformers.PreTrainedModel) -> Path:
    return target_folder


@pytest.fixture(scope="module", params=[0, 120], ids=["all ids", "some ids"])
def head(request: Any, trained_head: Callable[..., Path]) -> Path:
    return trained_head("eagle3", request.param)


@pytest.fixture(scope="module")
def runner(folder: Path, head: Path) -> Iterator[ModelRunner]:
    with closing(open_runner(folder, speculation=speculating(head), cache={"block_size": 4})) as runner:
        poison_head(runner)
        yield runner


def jobs_of(lessons: list[Lesson], *, speculate: bool, chunk: int = 1 << 30) -> list[Job]:
    return [
        Job(
            list(lesson.ids[: lesson.num_given]),
            num_tokens=30,
            sampling=SAMPLINGS[index % 3],
            chunk=chunk,
            speculate=speculate,
        )
        for index, lesson in enumerate(lessons)
    ]


@pytest.mark.parametrize("chunk", [1 << 30, 4])
def test_output_is_the_same_with_and_without(
    folder: Path, runner: ModelRunner, lessons: list[Lesson], chunk: int
) -> None:
    """Also beside a runner that captures nothing."""
    plain = generated(folder, jobs_of(lessons, speculate=False))
    drafted = Driver(runner, seed=2).run(jobs_of(lessons, speculate=True, chunk=chunk))
    for one, other in zip(plain, drafted, strict=True):
        assert other.output[:30] == one.output
        assert other.logprobs[: len(one.logprobs)] == one.logprobs
    num_drafted, num_accepted = totals(drafted)
    assert num_accepted > 0.12 * num_drafted > 0
    assert sum(job.num_steps for job in drafted if chunk > 4) < sum(job.num_steps for job in plain)


def test_behind_a_prefix_hit_the_head_knows_less_and_the_output_is_the_same(
    runner: ModelRunner, lessons: list[Lesson]
) -> None:
    prompt = list(lessons[0].ids[:40])
    plain = Driver(runner, seed=1).run([Job(prompt, num_tokens=12)])
    driver = Driver(runner, seed=3)
    blocks = driver.take_blocks(36)
    slot_of = [
        # The first blocks are computed by a sequence that is gone afterwards.
        Job(prompt[:36], num_tokens=1),
    ]
    driver.run(slot_of, prefix=(blocks, 0))
    hit = driver.run([Job(prompt, num_tokens=12, speculate=True) for _ in range(2)], prefix=(blocks, 32))
    for job in hit:
        assert job.output[:12] == plain[0].output
    assert totals(hit)[0] > 0


def test_rooms_forget_their_oldest_blocks(folder: Path, head: Path, lessons: list[Lesson]) -> None:
    """A head that looks back on eight tokens, while sequences grow beyond any room."""
    options: dict[str, Any] = {"cache": {"block_size": 4}}
    few = speculating(head, head_context_tokens=8, num_draft_tokens=3)
    plain = generated(folder, jobs_of(lessons, speculate=False), **options)
    with closing(open_runner(folder, speculation=few, **options)) as runner:
        poison_head(runner)
        drafter = runner.proposer.drafter
        assert isinstance(drafter, HeadDrafter)
        assert (drafter.rooms.num_features, drafter.rooms.num_blocks) == (16, 6)
        drafted = Driver(runner).run(jobs_of(lessons, speculate=True))
        assert (drafter.held <= 6 * 4).all()
    assert [job.output[:30] for job in drafted] == [job.output for job in plain]
    assert totals(drafted)[1] > 0


def test_more_sequences_than_a_forward_may_read_get_their_drafts_later(
    folder: Path, head: Path, lessons: list[Lesson]
) -> None:
    jobs = [Job(list(lessons[index % 6].ids), num_tokens=8, speculate=True) for index in range(14)]
    plain = [Job(job.prompt, num_tokens=8) for job in jobs]
    found = generated(folder, jobs, speculation=speculating(head))
    assert [job.output[:8] for job in found] == [job.output for job in generated(folder, plain)]
    assert all(job.num_drafted for job in found)


def test_the_native_head_computes_what_was_trained(
    folder: Path, lessons: list[Lesson], tmp_path: Path
) -> None:
    """Three rounds, logits and hidden states, against the head of torch in the same weights."""
    target = DraftedModel(folder, num_rows=1, max_tokens=64, num_threads=1)
    head = random_head(target, list(range(60, 180)))
    write_head(head, tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    head.load_state_dict({name: stored[name].float() for name in head.state_dict()})
    ids, num_rounds = list(lessons[0].ids[:20]), 3
    states, _ = target.read([ids], np.array([0]))
    with torch.no_grad():
        rounds = head.rounds(states[None], torch.tensor([ids]), num_rounds)
        expected = [(each[0], head.logits(each[0], number)) for number, each in enumerate(rounds)]
    with closing(open_runner(folder, speculation=speculating(tmp_path))) as runner:
        drafter = runner.proposer.drafter
        assert isinstance(drafter, HeadDrafter)
        native, layers, end = drafter.head, drafter.storage.layers, 12
        size = states.shape[1] // 3
        for rows, part in zip(native.features, torch.split(states, size, dim=1), strict=True):
            rows[:end] = part[:end].numpy()
        hidden = native.read(one_text(ids[1 : end + 1], 0), layers)
        for number, (outputs, logits) in enumerate(expected):
            last = end - 1
            # What a round leaves at a token is what it foresaw from there.
            if number:
                hidden = native.go_on(
                    hidden[-1:].copy(), one_text([ids[end + number]], last + number), layers
                )
            torch.testing.assert_close(
                torch.from_numpy(hidden[-1].copy()), outputs[last], rtol=1e-4, atol=1e-4
            )
            found = native.logits_of(hidden, np.array([hidden.shape[0] - 1]))
            torch.testing.assert_close(torch.from_numpy(found[0].copy()), logits[last], rtol=1e-4, atol=1e-4)


def random_head(target: DraftedModel, kept: list[int]) -> Head:
    torch.manual_seed(1)
    shape = HeadShape(
        target="tiny",
        architecture=target.spec.architecture,
        layers=target.layers,
        hidden_size=48,
        intermediate_size=72,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        vocab_size=199,
        draft_vocab_size=len(kept),
        rope_theta=10_000.0,
        max_positions=256,
    )
    head = Head(shape, target.embedding(), torch.tensor(kept), tied=False)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return head


def one_text(ids: list[int], first: int) -> ForwardBatch:
    places = np.arange(first, first + len(ids))
    return ForwardBatch(
        token_ids=np.array(ids, np.int64),
        positions=places,
        slots=places.copy(),
        ragged=RaggedBatch(
            query_starts=np.array([0, len(ids)]),
            context_lens=np.array([first + len(ids)]),
            block_tables=np.arange(8)[None],
            block_size=16,
        ),
    )


@pytest.mark.parametrize("family", ["llama", "gemma2", "olmo2"])
def test_captured_states_are_those_of_transformers_and_change_nothing(family: str, tmp_path: Path) -> None:
    """Also where norms come after half layers, so that what joins the stream is still on its way."""
    model = make_checkpoint(tmp_path, family, num_hidden_layers=3, head_dim=12)
    ids, layers = prompt_of(11, 199, seed=5), (0, 1, 2)
    with torch.no_grad():
        expected = model(torch.tensor([ids]), output_hidden_states=True).hidden_states
    plain = generated(tmp_path, [Job(ids, num_tokens=6, sampling=SamplingParams(seed=1, logprobs=3))])
    with closing(open_runner(tmp_path)) as runner:
        assert isinstance(runner.model, NativeDecoder)
        runner.model.captured_layers = layers
        captured = Driver(runner).run([Job(ids, num_tokens=6, sampling=SamplingParams(seed=1, logprobs=3))])
        assert (captured[0].output, captured[0].logprobs) == (plain[0].output, plain[0].logprobs)
        Driver(runner).run([Job(ids, num_tokens=1)])
        for layer, states in zip(layers, runner.model.captured, strict=True):
            found = torch.from_numpy(states[: len(ids)].copy())
            torch.testing.assert_close(found, expected[layer][0], rtol=1e-4, atol=1e-4)


def test_forms_of_other_trainers_are_the_same_head(head: Path, tmp_path: Path) -> None:
    """SpecForge's and EAGLE's own: other names, and layers by their outputs."""
    found = read_head_spec(head)
    assert found.draft_head is not None
    config = json.loads((head / "config.json").read_text())
    layer = config["transformer_layer_config"]
    plain = layer | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": config["draft_vocab_size"],
        "norm_before_residual": True,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [each - 1 for each in found.draft_head.layers]},
    }
    (tmp_path / "config.json").write_text(json.dumps(plain))
    tensors = load_file(head / "model.safetensors")
    renamed = {name.replace("layers.0.", "midlayer."): each for name, each in tensors.items()}
    save_file(renamed, tmp_path / "model.safetensors")
    assert read_head_spec(tmp_path) == found


@pytest.mark.parametrize("form", ["speculators", "plain"])
def test_a_head_says_nothing_of_layers_and_takes_the_usual_ones(
    form: str, head: Path, tmp_path: Path
) -> None:
    config = json.loads((head / "config.json").read_text())
    del config["eagle_aux_hidden_state_layer_ids"], config["norm_before_residual"]
    if form == "plain":
        config = config["transformer_layer_config"] | {"draft_vocab_size": config["draft_vocab_size"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    spec = read_head_spec(tmp_path).draft_head
    assert spec is not None
    assert spec.layers_of(32) == (2, 16, 29)
    assert spec.norm_before_residual == (form == "speculators")


REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"hidden_size": 64}, {}, "reads hidden states of 48 elements, but the model's have 64"),
    ({"vocab_size": 201}, {}, "is for a vocabulary of 199 tokens, but the model's has 201"),
    ({"num_hidden_layers": 2}, {}, "reads hidden states around layers"),
    ({}, {"native": "off"}, "hidden states are captured by the native kernels"),
    ({"model_type": "qwen3_next"} | SPARSE, {}, "has layers that carry a state"),
]


@pytest.mark.parametrize(("changes", "options", "words"), REFUSED)
def test_what_a_head_does_not_go_with_is_refused_by_name(
    changes: dict[str, Any], options: dict[str, Any], words: str, head: Path, tmp_path: Path
) -> None:
    changes = {"num_hidden_layers": NUM_LAYERS, "head_dim": HEAD_DIM} | changes
    make_checkpoint(tmp_path, changes.pop("model_type", "llama"), **changes)
    with pytest.raises(ConfigError, match=words):
        open_runner(tmp_path, speculation=speculating(head), **options)


def test_on_a_gpu_a_head_is_refused_before_anything_is_loaded(folder: Path, head: Path) -> None:
    config = EngineConfig(speculation=speculating(head))
    with pytest.raises(ConfigError, match=r"captured on CPUs alone.*set it to ngram, suffix or draft_model"):
        plan_input(config, ModelConfig(path=str(folder)), device="cuda", available_bytes=1 << 34)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"norm_before_fc": True}, "norm_before_fc = True is not supported"),
        ({"speculators_model_type": "mtp"}, "speculators_model_type = 'mtp' is not supported"),
        ({"speculators_model_type": None, "draft_vocab_size": None}, "describes no head of EAGLE-3"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2]}, "must name 3 layers"),
        ({"draft_vocab_size": 500}, "draft_vocab_size = 500 exceeds vocab_size = 199"),
    ],
)
def test_what_is_no_such_head_is_refused_by_name(
    change: dict[str, Any], words: str, head: Path, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text((head / "config.json").read_text())
    edit_config(tmp_path, **change)
    with pytest.raises(ConfigError, match=words):
        read_head_spec(tmp_path)


def test_a_head_of_some_ids_needs_to_say_which(folder: Path, head: Path, tmp_path: Path) -> None:
    tensors = load_file(head / "model.safetensors")
    some = {name: each for name, each in tensors.items() if name != "d2t"}
    some["lm_head.weight"] = some["lm_head.weight"][:7].contiguous()
    save_file(some, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((head / "config.json").read_text())
    edit_config(tmp_path, draft_vocab_size=7)
    with pytest.raises(ConfigError, match="tensor d2t is missing, which says what 7 of the 199 tokens"):
        open_runner(folder, speculation=speculating(tmp_path))


def test_the_plan_counts_the_head_and_its_rooms(folder: Path, head: Path) -> None:
    model, available = ModelConfig(path=str(folder)), 1 << 32
    without = make_plan(plan_input(EngineConfig(), model, device="cpu", available_bytes=available))
    config = EngineConfig(speculation=speculating(head))
    given = plan_input(config, model, device="cpu", available_bytes=available)
    plan = make_plan(given)
    assert given.draft is not None
    weights = weights_bytes(given.draft.weights, given.dtype)
    assert plan.weights_bytes == without.weights_bytes + weights
    rooms, spec = HeadRooms.of(given.draft.spec, config), given.draft.spec
    extra = rooms.num_bytes(spec, config, given.kv_dtype)
    # More logits, too: those of drafts are verified.
    assert plan.workspace_bytes >= without.workspace_bytes + extra
    assert plan.kv_bytes_per_token == without.kv_bytes_per_token
    with closing(open_runner(folder, speculation=speculating(head))) as runner:
        drafter = runner.proposer.drafter
        assert isinstance(drafter, HeadDrafter)
        held = [*drafter.features, *drafter.head.features]
        held += [each for layer in drafter.storage.layers for each in layer.tensors()]
        # The spare block is one more.
        assert sum(each.nbytes for each in held) <= extra + (1 << 16)
