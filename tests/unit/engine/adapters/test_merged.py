"""Rows with an adapter get the tokens of transformers with the adapter merged into its weights, whatever the
shapes, ranks and layers; alone, and in one batch with others and with the plain model.
"""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.config import AdaptersConfig
from engine.runner.runner import ModelRunner
from tests.unit.engine.adapters.written import write_adapter
from tests.unit.engine.checkpoints import make_checkpoint, reference_greedy
from tests.unit.engine.model.test_families import CASES as FAMILY_CASES
from tests.unit.engine.runner.driver import Driver, Job, open_runner, prompt_of

LATENT = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj", "gate_proj")
# Model, its changes, and the adapters that are tried together: each with its rank, layers and configuration.
CASES: dict[str, tuple[str, dict[str, Any], list[dict[str, Any]]]] = {
    "llama": (
        "llama",
        {},
        [{"r": 4}, {"r": 16, "targets": ("q_proj", "v_proj")}, {"r": 5, "use_rslora": True, "lora_alpha": 3}],
    ),
    "odd shapes": (
        "qwen2",
        {"hidden_size": 36, "intermediate_size": 51, "num_attention_heads": 3, "num_key_value_heads": 1},
        [
            {"r": 3, "targets": ("k_proj", "down_proj"), "dtype": torch.bfloat16},
            {"r": 64, "dtype": torch.float16},
            {"r": 7, "rank_pattern": {"layers.1.mlp.up_proj": 11}, "alpha_pattern": {"o_proj": 2}},
        ],
    ),
    "fused": ("phi3", {}, [{"r": 6, "targets": ("qkv_proj", "gate_up_proj")}, {"targets": ("o_proj",)}]),
    "norms after": ("gemma2", {"head_dim": 12}, [{"r": 8}, {"targets": ("up_proj",)}]),
    # Adapters have the checkpoint's own names; halves side by side take them, and what has no gate.
    "own names": ("phi", {}, [{"targets": ("dense", "fc1", "q_proj")}, {"r": 9, "targets": ("fc2",)}]),
    "own names, head by head": (
        FAMILY_CASES["gpt-neox"][0],
        FAMILY_CASES["gpt-neox"][1],
        [{"targets": ("attention.dense", "dense_h_to_4h")}, {"targets": ("dense_4h_to_h",)}],
    ),
    "own names, fused": (
        FAMILY_CASES["granite-hybrid"][0],
        FAMILY_CASES["granite-hybrid"][1],
        [{"targets": ("shared_mlp.input_linear", "v_proj")}, {"targets": ("output_linear",)}],
    ),
    "latent": (
        "deepseek_v3",
        FAMILY_CASES["deepseek-v3"][1] | {"kv_lora_rank": 40, "num_hidden_layers": 2},
        [{"targets": LATENT[:4]}, {"r": 16, "targets": ("shared_experts.down_proj", "q_b_proj")}],
    ),
}
NUM_TOKENS = 10


def load(runner: ModelRunner, *names: str) -> None:
    """Puts adapters into the first slots."""
    for slot, name in enumerate(names):
        runner.adapters.begin(slot, name)
    found: list[tuple[int, str]] = []
    while len(found) < len(names):
        found += runner.adapters.finished()
    assert [problem for _, problem in found] == [""] * len(names)


def jobs(vocab_size: int, slots: list[int]) -> list[Job]:
    return [
        Job(
            prompt_of(5 + 7 * index, vocab_size, seed=index),
            num_tokens=NUM_TOKENS,
            chunk=9,
            adapter_slot=slot,
        )
        for index, slot in enumerate(slots)
    ]


@pytest.mark.parametrize("native", ["off", "required"])
@pytest.mark.parametrize("name", CASES)
def test_tokens_are_those_of_merged_weights(tmp_path: Path, name: str, native: str) -> None:
    model_type, changes, adapters = CASES[name]
    model = make_checkpoint(tmp_path / "base", model_type, **changes)
    merges = [
        write_adapter(tmp_path / str(index), model, seed=index, **given)
        for index, given in enumerate(adapters)
    ]
    paths = {f"a{index}": str(tmp_path / str(index)) for index in range(len(adapters))}
    slots, config = [-1, *range(len(adapters)), 0], AdaptersConfig(paths=paths, max_rank=64)
    with closing(open_runner(tmp_path / "base", native=native, adapters=config)) as runner:
        load(runner, *paths)
        found = Driver(runner).run(jobs(model.config.vocab_size, slots))
    models = [*[merge(model) for merge in merges], model]
    expected = [reference_greedy(models[job.adapter_slot], job.prompt, NUM_TOKENS) for job in found]
    assert [job.output for job in found] == expected
    plain = [reference_greedy(model, job.prompt, NUM_TOKENS) for job in found[1:]]
    assert any(job.output != same for job, same in zip(found[1:], plain, strict=True)), "it changes something"


@pytest.mark.parametrize("native", ["off", "required"])
@pytest.mark.parametrize("options", [{}, {"quantize": "int8"}, {"dtype": "bfloat16"}, {"quantize": "w8a8"}])
def test_answers_are_the_same_alone_and_in_a_batch(
    tmp_path: Path, native: str, options: dict[str, Any]
) -> None:
    model = make_checkpoint(tmp_path / "base", "llama", hidden_size=64, intermediate_size=128)
    paths = {}
    for index in range(3):
        write_adapter(tmp_path / str(index), model, seed=index, r=4 + index)
        paths[f"a{index}"] = str(tmp_path / str(index))
    slots, vocab_size = [0, -1, 2, 1, 0, -1, 2, 2], model.config.vocab_size
    config = AdaptersConfig(paths=paths)
    with closing(open_runner(tmp_path / "base", native=native, adapters=config, **options)) as runner:
        load(runner, *paths)
        together = Driver(runner).run(jobs(vocab_size, slots))
        alone = [Driver(runner).run([job])[0] for job in jobs(vocab_size, slots)]
    assert [job.output for job in together] == [job.output for job in alone]
    assert all(len(job.output) == NUM_TOKENS for job in together)
