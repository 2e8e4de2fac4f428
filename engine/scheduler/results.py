"""Takes a step's result in: confirms what was computed, appends tokens, ends choices, reports."""

from __future__ import annotations

from collections.abc import Mapping

from contract.retention import RECOMPUTE
from engine.policy.rates import StepRate
from engine.scheduler.beams import BeamSearch
from engine.scheduler.sequence import Sequence, Status
from engine.scheduler.state import Row, SchedulerState, StepInFlight
from engine.types import FinishReason, RequestFailure, SequenceResult, StepResult, TokenEvent, TokenLogprobs

# Whose the seconds of a step are: each sequence has the part of its work, and all are counted once.
# A step computes rows for nobody now and then: with overlap, of a sequence whose end was not known yet.
# That is a price of computing together: the others of the step bear it, or those of the next where it has
# no others.


class StepCosts:
    """Books what steps took on the requests that they computed."""

    def __init__(self, speed: StepRate) -> None:
        # Converts tokens to work, because a token at the end of a long context takes longer than one at the
        # start.
        self._speed = speed
        # Seconds of steps whose requests have all ended, charged to the requests of the next step.
        self._owed_s = 0.0

    def book(self, step: StepInFlight, results: Mapping[int, SequenceResult], seconds: float) -> None:
        """A step that came back, with what it means for its sequences."""
        for row, seconds_of_token in self._shares(step, seconds):
            spent, num_tokens = row.sequence.group.engine_time, row.num_tokens
            if row.is_prefill:
                spent.prefill_s += (num_tokens - row.num_recomputed) * seconds_of_token
                spent.recompute_s += row.num_recomputed * seconds_of_token
                continue
            if row.draft_token_ids:
                result = results.get(row.sequence.sequence_id)
                num_wasted = len(row.draft_token_ids) - (0 if result is None else result.num_accepted)
                spent.speculative_waste_s += num_wasted * seconds_of_token
                num_tokens -= num_wasted
            spent.decode_s += num_tokens * seconds_of_token

    def book_lost(self, step: StepInFlight, seconds: float) -> None:
        """A step that failed, or came back after one that did: all of it is computed again."""
        for row, seconds_of_token in self._shares(step, seconds):
            row.sequence.group.engine_time.recompute_s += row.num_tokens * seconds_of_token

    def _shares(self, step: StepInFlight, seconds: float) -> list[tuple[Row, float]]:
        """Rows of requests that have not ended, each with the seconds that one of its tokens bears."""
        if not step.rows:
            # Only releases; no step that is counted.
            return []
        rows = [
            row
            for row in step.rows.values()
            # A probe is nobody's request.
            if row.sequence.status is not Status.FINISHED and row.sequence.group.request.request_id >= 0
        ]
        works = [self._speed.work(row.start, row.num_tokens) for row in rows]
        owed_s, self._owed_s = self._owed_s + seconds, 0.0
        if not rows:
            self._owed_s = owed_s
            return []
        per_work_s = owed_s / sum(works)
        return [(row, per_work_s * work / row.num_tokens) for row, work in zip(rows, works, strict=True)]


# Part of the token budget from which on a step shows how fast prompts can be computed.
FULL_SHARE = 0.9
_NOTHING = SequenceResult(sequence_id=-1, token_ids=())


