"""What a rank reads of a checkpoint: its own part and no more; all ranks' parts are the whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.config import CacheConfig, EngineConfig, ParallelConfig
from engine.model.checkpoint import LoadRequest
from engine.model.families import read_spec
from engine.model.plan import make_plan, plan_and_fullest, plan_input
from engine.model.plan_command import _ranks
from engine.model.reading import read_checkpoint
from engine.model.records import ModelRecord, Recurrence
from engine.model.shards import Shard, degrees_of
from engine.model.spec import CheckpointError, StateSpec
from engine.model.work import work_of
from kernels.ranks.shares import Degrees
from kernels.selection import torch_kernels
from runtime.config import ModelConfig
from tests.unit.engine.checkpoints import make_checkpoint
from tests.unit.engine.model.hybrids import HYBRIDS
from tests.unit.engine.model.test_families import CASES

BUNDLED = "models/millrace-nano"


def read(folder: Path, rank: int = 0, size: int = 1, expert: int = 1, pipeline: int = 1) -> ModelRecord:
    """The record of a rank, whose products are torch's."""
    spec = read_spec(folder)
    shard = Shard.of(spec, rank, Degrees(tensor=size, expert=expert, pipeline=pipeline))
    request = LoadRequest(
        folder=folder, spec=shard.model(spec), dtype="float32", max_model_len=64, shard=shard
    )
    return read_checkpoint(
        request,
        device=torch.device("cpu"),
        progress=lambda stage, fraction: None,
        kernels=torch_kernels(),
    )


