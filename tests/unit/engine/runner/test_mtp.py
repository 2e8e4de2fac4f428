"""Layers that predict further tokens, of a checkpoint and trained for one: what they compute, in which forms
they come, how often they are right, and what has none. (That no output changes by their drafts is in
test_head_combinations, too.)
"""

from __future__ import annotations

import json
import re
import shutil
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.config import EngineConfig
from engine.model.eagle3 import HeadRooms
from engine.model.mtp import MTP, read_trained_predictor
from engine.model.plan import make_plan, plan_input, weights_bytes
from engine.runner.speculation.head import HeadDrafter
from engine.speculation_config import SpeculationConfig
from runtime.config import ModelConfig
from runtime.errors import ConfigError
from services.drafter.head import write_head
from services.drafter.lessons import Lesson
from services.drafter.mtp import TrainedPredictor
from services.drafter.options import DrafterMethod
from services.drafter.target import DraftedModel
from tests.unit.engine.checkpoints import edit_config, make_checkpoint
from tests.unit.engine.model.hybrids import HYBRIDS
from tests.unit.engine.model.test_families import CASES
from tests.unit.engine.runner.drafting import (
    BUNDLED,
    HEAD_DIM,
    SAMPLINGS,
    TREE,
    learned_by_heart,
    poison_head,
    speculating,
    totals,
)
from tests.unit.engine.runner.driver import Driver, Job, generated, open_runner, prompt_of
from tests.unit.engine.runner.predicting import make_predicting, predicting_speculation
from tests.unit.engine.runner.test_heads import one_text
from tests.unit.engine.runner.test_hybrid_drafts import VOCABULARY, grown, scarce, serve

MIMO: tuple[str, dict[str, Any]] = ("qwen2", {"head_dim": HEAD_DIM})
FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "mimo": MIMO,
    **{name: CASES[name] for name in ("glm4-moe", "glm4-moe-lite", "deepseek-v3")},
    **{name: HYBRIDS[name] for name in ("qwen3-next", "qwen3.5", "qwen3.5-moe")},
}


