"""Tests of the suite that do not hold where another make's core serves, each with its reason.

`E2E_MAKE=vllm [E2E_VLLM_PYTHON=PATH] python -m pytest tests/e2e` serves stacks that have a model with vLLM.
Those of simulated engines stay as they are: their subject is what surrounds an engine.
"""

from __future__ import annotations

# Make to name of a test, with its parameters where it holds for others, to what differs. docs/engines.md says
# the same to users.
NOT_THERE: dict[str, dict[str, str]] = {
    "": {},
    "vllm": {
        "test_a_small_limit_ends_an_unbounded_answer_validly": "guided answers are cut at max_tokens",
        "test_json_object_is_an_object": "an object without a bound is not led to its end",
        "test_the_ledgers_seconds_and_tokens_are_the_engines[real]": "steps are not shared out to requests",
        "test_a_killed_engine_answers_with_what_was_loaded_last": "greedy text depends on the batch",
        "test_32_streams_in_parallel_equal_the_same_prompts_alone": "greedy text depends on the batch",
    },
}
