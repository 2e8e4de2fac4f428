"""A prompt that vLLM computes in parts, for an answer that is drawn by a seed: it discards what it draws for
a part, and on CPUs that ended the engine. It must neither end it nor change what is drawn.

Needs vLLM's environment, as test_vllm_killed does.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.conftest import needs_weights
from tests.e2e.stack import VLLM_SETTINGS, Stack, running_stack

pytestmark = [pytest.mark.e2e, needs_weights, pytest.mark.timeout(900), pytest.mark.usefixtures("vllm")]

# Tokens that a step computes; a prompt of five times as many takes five steps.
STEP = 64
SETTINGS = {
    **VLLM_SETTINGS,
    "MILLRACE_ENGINE__SCHEDULER__MAX_NUM_BATCHED_TOKENS": str(STEP),
    "MILLRACE_ENGINE__SCHEDULER__MAX_NUM_SEQS": "8",
}


def text_of(stack: Stack, seed: int) -> str:
    with stack.openai() as client:
        answer = client.completions.create(
            model=stack.model,
            prompt="The sum of two and two. " * STEP,
            max_tokens=24,
            temperature=1.0,
            seed=seed,
        )
    assert answer.usage is not None
    assert answer.usage.prompt_tokens > 4 * STEP
    return answer.choices[0].text


def test_a_seeded_prompt_in_parts_draws_what_it_draws_in_one(tmp_path: Path) -> None:
    with running_stack(tmp_path, "--engine", "vllm", environment=SETTINGS) as stack:
        first = {seed: text_of(stack, seed) for seed in range(3)}
        # Now the cache holds the prompt, and one step computes what is left of it.
        assert {seed: text_of(stack, seed) for seed in range(3)} == first
        assert len(set(first.values())) == 3
        stack.assert_nothing_leaked()