class ResultHandler:
    """Applies successful step results to the state. Failed steps are the business of isolation."""

    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        self.costs = StepCosts(state.speed)

    def apply(self, step: StepInFlight, result: StepResult, now: float) -> None:
        """Books every row of the step that still concerns someone."""
        # Overlapped steps are planned before the device is free for them.
        started = max(step.planned_s, self._state.last_result_s)
        self._state.last_result_s = now
        seconds = result.compute_s or now - started
        self._state.speed.stepped(now - started)
        prefill = total = long = looked_back = 0
        chunk = 0.0
        for row in step.rows.values():
            total += row.num_tokens
            looked_back += row.num_tokens * (2 * row.start + row.num_tokens)
            if row.is_prefill:
                prefill += row.num_tokens
                chunk += row.work
            if row.is_long:
                long += row.num_tokens
        full = total >= FULL_SHARE * step.budget
        speed = self._state.speed
        work = total + looked_back / (2.0 * speed.balance)
        decodes = work - chunk if prefill < total else 0.0
        speed.observe(prefill, total - prefill, seconds, chunk=chunk, decodes=decodes, full=full)
        long_share = long / total if total else 0.0
        results = {each.sequence_id: each for each in result.results}
        self.costs.book(step, results, result.compute_s)
        prefill_end = max(started, now - result.sampling_s)
        for sequence_id, row in step.rows.items():
            sequence = row.sequence
            if sequence.status is Status.FINISHED:
                continue
            outcome = results.get(sequence_id, _NOTHING)
            if not (long_share or outcome.lost) and self._apply_next(row, outcome):
                continue
            failure = outcome.failure
            if not failure and row.samples and not (outcome.token_ids or outcome.pooled):
                failure = "the runner returned no token"
            if failure:
                self._state.fail_group(sequence.group, _refusal(failure, outcome.failure_field))
                continue
            if self._loses_too_much(row, outcome, now):
                continue
            sequence.took.num_steps += 1
            sequence.took.grammar_s += outcome.grammar_s
            if row.is_prefill:
                sequence.group.prefill_chunks.append((started, prefill_end, row.num_tokens))
            elif long_share:
                sequence.blames("long_prefill", (now - started) * long_share)
            self._apply_row(row, outcome, prefill_end, now)

    def _loses_too_much(self, row: Row, outcome: SequenceResult, now: float) -> bool:
        """Books what the row's positions have lost of their attention. True where the outcome is void, since
        the answer, its token included, would have lost more than it may, or had before.
        """
        sequence = row.sequence
        asked = sequence.group.request.retention
        if asked is None or asked.max_lost is None:
            return False
        is_void = row.epoch < sequence.whole_from
        for position, share in enumerate(() if is_void else outcome.lost, row.start):
            if position < sequence.num_measured:
                continue
            lost = sequence.took.lost_tokens + share
            num_tokens = position + 2 - sequence.num_prompt_tokens
            if lost > asked.max_lost * num_tokens:
                is_void = True
                if asked.beyond != RECOMPUTE:
                    self._state.fail_group(sequence.group, _lost(lost / num_tokens, asked.max_lost))
                else:
                    self._state.remember(sequence, now)
                break
            sequence.took.lost_tokens, sequence.num_measured = lost, position + 1
        if is_void and row.samples:
            sequence.num_pending -= 1 + len(row.draft_token_ids)
        return is_void

    def _apply_next(self, row: Row, outcome: SequenceResult) -> bool:
        """Most rows: the next token of a sequence that decodes, with no end, full block or report.
        False, and nothing done, for others; the general way gives the same.
        """
        sequence, tokens = row.sequence, outcome.token_ids
        if len(tokens) != 1 or row.num_tokens != 1 or row.is_prefill or not row.samples:
            return False
        group, state, end = sequence.group, self._state, row.start + 1
        if (
            end % state.cache.block_size == 0
            or len(sequence.token_ids) + 1 >= sequence.max_tokens_total
            or tokens[0] in sequence.sampling.stop_token_ids
            or row.epoch != sequence.epoch
            or sequence.first_token_s is None
            or sequence.restoring is not None
            or sequence.coming_back is not None
            or sequence.is_beam
            or group.best_of is not None
            or not group.first_token_reported
            # Window blocks are given up when a block is full.
            or (state.cache.window is not None and not state.cache.has_window_blocks)
            or outcome.failure
            or outcome.logprobs
            or outcome.prompt_logprobs
            or outcome.grammar_finished
            or outcome.grammar_s
            or outcome.next_draft_token_ids
        ):
            return False
        request = group.request
        sequence.took.num_steps += 1
        sequence.num_pending -= 1
        sequence.token_ids.append(tokens[0])
        sequence.num_confirmed = end
        sequence.draft_token_ids = ()
        state.shares.charge(sequence.account, request.weight, 0, 1)
        state.events.append(
            TokenEvent(request_id=request.request_id, choice_index=sequence.choice_index, token_ids=tokens)
        )
        return True

    def _apply_row(self, row: Row, outcome: SequenceResult, prefill_end: float, now: float) -> None:
        sequence = row.sequence
        is_back = sequence.coming_back is not None
        if row.epoch == sequence.epoch:
            if row.samples and sequence.renewing is not None:
                self._state.totals.renewal_s += now - sequence.renewing[0]
            sequence.takes_result(now, is_sampled=row.samples)
        search = self._state.searches.get(sequence.group.request.request_id)
        (search or sequence).prompt_logprobs.extend(outcome.prompt_logprobs)
        if not row.samples:
            self._confirm(row, 0)
            return
        sequence.num_pending -= 1 + len(row.draft_token_ids)
        if outcome.pooled:
            self._confirm(row, 0)
            self._report_pooled(sequence, outcome.pooled, prefill_end, now)
            return
        if search is not None:
            self._confirm(row, 0)
            self._report_beam(search, sequence, outcome, prefill_end, now)
            return
        num_rejected = len(row.draft_token_ids) - outcome.num_accepted if row.draft_token_ids else 0
        if row.draft_token_ids:
            sequence.counts_drafts(row.drafter, len(row.draft_token_ids), outcome.num_accepted)
        token_ids, reason, stop_token_id = self._accept(sequence, outcome)
        self._confirm(row, num_rejected)
        request = sequence.group.request
        self._state.shares.charge(sequence.account, request.weight, 0, len(token_ids))
        # Steps in flight already sample the tokens that the drafts begin with.
        sequence.draft_token_ids = outcome.next_draft_token_ids[sequence.num_pending :]
        sequence.drafter = outcome.next_drafter
        event = TokenEvent(
            request_id=request.request_id,
            choice_index=sequence.choice_index,
            token_ids=token_ids,
            logprobs=self._logprobs(sequence, outcome, len(token_ids)),
            prompt_logprobs=self._prompt_logprobs_once(sequence),
            finish_reason=reason,
            stop_token_id=stop_token_id,
            first_token=sequence.group.pop_first_token_timings(prefill_end, now),
            statistics=None if reason is None else sequence.history(now),
        )
        if sequence.first_token_s is None:
            sequence.first_token_s = now
        if sequence.pace_start is None or is_back:
            sequence.pace_start = now, sequence.num_known
        if reason is None:
            self._state.report(sequence.group, event)
            if sequence.num_known >= sequence.max_tokens_total:
                self._state.renew(sequence, now)
        else:
            if request.hand_over and reason is FinishReason.LENGTH:
                self._state.hold(sequence, now)
            self._state.finish(sequence, reason, now, event)

    def _report_pooled(self, sequence: Sequence, pooled: bytes, prefill_end: float, now: float) -> None:
        """The end of a request to a model that pools: all of its answer."""
        group = sequence.group
        event = TokenEvent(
            request_id=group.request.request_id,
            choice_index=sequence.choice_index,
            finish_reason=FinishReason.STOP,
            first_token=group.pop_first_token_timings(prefill_end, now),
            statistics=sequence.history(now),
            pooled=pooled,
        )
        self._state.finish(sequence, FinishReason.STOP, now, event)

    def _report_beam(
        self, search: BeamSearch, sequence: Sequence, outcome: SequenceResult, prefill_end: float, now: float
    ) -> None:
        group = sequence.group
        if not outcome.logprobs:
            self._state.fail_group(group, poisoned("the runner returned no alternatives for a beam"))
            return
        search.report(sequence, outcome.logprobs[-1])
        if not search.is_complete(group.sequences):
            return
        first_token = group.pop_first_token_timings(prefill_end, now)
        if first_token is not None:
            search.first_token = first_token
            sequence.first_token_s = now
        request = group.request
        candidates = search.advance(group.sequences)
        self._state.withheld[request.request_id] = search.num_tokens
        self._state.shares.charge(sequence.account, request.weight, 0, len(group.sequences))
        if candidates:
            self._state.replace_beams(group, candidates, now)
            return
        self._state.finish_beams(group, _answers(search, sequence, now), now)

    def _accept(
        self, sequence: Sequence, outcome: SequenceResult
    ) -> tuple[tuple[int, ...], FinishReason | None, int | None]:
        """Appends the new tokens up to the end of the choice: (tokens kept, reason to end, stop token)."""
        sampling = sequence.sampling
        for count, token_id in enumerate(outcome.token_ids, start=1):
            sequence.token_ids.append(token_id)
            kept = outcome.token_ids[:count]
            if token_id in sampling.stop_token_ids and sequence.num_output_tokens >= sampling.min_tokens:
                return kept, FinishReason.STOP, token_id
            if sequence.num_known >= sequence.max_tokens_total and not sequence.goes_on:
                done = outcome.grammar_finished and count == len(outcome.token_ids)
                return kept, FinishReason.STOP if done else FinishReason.LENGTH, None
        return outcome.token_ids, FinishReason.STOP if outcome.grammar_finished else None, None

    def _confirm(self, row: Row, num_rejected: int) -> None:
        """The row's positions hold valid keys and values; full blocks among them become reusable."""
        sequence = row.sequence
        if row.epoch != sequence.epoch:
            return
        states = self._state.cache.states
        if row.draft_token_ids and states is not None:
            states.settle(sequence.table, len(row.draft_token_ids) - num_rejected)
        if num_rejected:
            sequence.num_computed -= num_rejected
            # Planned behind drafts that were counted as accepted; the runner has gone back, too.
            for step in self._state.in_flight:
                later = step.rows.get(sequence.sequence_id)
                if later is not None and later.epoch == sequence.epoch:
                    later.start -= num_rejected
        sequence.num_confirmed = min(row.start + row.num_tokens - num_rejected, sequence.num_known)
        cache, table = self._state.cache, sequence.table
        if cache.prefix_caching and sequence.num_confirmed // cache.block_size > table.num_registered:
            sequence.hasher.extend(sequence.token_ids, sequence.num_confirmed)
            cache.register(table, sequence.hasher, sequence.num_confirmed)
        is_left_behind = cache.window is not None or sequence.kept is not None
        if is_left_behind and (cache.has_window_blocks or not sequence.is_beam):
            # Beams keep whole blocks that they do not look at, because the blocks promised to a search assume
            # that its beams share them.
            cache.give_up(table, sequence.num_confirmed)

    @staticmethod
    def _logprobs(sequence: Sequence, outcome: SequenceResult, count: int) -> tuple[TokenLogprobs, ...]:
        for each in outcome.logprobs[:count]:
            sequence.sum_logprob += each.logprob
        return outcome.logprobs[:count] if sequence.group.request.sampling.logprobs is not None else ()

    @staticmethod
    def _prompt_logprobs_once(sequence: Sequence) -> tuple[TokenLogprobs, ...]:
        if not sequence.prompt_logprobs or sequence.first_token_s is not None:
            return ()
        taken = tuple(sequence.prompt_logprobs)
        sequence.prompt_logprobs.clear()
        return taken


