"""What a step takes by the model's shapes, against sums made by hand."""

from __future__ import annotations

import pytest

from engine.config import EngineConfig, PeakConfig
from engine.model.plan import make_plan, plan_input
from engine.model.work import work_of
from engine.types import ScheduledSequence, SchedulerOutput
from engine.types.step import ModelWork, step_work
from runtime.config import ModelConfig

GIB = 1 << 30
MODEL = ModelWork(
    flop_per_token=100.0,
    flop_per_position=2.0,
    layers=((0, 3), (4, 1)),
    weights_bytes=1000,
    kv_bytes_per_token=10,
)


def row(start: int, num_tokens: int) -> ScheduledSequence:
    return ScheduledSequence(1, start, num_tokens, (), True)


def test_a_step_is_its_tokens_and_what_they_look_at() -> None:
    # One token at position 9 looks at ten positions in three layers, and at four in the fourth.
    assert step_work(SchedulerOutput(1, scheduled=(row(9, 1),)), MODEL) == (100 + 2 * 34, 1000 + 100)
    # A prompt of three: 1 + 2 + 3 positions in each layer.
    assert step_work(SchedulerOutput(1, scheduled=(row(0, 3),)), MODEL) == (300 + 2 * 24, 1000 + 30)
    both = step_work(SchedulerOutput(1, scheduled=(row(9, 1), row(0, 3))), MODEL)
    assert both == (400 + 2 * 58, 1000 + 130)
    assert step_work(SchedulerOutput(1, scheduled=(row(0, 3),)), ModelWork()) == (0, 0)


@pytest.mark.parametrize(
    ("name", "config", "peak"),
    [
        ("", PeakConfig(), (0, 0)),
        ("NVIDIA H100 80GB HBM3", PeakConfig(), (989e12, 3.35e12)),
        ("NVIDIA H100 PCIe", PeakConfig(), (756e12, 2.0e12)),
        ("NVIDIA L40S", PeakConfig(), (362e12, 0.864e12)),
        ("NVIDIA H100 80GB HBM3", PeakConfig(tflops=500.0), (500e12, 3.35e12)),
        ("", PeakConfig(tflops=2.0, gbytes_per_s=50.0), (2e12, 50e9)),
    ],
)
def test_the_bundled_model_is_counted_by_its_matrices(
    name: str, config: PeakConfig, peak: tuple[float, float]
) -> None:
    model = ModelConfig(path="models/millrace-nano")
    given = plan_input(EngineConfig(peak=config), model, device="cpu", available_bytes=4 * GIB)
    plan = make_plan(given)
    work = work_of(given, plan, name)
    spec = given.spec
    attention = 2 * (spec.num_heads + spec.num_kv_heads) * spec.head_dim * spec.hidden_size
    layer = attention + 3 * spec.hidden_size * spec.intermediate_size
    matrices = spec.num_layers * layer + spec.vocab_size * spec.hidden_size
    # Norms are some thousandths.
    assert work.flop_per_token == pytest.approx(2 * matrices, rel=0.002)
    assert work.flop_per_position == 4 * spec.num_heads * spec.head_dim
    assert work.layers == ((0, spec.num_layers),)
    assert (work.peak_flop, work.peak_read_bytes) == peak