@pytest.mark.parametrize("form", FORMS)
def test_the_layer_computes_what_the_formula_says(
    form: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Three drafts one after another, from hidden states that the model's own step has left."""
    model_type, changes = FORMS[form]
    predicting = make_predicting(tmp_path, model_type, **changes)
    ids = prompt_of(11, 199, seed=5)
    expected = predicting.drafts(ids, 3)
    with closing(open_runner(tmp_path, speculation=predicting_speculation())) as runner:
        poison_head(runner)
        drafter = runner.proposer.drafter
        assert isinstance(drafter, HeadDrafter)
        Driver(runner).run([Job(ids, num_tokens=1)])
        native, layers, end = drafter.head, drafter.storage.layers, len(ids) - 1
        native.features[0][:end] = drafter.target.captured[0][:end]
        hidden = native.read(one_text(ids[1:], 0), layers)
        for number, logits in enumerate(expected):
            if number:
                token = int(expected[number - 1].argmax())
                hidden = native.go_on(hidden[-1:].copy(), one_text([token], end + number - 1), layers)
            found = native.logits_of(hidden, np.array([hidden.shape[0] - 1]))
            torch.testing.assert_close(torch.from_numpy(found[0].copy()), logits, rtol=1e-4, atol=1e-4)
    # Copies of embedding and head are left out, and a second layer; what is served is not said not to be.
    assert ("not served" in caplog.text) == (not form.startswith("qwen"))
    assert not re.search("eh_proj|input_proj|mtp_layers.0", caplog.text)


@pytest.mark.parametrize("quantize", ["off", "int4", "w8a8"])
def test_a_layer_that_is_right_has_its_drafts_accepted(quantize: str, tmp_path: Path) -> None:
    """Where the next token follows from the one before it alone, which the layer knows."""
    model_type, changes = MIMO
    make_predicting(tmp_path, model_type, echo=0.0, **changes)
    jobs = [
        Job(prompt_of(9, 199, seed=seed), num_tokens=25, sampling=SAMPLINGS[seed % 3], speculate=True)
        for seed in range(6)
    ]
    with closing(open_runner(tmp_path, speculation=predicting_speculation(), quantize=quantize)) as runner:
        poison_head(runner)
        Driver(runner).run(jobs)
    num_drafted, num_accepted = totals(jobs)
    assert num_accepted > 0.95 * num_drafted > 6 * 15
    assert all(job.num_steps < 10 for job in jobs)


@pytest.mark.parametrize("form", ["glm4-moe", "deepseek-v3"])
def test_output_of_models_with_experts_is_the_same_with_and_without(form: str, tmp_path: Path) -> None:
    """Also with latent attention, of which the layer has its own; in chunks, too."""
    model_type, changes = FORMS[form]
    make_predicting(tmp_path, model_type, echo=0.3, **changes)

    def jobs(*, speculate: bool) -> list[Job]:
        return [
            Job(prompt_of(9, 199, seed=seed), 20, SAMPLINGS[seed % 3], chunk=4, speculate=speculate)
            for seed in range(6)
        ]

    with closing(open_runner(tmp_path, speculation=predicting_speculation())) as runner:
        poison_head(runner)
        plain = Driver(runner, seed=1).run(jobs(speculate=False))
        drafted = Driver(runner, seed=2).run(jobs(speculate=True))
    for one, other in zip(plain, drafted, strict=True):
        assert other.output[:20] == one.output
        assert other.logprobs[: len(one.logprobs)] == one.logprobs
    num_drafted, num_accepted = totals(drafted)
    assert num_drafted > num_accepted > 0


def test_answers_of_models_with_states_are_those_without(tmp_path: Path) -> None:
    """Also of sequences that were preempted."""
    model_type, changes = HYBRIDS["qwen3-next"]
    make_predicting(tmp_path, model_type, echo=0.3, **changes, vocab_size=VOCABULARY)
    shutil.copy(BUNDLED / "tokenizer.json", tmp_path)
    speculation = predicting_speculation()
    plain, drafted = serve(tmp_path, SpeculationConfig()), serve(tmp_path, speculation)
    assert drafted.answers == plain.answers
    assert drafted.num_drafted > drafted.num_accepted > 0
    kept, _, _ = grown(tmp_path, SpeculationConfig())
    size = scarce(tmp_path, speculation)
    answers, num_drafted, num_preempted = grown(tmp_path, speculation, kv_cache_bytes=size)
    assert answers == kept
    assert min(num_drafted, num_preempted) > 0


def test_a_model_that_sees_drafts_by_the_layer_of_its_text_model(tmp_path: Path) -> None:
    """Whose tensors are named one level further in, but for those of the layer."""
    model_type, changes = FORMS["qwen3.5"]
    text, whole = tmp_path / "text", tmp_path / "whole"
    make_predicting(text, model_type, echo=0.3, **changes)
    whole.mkdir()
    tensors = load_file(text / "model.safetensors")
    renamed = {re.sub(r"^model\.", "model.language_model.", name): each for name, each in tensors.items()}
    save_file(renamed, whole / "model.safetensors")
    config = json.loads((text / "config.json").read_text())
    nested = {"architectures": ["Qwen3_5ForConditionalGeneration"], "text_config": config}
    (whole / "config.json").write_text(json.dumps(nested | {"tie_word_embeddings": True}))
    found = []
    for folder in (text, whole):
        jobs = [Job(prompt_of(9, 199, seed=seed), num_tokens=20, speculate=True) for seed in range(3)]
        with closing(open_runner(folder, speculation=predicting_speculation())) as runner:
            Driver(runner).run(jobs)
        found.append(([job.output for job in jobs], totals(jobs)))
    assert found[0] == found[1]
    assert found[0][1][0] > found[0][1][1] > 0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made: Path = tmp_path_factory.mktemp("mimo")
    make_predicting(made, MIMO[0], **MIMO[1])
    return made


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"native": "off"}, "method = 'mtp': hidden states are captured by the native kernels"),
        ({"speculation": predicting_speculation(draft_model="x")}, "speculation.draft_model.*x"),
    ],
)
def test_what_a_layer_does_not_go_with_is_refused_by_name(
    options: dict[str, Any], words: str, folder: Path
) -> None:
    with pytest.raises(ConfigError, match=words):
        open_runner(folder, **{"speculation": predicting_speculation()} | options)