def _lost(share: float, most: float) -> RequestFailure:
    """The error of an answer that may not be computed anew."""
    return RequestFailure(
        reason="INVALID_ARGUMENT",
        field="kv.max_lost",
        message=f"kv.max_lost: the answer may have lost {share:.3g} of its attention, more than {most:g}; "
        "keep more of the prompt, or ask for policy full",
    )


def _refusal(cause: str, field: str) -> RequestFailure:
    """The error of a sequence that cannot go on: by the option's name where one is to blame."""
    if not field:
        return poisoned(cause)
    return RequestFailure(reason="INVALID_ARGUMENT", message=f"{field}: {cause}", field=field)


def poisoned(cause: str) -> RequestFailure:
    """The error of a request that cannot be computed, while others can."""
    return RequestFailure(
        reason="POISONED_REQUEST",
        message=f"this request makes the engine's step fail ({cause}); it was isolated and ended; others are "
        "not affected; do not send it again unchanged",
        metadata={"cause": cause},
    )


def _answers(search: BeamSearch, sequence: Sequence, now: float) -> list[TokenEvent]:
    """The best beams; the first one's statistics hold what was computed for others."""
    request, answers = sequence.group.request, search.best()
    history = sequence.history(now)
    history.candidate_tokens = max(0, search.num_tokens - sum(len(each.token_ids) for each in answers))
    return [
        TokenEvent(
            request_id=request.request_id,
            choice_index=request.choice_index + index,
            token_ids=answer.token_ids,
            logprobs=answer.logprobs if request.sampling.logprobs is not None else (),
            prompt_logprobs=() if index else tuple(search.prompt_logprobs),
            finish_reason=answer.reason,
            stop_token_id=answer.stop_token_id,
            first_token=None if index else search.first_token,
            statistics=sequence.history(now) if index else history,
        )
        for index, answer in enumerate(answers)
    ]
