"""`millrace plan --try`: a real engine takes the worst steps, and its peak is told beside the plan."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from engine.config import EngineConfig, SchedulerConfig
from engine.core.plan_trial import Trial, worst_steps
from engine.types import MemoryPlan, MemoryUse, ModelFacts
from tests.unit.engine.checkpoints import make_checkpoint
from tests.unit.engine.driver import memory_plan
from tests.unit.engine.model.hybrids import HYBRIDS
from tests.unit.engine.pooled_checkpoints import pooled_checkpoint


def tried(path: Path, text: str, *flags: str) -> subprocess.CompletedProcess[str]:
    (path / "config.toml").write_text(text)
    command = [sys.executable, "-m", "engine.core.plan_trial", "--config", str(path / "config.toml"), *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


NANO = Path("models/millrace-nano")
MODEL = '[model]\npath = "models/millrace-nano"\n'


def test_the_peak_is_within_the_plan(tmp_path: Path) -> None:
    found = tried(tmp_path, f"{MODEL}[engine.cache]\nkv_cache_bytes = {48 << 20}\n", "--json")
    assert found.returncode == 0, found.stderr
    trial = json.loads(found.stdout)
    plan, used = trial["plan"], trial["used"]
    # Every block was written, and weights were loaded.
    assert used["kv_cache_bytes"] == plan["num_blocks"] * plan["block_size"] * plan["kv_bytes_per_token"]
    assert 0 < used["weights_bytes"] < 2 * plan["weights_bytes"]
    assert used["workspace_bytes"] > 0
    assert trial["peak_bytes"] <= trial["planned_bytes"]
    assert [1, 4096, 1024] in trial["steps"]
    assert [2, 4096, 1] in trial["steps"]


def test_states_are_tried_with_the_blocks(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, HYBRIDS["qwen3.5"][0], **HYBRIDS["qwen3.5"][1], vocab_size=nano_vocabulary())
    found = tried(tmp_path, model_beside(tmp_path), "--json")
    assert found.returncode == 0, found.stderr
    trial = json.loads(found.stdout)
    plan, used = trial["plan"], trial["used"]
    assert plan["state_bytes"] > 0
    blocks = plan["num_blocks"] * plan["block_size"] * plan["kv_bytes_per_token"]
    assert used["kv_cache_bytes"] == blocks + plan["state_bytes"]
    assert trial["peak_bytes"] <= trial["planned_bytes"]


def test_a_model_that_pools_is_tried_with_whole_texts(tmp_path: Path) -> None:
    pooled_checkpoint(tmp_path, "bert", pooling="mean", vocab_size=nano_vocabulary())
    found = tried(tmp_path, model_beside(tmp_path), "--json")
    assert found.returncode == 0, found.stderr
    assert all(computed == length for _, length, computed in json.loads(found.stdout)["steps"])


def nano_vocabulary() -> int:
    """Ids of the bundled tokenizer."""
    return int(json.loads((NANO / "config.json").read_text())["vocab_size"])


def model_beside(folder: Path) -> str:
    """The configuration of the checkpoint in a folder, which gets the bundled tokenizer."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(NANO / name, folder / name)
    return f'[model]\npath = "{folder}"\n[engine.cache]\nkv_cache_bytes = {16 << 20}\n'


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (f"{MODEL}[engine]\nsimulated = true\n", "engine.make"),
        (f"{MODEL}[engine]\nmax_model_len = 99999999\n", "engine.max_model_len"),
    ],
)
def test_what_cannot_be_tried_is_refused_in_one_line(tmp_path: Path, text: str, told: str) -> None:
    found = tried(tmp_path, text)
    assert found.returncode == 2
    (line,) = found.stderr.splitlines()
    assert line.startswith(f"millrace plan: {told}")


def facts(max_model_len: int) -> ModelFacts:
    return ModelFacts(
        max_model_len=max_model_len,
        vocab_size=100,
        eos_token_ids=(),
        dtype="float32",
        attention_backend="",
        device="cpu",
        num_layers=1,
    )


@pytest.mark.parametrize(
    ("num_blocks", "length", "seats", "expected"),
    [
        # All seats at their full length.
        (100, 40, 8, [(1, 40, 32), (8, 40, 1)]),
        # Three fit at their full length; all have a part.
        (32, 40, 8, [(1, 40, 32), (3, 40, 1), (8, 16, 1)]),
        # Fewer blocks than seats.
        (5, 20, 8, [(1, 20, 20), (1, 20, 1), (5, 4, 1)]),
    ],
)
def test_the_worst_steps_fill_the_cache(
    num_blocks: int, length: int, seats: int, expected: list[tuple[int, int, int]]
) -> None:
    config = EngineConfig(scheduler=SchedulerConfig(max_num_batched_tokens=32, max_num_seqs=seats))
    memory: MemoryPlan = memory_plan(num_blocks, 4, length)
    assert worst_steps(config, memory, facts(length)) == expected


def test_a_peak_beyond_the_plan_does_not_fit() -> None:
    plan = memory_plan(10, 4, 20)
    assert Trial(plan=plan, used=MemoryUse(kv_cache_bytes=40), steps=()).fits
    assert not Trial(plan=plan, used=MemoryUse(kv_cache_bytes=40, workspace_bytes=1), steps=()).fits