@pytest.mark.parametrize("case", [("llama", {}), FORMS["deepseek-v3"], FORMS["qwen3.5"]])
def test_a_checkpoint_without_such_a_layer_is_refused_by_name(
    case: tuple[str, dict[str, Any]], tmp_path: Path
) -> None:
    """Whether its family knows of any, and of what the configuration speaks."""
    make_checkpoint(tmp_path, case[0], **case[1])
    edit_config(tmp_path, num_nextn_predict_layers=1)
    with pytest.raises(
        ConfigError,
        match=r"has no layer that predicts.*MiMo.*train-drafter --method mtp.*set the method to off",
    ):
        open_runner(tmp_path, speculation=predicting_speculation())


def test_a_layer_that_is_not_whole_is_refused_by_name(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.mtp_layers.0.hidden_layernorm.weight"]
    save_file(tensors, path)
    with pytest.raises(ConfigError, match=r"tensor model.hnorm.weight of shape \[48\] is missing"):
        open_runner(tmp_path, speculation=predicting_speculation())


def test_on_a_gpu_a_layer_is_refused_before_anything_is_loaded(folder: Path) -> None:
    config = EngineConfig(speculation=predicting_speculation())
    with pytest.raises(ConfigError, match=r"'mtp': hidden states are captured on CPUs alone"):
        plan_input(config, ModelConfig(path=str(folder)), device="cuda", available_bytes=1 << 34)


def test_the_plan_counts_the_layer_and_its_rooms(folder: Path) -> None:
    model, available = ModelConfig(path=str(folder)), 1 << 32
    without = make_plan(plan_input(EngineConfig(), model, device="cpu", available_bytes=available))
    config = EngineConfig(speculation=predicting_speculation())
    given = plan_input(config, model, device="cpu", available_bytes=available)
    plan = make_plan(given)
    assert given.draft is not None
    # Queries and output, keys and values with biases, a feed-forward, the product and five norms.
    layer = 2 * 64 * 48 + 2 * 32 * 48 + 64 + 2 * 32 + 3 * 88 * 48 + 2 * 48 * 48 + 5 * 48
    assert given.draft.weights.num_weights == layer
    assert plan.weights_bytes == without.weights_bytes + weights_bytes(given.draft.weights, given.dtype)
    rooms, spec = HeadRooms.of(given.draft.spec, config), given.draft.spec
    extra = rooms.num_bytes(spec, config, given.kv_dtype)
    assert plan.workspace_bytes >= without.workspace_bytes + extra
    assert (plan.kv_bytes_per_token, plan.num_blocks) == (without.kv_bytes_per_token, without.num_blocks)
    smaller = EngineConfig(speculation=predicting_speculation(), quantize="int8")
    draft = plan_input(smaller, model, device="cpu", available_bytes=available).draft
    assert draft is not None
    # Norms and biases are left.
    assert draft.weights.num_plain == 5 * 48 + 64 + 2 * 32


def trained(target: DraftedModel, out: Path) -> TrainedPredictor:
    """A layer of random weights in a checkpoint of its own, as it is trained for a model."""
    torch.manual_seed(3)
    layer = TrainedPredictor(target, "tiny", torch.arange(199), 3)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_((parameter + 0.1 * torch.randn_like(parameter)).bfloat16())
    out.mkdir()
    write_head(layer, out)
    return layer


@pytest.fixture(scope="module")
def trained_layer(
    target_folder: Path, lessons: list[Lesson], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """One that has learned some of the lessons."""
    return learned_by_heart(target_folder, lessons, tmp_path_factory.mktemp("trained"), method=MTP, steps=60)


# Also where the final norm is a layer norm and logits are multiplied, and in place of a layer of its own.
@pytest.mark.parametrize("family", ["llama", "cohere", "mimo"])
def test_a_trained_layer_draws_by_the_trainers_logits(family: str, tmp_path: Path) -> None:
    """Three rounds, by the model's own head, tied to its embedding or not."""
    if family == "mimo":
        make_predicting(tmp_path, MIMO[0], **MIMO[1])
    else:
        make_checkpoint(tmp_path, family, head_dim=HEAD_DIM)
    target = DraftedModel(tmp_path, num_rows=1, max_tokens=64, num_threads=1, method=DrafterMethod.MTP)
    layer, ids, end = trained(target, tmp_path / "layer"), prompt_of(15, 199, seed=5), 12
    states, _ = target.read([ids], np.array([0]))
    with torch.no_grad():
        rounds = layer.rounds(states[None], torch.tensor([ids]), 3)
        expected = [layer.logits(each[0, end - 1], number) for number, each in enumerate(rounds)]
    with closing(open_runner(tmp_path, speculation=speculating(tmp_path / "layer"))) as runner:
        drafter = runner.proposer.drafter
        assert isinstance(drafter, HeadDrafter)
        Driver(runner).run([Job(ids[:end], num_tokens=1)])
        native, layers = drafter.head, drafter.storage.layers
        native.features[0][:end] = drafter.target.captured[0][:end]
        hidden = native.read(one_text(ids[1 : end + 1], 0), layers)
        for number, logits in enumerate(expected):
            if number:
                text = one_text([ids[end + number]], end - 1 + number)
                hidden = native.go_on(hidden[-1:].copy(), text, layers)
            found = native.logits_of(hidden, np.array([hidden.shape[0] - 1]))
            torch.testing.assert_close(torch.from_numpy(found[0].copy()), logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("tree", [(), TREE], ids=["chain", "tree"])
def test_answers_with_a_trained_layer_are_those_without(
    tree: tuple[tuple[int, ...], ...], target_folder: Path, trained_layer: Path, lessons: list[Lesson]
) -> None:
    speculation = speculating(trained_layer, tree=tree)

    def jobs(*, speculate: bool) -> list[Job]:
        return [
            Job(list(each.ids[: each.num_given]), 30, SAMPLINGS[index % 3], speculate=speculate)
            for index, each in enumerate(lessons)
        ]

    plain = generated(target_folder, jobs(speculate=False))
    with closing(open_runner(target_folder, speculation=speculation)) as runner:
        poison_head(runner)
        drafted = Driver(runner, seed=2).run(jobs(speculate=True))
    for one, other in zip(plain, drafted, strict=True):
        assert other.output[:30] == one.output
        assert other.logprobs[: len(one.logprobs)] == one.logprobs
    num_drafted, num_accepted = totals(drafted)
    assert num_accepted > 0.12 * num_drafted > 0


@pytest.mark.parametrize(
    ("family", "changes", "words"),
    [
        ("llama", {"hidden_size": 64}, "reads hidden states of 48 elements, but the model's have 64"),
        ("llama", {"vocab_size": 201}, "is for a vocabulary of 199 tokens, but the model's has 201"),
        (*HYBRIDS["qwen3-next"], "has layers that carry a state"),
    ],
)
def test_a_trained_layer_of_another_model_is_refused_by_name(
    family: str, changes: dict[str, Any], words: str, trained_layer: Path, tmp_path: Path
) -> None:
    make_checkpoint(tmp_path, family, **{"head_dim": HEAD_DIM} | changes)
    with pytest.raises(ConfigError, match=words):
        open_runner(tmp_path, speculation=speculating(trained_layer))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"speculators_model_type": "eagle3"},
            "describes no layer that predicts.*train-drafter --method mtp",
        ),
        ({"transformer_layer_config": None}, "describes no layer that predicts"),
        ({"num_nextn_predict_layers": 2}, "num_nextn_predict_layers = 2 is not supported, only 1"),
        ({"transformer_layer_config": {"model_type": "llama"}}, "model_type = 'llama' is not supported"),
    ],
)
def test_what_is_no_trained_layer_is_refused_by_name(
    change: dict[str, Any], words: str, trained_layer: Path, tmp_path: Path
) -> None:
    shutil.copy(trained_layer / "config.json", tmp_path)
    edit_config(tmp_path, **change)
    with pytest.raises(ConfigError, match=words):
        read_trained_predictor(tmp_path)


def test_the_plan_counts_a_trained_layer_as_it_is_stored(target_folder: Path, trained_layer: Path) -> None:
    """Whatever the model is quantized to."""
    config = EngineConfig(speculation=speculating(trained_layer), quantize="int8")
    model = ModelConfig(path=str(target_folder))
    draft = plan_input(config, model, device="cpu", available_bytes=1 << 32).draft
    assert draft is not None
    stored = load_file(trained_layer / "model.safetensors").values()
    assert draft.weights.num_plain == draft.weights.num_weights == sum(each.numel() for each in stored)
