"""GGUF files that ranks share: each reads its part of the packed tensors, and answers are one process's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

from engine.config import EngineConfig, ParallelConfig
from engine.model.families import read_spec
from engine.model.gguf_file import open_gguf
from engine.model.plan import make_plan, plan_input
from engine.model.rank_checks import degrees_of_file
from engine.model.shards import TensorPart, degrees_of
from kernels.native.library import NativeUnavailableError, load_native
from runtime.config import ModelConfig
from runtime.errors import ConfigError
from tests.unit.engine.checkpoints import make_checkpoint
from tests.unit.engine.model.test_families import CASES
from tests.unit.engine.quantization.gguf_converter import convert
from tests.unit.engine.quantization.gguf_writer import write
from tests.unit.engine.quantization.test_gguf import SIZES, WIDE, write_experts
from tests.unit.engine.quantization.test_gguf_families import FAMILIES
from tests.unit.engine.runner.driver import open_runner
from tests.unit.engine.runner.ranked import shared
from tests.unit.engine.runner.test_ranks import (
    BFLOAT16_TOLERANCE,
    FLOAT32_TOLERANCE,
    answers,
    assert_near,
    bits,
)

try:
    load_native()
except NativeUnavailableError as reason:
    pytest.skip(f"no native kernels: {reason}", allow_module_level=True)

pytestmark = pytest.mark.usefixtures("no_rank_stays", "parts_are_kept")
# Parts of which have whole blocks of 32, and of 256.
SMALL: dict[str, Any] = SIZES | {"intermediate_size": 128}
LARGE: dict[str, Any] = WIDE | {"hidden_size": 512, "intermediate_size": 512, "num_hidden_layers": 2}
K_TYPES = {"attn_v": Kind.Q6_K, "ffn_down": Kind.Q6_K, "output.": Kind.Q6_K, "": Kind.Q4_K}
Degrees = tuple[int, int, int]


@pytest.mark.parametrize(
    ("kinds", "sizes", "degrees"),
    [
        ({"": Kind.F16}, SMALL, (4, 1, 1)),
        ({"": Kind.Q8_0}, SMALL, (2, 1, 1)),
        ({"": Kind.Q8_0}, SMALL | {"tie_word_embeddings": True, "attention_bias": True}, (2, 1, 1)),
        ({"": Kind.Q4_0}, SMALL | {"num_key_value_heads": 1}, (2, 1, 1)),
        (K_TYPES, LARGE, (2, 1, 1)),
        (K_TYPES, LARGE | {"num_hidden_layers": 3}, (1, 1, 3)),
        ({"": Kind.Q5_0}, SMALL | {"num_hidden_layers": 3, "tie_word_embeddings": True}, (1, 1, 2)),
        ({"": Kind.Q8_0}, SMALL | {"num_hidden_layers": 3}, (2, 1, 2)),
    ],
)
def test_ranks_give_the_tokens_of_one_process(
    kinds: dict[str, Kind], sizes: dict[str, Any], degrees: Degrees, tmp_path: Path
) -> None:
    path = tmp_path / "model.gguf"
    write(path, make_checkpoint(tmp_path / "original", "llama", **sizes), "llama", kinds)
    ours = answers(shared(path, *degrees), num_tokens=8)
    theirs = answers(open_runner(path, native="required"), num_tokens=8)
    assert [job.output for job in ours] == [job.output for job in theirs]
    if degrees[0] == 1:
        assert bits(ours) == bits(theirs)
    else:
        # Products of codes round what they take, in parts.
        assert_near(ours, theirs, BFLOAT16_TOLERANCE)


@pytest.mark.parametrize("degrees", [(1, 2, 1), (2, 2, 1)])
def test_experts_are_spread(degrees: Degrees, tmp_path: Path) -> None:
    changes = {"num_local_experts": 4, "num_experts_per_tok": 2}
    oracle = make_checkpoint(tmp_path / "original", "mixtral", **SMALL | changes)
    counts = {"expert_count": 4, "expert_used_count": 2}
    types = dict.fromkeys(("gate", "up", "down"), Kind.Q8_0)
    kinds = {"ffn_gate_inp": Kind.F32, "": Kind.F16}
    write_experts(tmp_path / "model.gguf", oracle, "llama", kinds, counts, types)
    ours = answers(shared(tmp_path / "model.gguf", *degrees), num_tokens=8)
    theirs = answers(open_runner(tmp_path / "model.gguf", native="required"), num_tokens=8)
    assert [job.output for job in ours] == [job.output for job in theirs]
    if degrees[0] == 1:
        assert bits(ours) == bits(theirs)


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        # Heads of values take turns between the groups, of packed tensors, too.
        ("qwen3.5", {"attn_gate": Kind.F16, "ssm_out": Kind.F16}),
        ("falcon-h1", {}),
        ("nemotron-h-moe", {}),
    ],
)
def test_states_are_cut_where_their_heads_lie(name: str, kinds: dict[str, Kind], tmp_path: Path) -> None:
    model_type, changes = CASES[name]
    arch, metadata = FAMILIES[name]
    make_checkpoint(tmp_path / "original", model_type, **changes)
    convert(tmp_path / "original", tmp_path / "model.gguf", arch, metadata, kinds)
    expert = 2 if name == "nemotron-h-moe" else 1
    ours = answers(shared(tmp_path / "model.gguf", 2, expert), num_tokens=8)
    theirs = answers(open_runner(tmp_path / "model.gguf", native="required"), num_tokens=8)
    assert [job.output for job in ours] == [job.output for job in theirs]
    assert_near(ours, theirs, FLOAT32_TOLERANCE)


def test_a_part_is_that_of_the_whole(tmp_path: Path) -> None:
    """Rows of whole heads, which are put in order, and blocks of inputs."""
    write(tmp_path / "m.gguf", make_checkpoint(tmp_path / "o", "llama", **SMALL), "llama", {"": Kind.Q8_0})
    file = open_gguf(tmp_path / "m.gguf")
    query, down = "model.layers.0.self_attn.q_proj.weight", "model.layers.0.mlp.down_proj.weight"
    assert (file.array(query, TensorPart(0, ((16, 48),))) == file.array(query)[16:48]).all()
    assert (file.array(down, TensorPart(1, ((64, 128),))) == file.array(down)[:, 64:]).all()
    kind, rows = file.blocks(query, TensorPart(0, ((32, 64),)))
    assert (kind, rows.shape) == ("Q8_0", (32, 2 * 34))
    assert (rows == file.blocks(query)[1][32:]).all()
    _, columns = file.blocks(down, TensorPart(1, ((32, 64),)))
    assert (columns == file.blocks(down)[1][:, 34:68]).all()
    assert columns.dtype == np.uint8


@pytest.mark.parametrize(
    ("kinds", "sizes", "tensor", "words"),
    [
        ({"": Kind.Q8_0}, SIZES, 2, r"down_proj\.weight of .* has 96 inputs in Q8_0, whose blocks of 32 "),
        (K_TYPES, WIDE, 2, r"o_proj\.weight of .* has 256 inputs in Q6_K, whose blocks of 256 "),
        ({"": Kind.Q8_0}, SMALL, 4, r"o_proj\.weight of .*; set it to one of 1, 2, or share the layers by "),
    ],
)
def test_blocks_are_not_parted(
    kinds: dict[str, Kind], sizes: dict[str, Any], tensor: int, words: str, tmp_path: Path
) -> None:
    path = tmp_path / "model.gguf"
    write(path, make_checkpoint(tmp_path / "original", "llama", **sizes), "llama", kinds)
    with pytest.raises(ConfigError, match=rf"engine\.parallel\.tensor = {tensor}: .*{words}"):
        shared(path, tensor)
    # Nor does the plan name it.
    assert tensor in degrees_of(read_spec(path), "tensor", tensor)
    assert tensor not in degrees_of_file(read_spec(path), path, "tensor", tensor)


def test_a_ranks_plan_counts_its_part(tmp_path: Path) -> None:
    changes = {"tie_word_embeddings": True}
    oracle = make_checkpoint(tmp_path / "original", "llama", **SMALL | changes)
    write(tmp_path / "model.gguf", oracle, "llama", {"": Kind.Q8_0})

    def weights(tensor: int) -> int:
        config = EngineConfig(
            native="required", num_threads=4, dtype="float32", parallel=ParallelConfig(tensor=tensor)
        )
        model = ModelConfig(path=str(tmp_path / "model.gguf"))
        given = plan_input(config, model, device="cpu", available_bytes=8 << 30)
        # Of tables each rank has the whole.
        tables = given.spec.num_embeddings * given.spec.hidden_size * 4
        tables += sum(given.max_model_len * rope.rotary_dim * 4 for rope in given.spec.ropes)
        return make_plan(given).weights_bytes - tables

    norms = 5 * SMALL["hidden_size"] * 4
    assert 2 * (weights(2) - norms) == pytest.approx(weights(1) - norms, abs=64)