@pytest.mark.parametrize(("size", "kv_heads"), [(2, 2), (4, 2), (2, 4)])
@pytest.mark.parametrize("tied", [False, True])
def test_parts_are_the_whole(size: int, kv_heads: int, tied: bool, tmp_path: Path) -> None:
    make_checkpoint(
        tmp_path,
        "llama",
        num_key_value_heads=kv_heads,
        attention_bias=True,
        mlp_bias=True,
        tie_word_embeddings=tied,
    )
    whole, parts = read(tmp_path), [read(tmp_path, rank, size) for rank in range(size)]
    # Ranks that have the same head of keys and values.
    copies = max(1, size // kv_heads)

    def joined(pick: Any, axis: int = 0, every: int = 1) -> torch.Tensor:
        return torch.cat([pick(part) for part in parts[::every]], axis)

    for index in range(2):
        for number, every in ((0, 1), (1, copies), (2, copies)):

            def rows(record: ModelRecord, name: str, index: int = index, number: int = number) -> Any:
                attention: Any = record.layers[index].attention
                values = attention.qkv.bias if name == "bias" else attention.qkv.weight.values
                return values.split(list(attention.sizes))[number]

            for name in ("weight", "bias"):
                found = joined(lambda part, name=name: rows(part, name), every=every)
                assert torch.equal(found, rows(whole, name))

        def output(record: ModelRecord, index: int = index) -> Any:
            return record.layers[index].attention.output  # type: ignore[union-attr]

        def down(record: ModelRecord, index: int = index) -> Any:
            return record.layers[index].feed_forward.down  # type: ignore[union-attr]

        for linear in (output, down):
            weights = joined(lambda part, linear=linear: linear(part).weight.values, axis=1)
            assert torch.equal(weights, linear(whole).weight.values)
            # What is added up is added once.
            biases = [linear(part).bias for part in parts]
            assert torch.equal(biases[0], linear(whole).bias)
            assert not any(bias.any() for bias in biases[1:])
    assert torch.equal(joined(lambda part: part.head.weight.values), whole.head.weight.values)  # type: ignore[union-attr]


def test_a_rank_looks_at_its_own_part_alone(tmp_path: Path) -> None:
    """Numbers that are not finite, in what the other one reads."""
    make_checkpoint(tmp_path, "llama")
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.0.self_attn.q_proj.weight"][-1, 0] = float("inf")
    save_file(tensors, path, metadata={"format": "pt"})
    read(tmp_path, 0, 2)
    with pytest.raises(CheckpointError, match="not finite"):
        read(tmp_path, 1, 2)


@pytest.mark.parametrize("case", ["mixtral", "granite-moe"])
def test_a_rank_reads_its_own_experts_alone(case: str, tmp_path: Path) -> None:
    """Whether experts have tensors of their own, or lie in one; numbers that are not finite in another rank's
    are never looked at.
    """
    model_type, changes = CASES[case]
    make_checkpoint(tmp_path, model_type, **changes)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    whole = read(tmp_path).layers[1].feed_forward.experts  # type: ignore[union-attr]
    parts = [
        expert
        for rank in range(2)
        for expert in read(tmp_path, rank, expert=2).layers[1].feed_forward.experts  # type: ignore[union-attr]
    ]
    for own, expected in zip(parts, whole, strict=True):
        assert torch.equal(own.gate_up.weight.values, expected.gate_up.weight.values)
        assert torch.equal(own.down.weight.values, expected.down.weight.values)
    name = "model.layers.0.block_sparse_moe." + ("experts.3.w2" if case == "mixtral" else "output_linear")
    last = tensors[f"{name}.weight"]
    (last if last.ndim == 2 else last[3])[0, 0] = float("inf")
    save_file(tensors, path, metadata={"format": "pt"})
    read(tmp_path, 0, expert=2)
    with pytest.raises(CheckpointError, match="not finite"):
        read(tmp_path, 1, expert=2)


# Groups of heads are divided, or the same on several ranks; each rank's projection gives its parts in the
# whole's order: gate, values, keys and queries, time steps; or queries and keys, values, gate, gains, decays.
STATES = [("bamba", 2), ("bamba", 4), ("bamba-limits", 2), ("qwen3-next", 2), ("qwen3-next", 4)]


@pytest.mark.parametrize(("family", "size"), STATES)
def test_a_rank_has_the_states_of_its_heads(family: str, size: int, tmp_path: Path) -> None:
    model_type, changes = HYBRIDS[family]
    make_checkpoint(tmp_path, model_type, **changes)
    whole = read(tmp_path).layers[0].attention
    # Experts are whole.
    expert = size if family == "qwen3-next" and size == 2 else 1
    parts = [read(tmp_path, rank, size, expert).layers[0].attention for rank in range(size)]
    assert isinstance(whole, Recurrence)
    state = whole.spec
    copies = max(1, size // state.num_groups)

    def sizes(spec: StateSpec) -> list[int]:
        values, keys = spec.num_heads * spec.value_dim, spec.num_groups * spec.key_dim
        if spec.kind == "mamba2":
            return [values, values, keys, keys, spec.num_heads]
        return [keys, keys, values, values, spec.num_heads, spec.num_heads]

    by_group = (2, 3) if state.kind == "mamba2" else (0, 1)
    for index, expected in enumerate(whole.inner.weight.values.split(sizes(state))):
        every = copies if index in by_group else 1
        own = [part.inner.weight.values.split(sizes(part.spec))[index] for part in parts]  # type: ignore[union-attr]
        assert torch.equal(torch.cat(own[::every]), expected)
        assert all(torch.equal(own[rank], own[rank // every * every]) for rank in range(size))
    for name in ("rate", "step_bias"):
        assert torch.equal(torch.cat([getattr(part, name) for part in parts]), getattr(whole, name))
    output = torch.cat([part.output.weight.values for part in parts], 1)  # type: ignore[union-attr]
    assert torch.equal(output, whole.output.weight.values)
    assert parts[0].spec.norm_size == state.norm_size  # type: ignore[union-attr]


@pytest.mark.parametrize("tied", [False, True])
def test_a_stage_reads_its_own_layers_alone(tied: bool, tmp_path: Path) -> None:
    """Layers one behind another are the whole's; only the first stage embeds."""
    make_checkpoint(tmp_path, "llama", num_hidden_layers=3, tie_word_embeddings=tied)
    whole, stages = read(tmp_path), [read(tmp_path, rank, pipeline=2) for rank in range(2)]
    assert [len(stage.layers) for stage in stages] == [1, 2]

    def down(layer: Any) -> torch.Tensor:
        values: torch.Tensor = layer.feed_forward.down.weight.values
        return values

    own = [layer for stage in stages for layer in stage.layers]
    for layer, expected in zip(own, whole.layers, strict=True):
        assert torch.equal(down(layer), down(expected))
    assert [len(stage.embedding) > 0 for stage in stages] == [True, tied]
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.1.self_attn.q_proj.weight"][0, 0] = float("inf")
    save_file(tensors, path, metadata={"format": "pt"})
    read(tmp_path, 0, pipeline=2)
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.self_attn.* not finite"):
        read(tmp_path, 1, pipeline=2)


def test_a_plan_is_that_of_the_fullest_stage(tmp_path: Path) -> None:
    """Layers are divided by their bytes, and all stages have as many blocks."""
    make_checkpoint(tmp_path, "mixtral", num_hidden_layers=5, num_local_experts=4, num_experts_per_tok=2)
    model = ModelConfig(path=str(tmp_path))

    def planned(**degrees: int) -> Any:
        config = EngineConfig(
            native="required", num_threads=8, dtype="float32", parallel=ParallelConfig(**degrees)
        )
        return plan_input(config, model, device="cpu", available_bytes=8 << 30)

    alone, staged, both = planned(), planned(pipeline=2), planned(pipeline=2, tensor=2)
    assert [stage.spec.num_layers for stage in staged.stages] == [2, 3]
    plan, full = plan_and_fullest(staged)
    assert full is staged.stages[1]
    assert plan.kv_bytes_per_token == make_plan(alone).kv_bytes_per_token * 3 // 5
    assert plan.num_blocks == min(make_plan(stage).num_blocks for stage in staged.stages)
    work, whole = work_of(staged, plan), work_of(alone, make_plan(alone))
    assert (work.flop_per_token, work.flop_per_position) == (whole.flop_per_token, whole.flop_per_position)
    assert (work.layers, work.kv_bytes_per_token) == (whole.layers, whole.kv_bytes_per_token)
    assert _ranks(plan_and_fullest(both)[1], model) == (
        "all above is one's of 4, which take so much together at most; it has 3 of 5 layers, 1/2 of each "
        "layer, 1/2 of 4 of its 4 experts; engine.parallel.tensor may be 1, 2, 4; "
        "engine.parallel.expert may be 1, 2, 4; engine.parallel.pipeline may be 1 to 5"
    )


def test_layers_are_divided_by_their_bytes(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama", num_hidden_layers=5)
    spec = read_spec(tmp_path)

    def cuts(pipeline: int, *sizes: int) -> tuple[int, ...]:
        return Shard.of(spec, 0, Degrees(pipeline=pipeline), sizes).cuts

    assert cuts(2, 1, 1, 1, 1, 4) == (0, 4, 5)
    assert cuts(3, 1, 1, 1, 1, 1) == (0, 2, 3, 5)
    # No stage is empty.
    assert cuts(4, 90, 1, 1, 1, 90) == (0, 1, 2, 4, 5)
    assert cuts(5, 90, 1, 1, 1, 1) == (0, 1, 2, 3, 4, 5)


def test_a_ranks_plan_counts_its_own_experts(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "mixtral", num_local_experts=4, num_experts_per_tok=2)

    def planned(expert: int) -> Any:
        config = EngineConfig(
            native="required", num_threads=4, dtype="float32", parallel=ParallelConfig(expert=expert)
        )
        return plan_input(config, ModelConfig(path=str(tmp_path)), device="cpu", available_bytes=8 << 30)

    alone, own = planned(1), planned(2)
    one, layers = 3 * 48 * 88, 2
    # Half of the experts, and half of the head.
    assert alone.num_weights - own.num_weights == layers * 2 * one + 199 // 2 * 48 + 48
    assert own.whole_num_weights == alone.num_weights
    assert work_of(own, make_plan(own)).flop_per_token == work_of(alone, make_plan(alone)).flop_per_token
    assert _ranks(own, ModelConfig(path=str(tmp_path))) == (
        "all above is one's of 2, which take so much together; it has all of each layer, 2 of its 4 experts; "
        "engine.parallel.tensor may be 1, 2, 4; engine.parallel.expert may be 1, 2, 4; "
        "engine.parallel.pipeline may be 1, 2"
    )


def test_a_ranks_plan_is_its_share(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama")

    def planned(size: int) -> Any:
        config = EngineConfig(
            native="required", num_threads=4, dtype="float32", parallel=ParallelConfig(tensor=size)
        )
        given = plan_input(config, ModelConfig(path=str(tmp_path)), device="cpu", available_bytes=8 << 30)
        return given, make_plan(given)

    (alone, whole), (given, plan) = planned(1), planned(2)
    assert plan.total_bytes == whole.total_bytes // 2
    assert plan.kv_bytes_per_token == whole.kv_bytes_per_token // 2
    embedding = given.spec.num_embeddings * given.spec.hidden_size
    norms = 5 * given.spec.hidden_size
    assert 2 * (given.num_weights - embedding - norms) == pytest.approx(
        alone.num_weights - embedding - norms, abs=given.spec.hidden_size
    )
    assert degrees_of(alone.spec, "tensor", 8) == [1, 2, 4]


def test_the_serving_type_is_that_of_the_whole_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """A part that would fit where the whole does not is no reason to serve it in another type."""

    def dtype(size: int) -> str:
        config = EngineConfig(num_threads=4, parallel=ParallelConfig(tensor=size))
        given = plan_input(config, ModelConfig(path=BUNDLED), device="cpu", available_bytes=8 << 30)
        limit = 4 * given.num_weights
        monkeypatch.setattr("engine.model.plan.NATIVE_FLOAT32_LIMIT_BYTES", limit if size > 1 else limit - 1)
        return given.dtype

    assert [dtype(size) for size in (1, 2, 4)] == ["bfloat16"] * 3


def test_stages_have_as_many_states_as_any_has_room_for(tmp_path: Path) -> None:
    """The first has no state, and the second does not attend; a rank's state is its heads'."""
    model_type, changes = HYBRIDS["bamba"]
    make_checkpoint(tmp_path, model_type, **changes | {"num_hidden_layers": 2, "attn_layer_indices": [0]})
    model = ModelConfig(path=str(tmp_path))

    def planned(**degrees: int) -> Any:
        config = EngineConfig(
            native="required",
            num_threads=4,
            dtype="float32",
            cache=CacheConfig(kv_cache_bytes=4 << 20),
            parallel=ParallelConfig(**degrees),
        )
        return plan_input(config, model, device="cpu", available_bytes=8 << 30)

    alone, staged, cut = planned(), planned(pipeline=2), planned(tensor=2)
    attending, remembering = (make_plan(stage) for stage in staged.stages)
    plan = make_plan(staged)
    assert (attending.num_states, remembering.kv_bytes_per_token) == (0, 0)
    assert plan.num_blocks == attending.num_blocks
    assert (plan.num_states, plan.state_interval) == (remembering.num_states, remembering.state_interval)
    own, whole = cut.spec.state, alone.spec.state
    assert (own.num_heads, own.num_groups) == (whole.num_heads // 2, whole.num_groups // 2)
    assert 2 * own.num_bytes == whole.num_bytes
    assert make_plan(cut).num_states > make_plan(alone).num_states
