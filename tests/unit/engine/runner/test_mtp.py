"""Layers of a checkpoint that predict further tokens: what they compute, in which forms they come, how often
they are right, and what has none. (That no output changes by their drafts is in test_head_combinations, too.)
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

from engine.config import EngineConfig, SpeculationConfig
from engine.model.eagle3 import HeadRooms
from engine.model.kv_memory import kv_bytes_per_token
from engine.model.plan import make_plan, plan_input, weights_bytes
from engine.runner.speculation.head import HeadDrafter
from runtime.config import ModelConfig
from runtime.errors import ConfigError
from tests.unit.engine.checkpoints import edit_config, make_checkpoint
from tests.unit.engine.model.hybrids import HYBRIDS
from tests.unit.engine.model.test_families import CASES
from tests.unit.engine.runner.drafting import BUNDLED, HEAD_DIM, SAMPLINGS, poison_head, totals
from tests.unit.engine.runner.driver import Driver, Job, open_runner, prompt_of
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
        (
            {"speculation": {"draft_model": "x"}},
            "draft_model = 'x': the layer that drafts by method 'mtp' is",
        ),
    ],
)
def test_what_a_layer_does_not_go_with_is_refused_by_name(
    options: dict[str, Any], words: str, folder: Path
) -> None:
    speculation = predicting_speculation(**options.pop("speculation", {}))
    with pytest.raises(ConfigError, match=words):
        open_runner(folder, speculation=speculation, **options)


@pytest.mark.parametrize("case", [("llama", {}), FORMS["deepseek-v3"], FORMS["qwen3.5"]])
def test_a_checkpoint_without_such_a_layer_is_refused_by_name(
    case: tuple[str, dict[str, Any]], tmp_path: Path
) -> None:
    """Whether its family knows of any, and of what the configuration speaks."""
    make_checkpoint(tmp_path, case[0], **case[1])
    edit_config(tmp_path, num_nextn_predict_layers=1)
    with pytest.raises(ConfigError, match=r"has no layer that predicts further tokens.*MiMo.*set it to off"):
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
    extra = rooms.num_bytes(spec, config, kv_bytes_per_token(spec, given.kv_dtype))
    assert plan.workspace_bytes >= without.workspace_bytes + extra
    assert (plan.kv_bytes_per_token, plan.num_blocks) == (without.kv_bytes_per_token, without.num_blocks)
    smaller = EngineConfig(speculation=predicting_speculation(), quantize="int8")
    draft = plan_input(smaller, model, device="cpu", available_bytes=available).draft
    assert draft is not None
    # Norms and biases are left.
    assert draft.weights.num_plain == 5 * 48 + 64 + 2 * 32
