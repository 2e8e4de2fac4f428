"""What start-up on a GPU does that needs no GPU: steps for measuring, and a plan from what was measured."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch

from engine.config import CacheConfig, EngineConfig, GraphsConfig, SchedulerConfig
from engine.model.decoder import Decoder
from engine.model.plan import make_plan, plan_input
from engine.runner.cuda.build import (
    LIBRARY_BYTES,
    _dummy_step,
    _graph_bytes,
    sizes_of,
    why_not_captured,
)
from engine.runner.kv_storage import KvStorage
from kernels.attention.tiled import TiledAttention
from runtime.config import ModelConfig
from tests.unit.engine.checkpoints import make_checkpoint
from tests.unit.engine.runner.cuda.doubles import CapturableAttention
from tests.unit.engine.runner.driver import open_runner


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    make_checkpoint(path, "llama", max_position_embeddings=64)
    return path


@pytest.fixture
def model(folder: Path) -> Decoder:
    runner = open_runner(folder, native="off", attention_backend="torch", kv_cache_bytes=1 << 20)
    assert isinstance(runner.model, Decoder)
    return runner.model


@pytest.mark.parametrize("num_sequences", [1, 3, 7])
def test_the_measured_step_has_all_its_tokens(model: Decoder, num_sequences: int) -> None:
    options = {"num_blocks": 1, "block_size": 16, "kv_dtype": "float32", "device": model.device}
    storage = KvStorage(model.spec, **options)
    seen: list[torch.Size] = []

    class Watching(CapturableAttention):
        def run(self, plan: object, q: torch.Tensor, *rest: object) -> torch.Tensor:
            seen.append(q.shape)
            return super().run(plan, q, *rest)  # type: ignore[arg-type]

    attention = Watching(num_heads=model.spec.num_heads, num_kv_heads=model.spec.cache_heads)
    with torch.inference_mode():
        _dummy_step(model, attention, storage, 50, num_sequences)
    assert {shape[0] for shape in seen} == {64}
    assert len(seen) == model.spec.num_layers


def test_measured_numbers_replace_predicted_ones(folder: Path) -> None:
    config = EngineConfig(cache=CacheConfig(memory_fraction=0.5))
    given = plan_input(config, ModelConfig(path=str(folder)), device="cuda", available_bytes=1 << 30)
    predicted = make_plan(given)
    measured = make_plan(
        msgspec.structs.replace(given, measured_weights_bytes=100 << 20, measured_workspace_bytes=50 << 20)
    )
    assert (measured.weights_bytes, measured.workspace_bytes) == (100 << 20, 50 << 20)
    left = (1 << 29) - (150 << 20) - measured.headroom_bytes
    assert left - measured.kv_bytes_per_token * measured.block_size < measured.kv_cache_bytes <= left
    assert predicted.kv_cache_bytes > measured.kv_cache_bytes


def test_captured_steps_are_counted(model: Decoder) -> None:
    attention = CapturableAttention(num_heads=4, num_kv_heads=2)
    small, large = (
        _graph_bytes(EngineConfig(scheduler=SchedulerConfig(max_num_seqs=rows)), model, attention, 1 << 30)
        for rows in (16, 64)
    )
    assert 2 * (small - LIBRARY_BYTES) < large - LIBRARY_BYTES < 1 << 30


def test_why_steps_stay_eager(model: Decoder) -> None:
    capturable = CapturableAttention(num_heads=4, num_kv_heads=2)
    plain = TiledAttention(num_heads=4, num_kv_heads=2)
    assert why_not_captured(EngineConfig(), model, capturable) == ""
    assert "off" in why_not_captured(EngineConfig(graphs=GraphsConfig(decode="off")), model, capturable)
    assert "torch" in why_not_captured(EngineConfig(), model, plain)
    assert sizes_of(EngineConfig(), model)[0] == model.row_multiple
