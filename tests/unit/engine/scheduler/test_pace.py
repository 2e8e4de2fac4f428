"""Chunks by time: what a step may hold while somebody is being answered."""

from __future__ import annotations

from engine.scheduler.pace import LEAST_CHUNK_PER_DECODE, LEAST_CHUNK_TOKENS
from tests.unit.engine.driver import Driver, memory_plan


def prompt(start: int, length: int = 400) -> list[int]:
    return [(start * 31 + index) % 200 for index in range(length)]


def busy_driver(
    step_target_ms: float, *, step_s: float = 1.0, lengths: tuple[int, ...] = (400, 400, 400)
) -> Driver:
    """One sequence decodes; a step of 400 prompt tokens took `step_s`, and more prompts have come."""
    driver = Driver(
        memory=memory_plan(1600, 4, 800),
        max_num_batched_tokens=600,
        long_prefill_tokens=500,
        step_target_ms=step_target_ms,
        check=False,
    )
    driver.runner.compute_s = step_s
    driver.submit(prompt(1), max_tokens=30)
    driver.step()
    for index, length in enumerate(lengths):
        driver.submit(prompt(3 + index, length), max_tokens=2)
    driver.step()
    return driver


def test_while_somebody_decodes_a_step_is_cut_to_its_target_time() -> None:
    # 400 tokens a second: half a second is 200 tokens, one of which is decoded.
    assert busy_driver(500).plans[1].num_tokens == 200


def test_without_a_target_or_on_a_fast_device_the_token_budget_rules() -> None:
    assert busy_driver(0).plans[1].num_tokens == 600
    assert busy_driver(500, step_s=0.01).plans[1].num_tokens == 600


def test_a_chunk_never_becomes_so_small_that_it_wastes_the_device() -> None:
    assert busy_driver(500, step_s=100.0).plans[1].num_tokens == 1 + LEAST_CHUNK_TOKENS


def test_a_chunk_grows_with_the_sequences_that_decode_beside_it() -> None:
    driver = Driver(
        memory=memory_plan(1600, 4, 800),
        max_num_batched_tokens=600,
        max_num_seqs=20,
        long_prefill_tokens=500,
        step_target_ms=500,
        check=False,
    )
    driver.runner.compute_s = 100.0
    for index in range(16):
        driver.submit(prompt(index, 8), max_tokens=30)
    driver.step()
    driver.submit(prompt(40), max_tokens=2)
    driver.step()
    assert driver.plans[1].num_tokens == 16 + 16 * LEAST_CHUNK_PER_DECODE


def test_nobody_decoding_the_whole_budget_goes_to_prompts() -> None:
    driver = busy_driver(500)
    driver.run()
    for index in range(3):
        driver.submit(prompt(7 + index), max_tokens=2)
    driver.step()
    assert driver.plans[-1].num_tokens == 600
    driver.run()
    driver.check_everything()


def test_long_prompts_get_their_share_of_the_cut_step() -> None:
    driver = busy_driver(500, lengths=(700,))
    decode, chunk = driver.plans[1].scheduled
    assert (decode.num_tokens, chunk.num_tokens) == (1, 99)
