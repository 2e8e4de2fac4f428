"""Many steps at once, as a simulator of fleets needs them: each gives everybody the next token, and nothing
else happens. What is left is exactly what `schedule` and `update` would have left, step by step; events are
not made, since they would say no more. An engine that serves takes each step for itself.
"""

from __future__ import annotations

from collections.abc import Sequence as Run

from engine.policy.shares import Account
from engine.scheduler.planner import Planner
from engine.scheduler.results import FULL_SHARE
from engine.scheduler.sequence import Sequence
from engine.scheduler.state import SchedulerState

# Longer runs gain nothing, and most are cut short by who comes meanwhile.
_LONGEST_RUN = 128


class PlainSteps:
    """`num_steps` says how many such steps are next; `take` has them behind it."""

    def __init__(self, state: SchedulerState, planner: Planner) -> None:
        self._state = state
        self._planner = planner

    def num_steps(self) -> int:
        """Steps from now on that are plain, if nobody comes or leaves; 0 where the next one may not be."""
        state = self._state
        running, cache = state.running, state.cache
        if (
            not running
            or state.waiting
            or len(state.groups) != len(running)
            or state.in_flight
            or state.released
            or state.outlived
            or state.searches
            or state.events
            or cache.window is not None
            or cache.has_states
            or cache.has_host_tier
            or cache.disk is not None
            or state.promises.num_reserved()
        ):
            return 0
        left = min(map(_steps_left, running))
        return min(left, cache.num_available // len(running) * cache.block_size, _LONGEST_RUN)

    def shape(self) -> tuple[int, int]:
        """Answers of the next step, and positions that they look at; each step adds one for each answer."""
        running = self._state.running
        return len(running), sum(each.num_computed + 1 for each in running)

    def take(self, start_s: float, ends_s: Run[float], token_id: int) -> list[int]:
        """The steps with these ends, the first of which is planned at `start_s` and each other when the one
        before it ends; each sampled this token for all. Returns the requests.
        """
        state, running, num_steps = self._state, self._state.running, len(ends_s)
        self._planner.plain(start_s, ends_s)
        self._book_time(start_s, ends_s)
        self._move_blocks(num_steps, token_id)
        weights: dict[Account, list[float]] = {}
        for sequence in running:
            sequence.num_computed += num_steps
            sequence.num_confirmed = sequence.num_computed
            sequence.high_water = max(sequence.high_water, sequence.num_computed)
            sequence.took.num_steps += num_steps
            weights.setdefault(sequence.account, []).append(sequence.group.request.weight)
        for account, of_each in weights.items():
            state.shares.charge_steps(account, of_each, num_steps)
        return [sequence.group.request.request_id for sequence in running]

    def _book_time(self, start_s: float, ends_s: Run[float]) -> None:
        """What each step says of the engine's speed, in their order: the averages are not additive."""
        state, speed = self._state, self._state.speed
        num_rows, started_s = len(state.running), max(start_s, state.last_result_s)
        looked_back = sum(2 * each.num_computed + 1 for each in state.running)
        full = num_rows >= FULL_SHARE * state.config.max_num_batched_tokens
        for end_s in ends_s:
            seconds = end_s - started_s
            work = num_rows + looked_back / (2.0 * speed.balance)
            speed.stepped(seconds)
            speed.observe(0, num_rows, seconds, chunk=0.0, decodes=work, full=full)
            looked_back += 2 * num_rows
            started_s = end_s
        state.last_result_s = started_s

    def _move_blocks(self, num_steps: int, token_id: int) -> None:
        """Blocks are taken and offered in the order of the steps; inside a step first taken, then offered."""
        cache, running = self._state.cache, self._state.running
        size, moves = cache.block_size, []
        for index, sequence in enumerate(running):
            start = sequence.num_computed
            sequence.token_ids.extend([token_id] * num_steps)
            moves += [(step, 0, index) for step in range(-start % size, num_steps, size)]
            if cache.prefix_caching:
                moves += [(step, 1, index) for step in range((-start - 1) % size, num_steps, size)]
        moves.sort()
        for step, is_full, index in moves:
            sequence = running[index]
            position = sequence.num_computed + step
            if is_full:
                sequence.hasher.extend(sequence.token_ids, position + 1)
                cache.register(sequence.table, sequence.hasher, position + 1)
            else:
                cache.prepare_write(sequence.table, position, position + 1)
                sequence.table.drain_unsent()


def _steps_left(sequence: Sequence) -> int:
    """Steps until the one that ends it; 0 where its next one is of another kind."""
    group = sequence.group
    if (
        sequence.num_expected != sequence.num_computed + 1
        or sequence.remaining_prefill
        or sequence.num_confirmed != sequence.num_computed
        or sequence.num_pending
        or not sequence.is_introduced
        or sequence.first_token_s is None
        or sequence.pace_start is None
        or not group.first_token_reported
        or sequence.restoring is not None
        or sequence.coming_back is not None
        or sequence.draft_token_ids
        or sequence.sampling.stop_token_ids
        or sequence.sampling.logprobs is not None
        or sequence.adapter
        or sequence.kept is not None
        or group.request.grammar is not None
        or group.request.deadline_s is not None
        or group.best_of is not None
        or len(group.sequences) > 1
        or len(sequence.table.block_ids) != sequence.table.num_sent
    ):
        return 0
    return sequence.max_tokens_total - sequence.num_known - 1
