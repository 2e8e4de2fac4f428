"""Quantized keys and values: the engine's outputs stay near, and rows independent of the batch."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from engine.types import SamplingParams
from tests.unit.engine.checkpoints import make_checkpoint
from tests.unit.engine.runner.driver import Driver, Job, open_runner, prompt_of

SCORING = SamplingParams(temperature=0.0, max_tokens=64, prompt_logprobs=1)
LATENT = {
    "num_key_value_heads": 4,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 2,
    "q_lora_rank": None,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}


@pytest.mark.parametrize(("model_type", "changes"), [("llama", {}), ("deepseek_v3", LATENT)])
def test_fp8_keys_and_values(model_type: str, changes: dict[str, object], tmp_path: Path) -> None:
    make_checkpoint(tmp_path, model_type, **changes)
    prompt = prompt_of(40, 199)
    scores = []
    for kind in ("float32", "fp8"):
        with closing(open_runner(tmp_path, cache={"kv_dtype": kind})) as runner:
            (alone,) = Driver(runner).run([Job(prompt, sampling=SCORING)])
            others = [Job(prompt_of(size, 199, seed=size)) for size in (3, 30, 70)]
            among, *_ = Driver(runner, seed=5).run([Job(prompt, chunk=9), *others])
        assert among.output == alone.output
        scores.append([entry.logprob for entry in alone.prompt_logprobs])
    differences = [abs(one - other) for one, other in zip(*scores, strict=True)]
    assert 0 < sum(differences) / len(differences) < 0.15
