"""Models whose layers carry a state, shared among ranks: the tokens of one process, from the first prompt on
and wherever a state is gone on with.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kernels.native.library import NativeUnavailableError, load_native
from tests.unit.engine.checkpoints import make_checkpoint
from tests.unit.engine.model.hybrids import HYBRIDS
from tests.unit.engine.runner.driver import open_runner
from tests.unit.engine.runner.ranked import shared
from tests.unit.engine.runner.test_ranks import FLOAT32_TOLERANCE, answers, assert_near, bits

pytestmark = pytest.mark.usefixtures("no_rank_stays", "parts_are_kept")

try:
    load_native()
except NativeUnavailableError as reason:
    pytest.skip(f"no native kernels: {reason}", allow_module_level=True)

# Families, changes, and degrees (parts, groups of experts, stages). Groups of heads are divided, one for each
# rank, or the same on several, whose heads are normed together; states lie in some stages alone, and so does
# attention.
SHAPES: list[tuple[str, dict[str, Any], tuple[int, int, int]]] = [
    ("lfm2", {}, (2, 1, 1)),
    ("lfm2-bias", {}, (4, 1, 1)),
    ("lfm2", {}, (1, 1, 3)),
    ("lfm2-moe", {}, (1, 2, 1)),
    ("qwen3-next", {}, (2, 2, 1)),
    ("qwen3-next", {}, (4, 1, 1)),
    ("qwen3-next", {}, (1, 1, 2)),
    ("qwen3.5", {}, (2, 1, 1)),
    ("qwen3.5", {}, (4, 1, 1)),
    ("qwen3.5", {}, (2, 1, 2)),
    ("qwen3.5-moe", {}, (1, 3, 1)),
    ("bamba", {}, (2, 1, 1)),
    ("bamba", {}, (4, 1, 1)),
    ("bamba-limits", {}, (4, 1, 1)),
    ("bamba", {}, (1, 1, 2)),
    ("granite-4", {}, (2, 1, 1)),
    ("granite-4-moe", {}, (2, 2, 1)),
    ("granite-4", {}, (1, 1, 3)),
    ("nemotron-h", {"n_groups": 2}, (2, 1, 1)),
    ("nemotron-h", {}, (1, 1, 3)),
    ("nemotron-h-moe", {}, (4, 2, 1)),
    ("nemotron-h-latent", {}, (2, 1, 2)),
    ("falcon-h1", {}, (2, 1, 1)),
    ("falcon-h1-norm", {}, (4, 1, 1)),
    ("falcon-h1", {}, (1, 1, 2)),
    ("olmo-hybrid", {}, (1, 1, 2)),
    ("recurrent-gemma", {}, (2, 1, 1)),
    ("recurrent-gemma-wide", {}, (1, 1, 3)),
]


@pytest.mark.parametrize(("family", "changes", "degrees"), SHAPES)
def test_ranks_give_the_tokens_of_one_process(
    family: str, changes: dict[str, Any], degrees: tuple[int, int, int], tmp_path: Path
) -> None:
    """Of steps of many rows, in micro-batches, and of few."""
    model_type, others = HYBRIDS[family]
    make_checkpoint(tmp_path, model_type, **others | changes)
    runner, alone = shared(tmp_path, *degrees), open_runner(tmp_path, native="required")
    ours, theirs = answers(runner, chunk=61), answers(alone, chunk=61)
    assert [job.output for job in ours] == [job.output for job in theirs]
    if degrees[0] == 1:
        assert bits(ours) == bits(theirs)
    else:
        assert_near(ours, theirs, FLOAT32_TOLERANCE)
