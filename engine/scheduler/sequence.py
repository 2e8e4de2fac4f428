"""A request and its choices while they are decoded. Mutable, owned by the scheduler."""

from __future__ import annotations

from collections import deque
from enum import Enum
from typing import Any, NamedTuple, Protocol

import msgspec

from contract.prefix import PrefixHasher
from engine.kv.block_pool import BlockTable
from engine.kv.disk import DiskRead
from engine.policy.line import account_of, slots_of
from engine.types import (
    ChoiceHistory,
    ChoiceStatistics,
    EngineTime,
    FinishReason,
    FirstTokenTimings,
    KeptBlocks,
    Request,
    SamplingParams,
    TokenEvent,
    TokenLogprobs,
)

# Reasons to end a request that nobody takes answers of any more.
_ENDED_EARLY = frozenset({FinishReason.CANCELLED, FinishReason.DEADLINE})
# Renewals that are told of an answer that goes on for ever.
_MOST_RENEWALS = 32


class Status(Enum):
    """Where a sequence stands."""

    # A further choice that starts when the first one has computed the prompt.
    HELD = "held"
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class BestOf:
    """Collects the events of all choices of a request that returns only the most likely ones. Nothing can be
    streamed before the last choice has ended, so events are kept here until then.
    """

    def __init__(self, num_returned: int, first_index: int) -> None:
        self._num_returned = num_returned
        self._first_index = first_index
        self._events: dict[int, list[TokenEvent]] = {}
        self.num_tokens = 0

    def collect(self, event: TokenEvent) -> None:
        """Keeps an event of one choice."""
        self.num_tokens += len(event.token_ids)
        self._events.setdefault(event.choice_index, []).append(event)

    def results(self, mean_logprobs: dict[int, float], reason: FinishReason) -> list[TokenEvent]:
        """One event for each returned choice, by falling mean log-probability, numbered anew. Of a request
        whose last choice was ended early, none has tokens.
        """
        ranked = sorted(mean_logprobs, key=lambda index: (-mean_logprobs[index], index))
        everything = [event for events in self._events.values() for event in events]
        first = next((event.first_token for event in everything if event.first_token), None)
        prompt = next((event.prompt_logprobs for event in everything if event.prompt_logprobs), ())
        results = [
            self._merge(self._events[index], self._first_index + rank)
            for rank, index in enumerate(ranked[: self._num_returned])
        ]
        if reason in _ENDED_EARLY:
            results = [
                msgspec.structs.replace(each, token_ids=(), logprobs=(), finish_reason=reason)
                for each in results
            ]
        # The first answer carries what belongs to the whole request: times, and log-probabilities of the
        # prompt.
        results[0] = msgspec.structs.replace(results[0], first_token=first, prompt_logprobs=prompt)
        if results[0].statistics is not None:
            results[0].statistics.candidate_tokens = self.num_tokens - sum(
                len(each.token_ids) for each in results
            )
        return results

    @staticmethod
    def _merge(events: list[TokenEvent], index: int) -> TokenEvent:
        return msgspec.structs.replace(
            events[-1],
            choice_index=index,
            token_ids=tuple(token for event in events for token in event.token_ids),
            logprobs=tuple(each for event in events for each in event.logprobs),
        )


class RequestGroup:
    """One request with its sequences. Lives until every choice has ended or the request failed."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.sequences: list[Sequence] = []
        self.num_finished = 0
        self.first_scheduled_s: float | None = None
        self.cached_prompt_tokens = 0
        self.prefill_chunks: list[tuple[float, float, int]] = []
        self.first_token_reported = False
        # Engine time of its steps since the last event that carried it.
        self.engine_time = EngineTime()
        sampling = request.sampling
        self.is_beam_search = sampling.beam_width > 0
        # Only where more choices are generated than returned.
        competes = sampling.best_of > sampling.n and not self.is_beam_search
        self.best_of = BestOf(sampling.n, request.choice_index) if competes else None

    def drain_engine_time(self) -> EngineTime:
        """What was spent on the request since the last call."""
        taken, self.engine_time = self.engine_time, EngineTime()
        return taken

    def pop_first_token_timings(self, prefill_end_s: float, now: float) -> FirstTokenTimings | None:
        """Timings for the request's first token; None ever after."""
        if self.first_token_reported:
            return None
        self.first_token_reported = True
        arrival = self.request.arrival_s
        return FirstTokenTimings(
            arrival_s=arrival,
            first_scheduled_s=arrival if self.first_scheduled_s is None else self.first_scheduled_s,
            prefill_end_s=prefill_end_s,
            first_token_s=now,
            cached_prompt_tokens=self.cached_prompt_tokens,
            prefill_chunks=tuple(self.prefill_chunks),
        )


class Need(Protocol):
    """What a waiting sequence may need besides a slot and blocks (`needs`)."""

    def lacks(self, draft: Any, sequence: Sequence) -> str:
        """Why the sequence cannot start in a plan, as the cause of its wait; empty where it can. What is
        lacking is begun. The draft is a PlanDraft, which knows sequences.
        """

    def begin_step(self) -> bool:
        """Takes in what has come since the last plan; False where nothing is on its way any more."""


class Awaited(NamedTuple):
    """Prompt blocks that a waiting sequence leaves to one that computes them already."""

    owner: Sequence
    # The owner's epoch when they were computed; the owner's goes up when its blocks are lost.
    epoch: int
    # Positions from which on and up to which they lie.
    start: int
    end: int


class Sequence:
    """Token ids and progress of one choice.

    Positions, in order:  computed in confirmed steps <= `num_confirmed` <= `num_computed` (a step in flight
    included) <= `num_expected` (with what steps in flight sample at most); confirmed <= `num_known` =
    len(token_ids). Drafts in flight count as accepted until their step's result says otherwise.
    """

    def __init__(
        self,
        *,
        sequence_id: int,
        group: RequestGroup,
        choice_index: int,
        sampling: SamplingParams,
        max_tokens_total: int,
        hasher: PrefixHasher,
        kept: KeptBlocks | None = None,
        needs: tuple[Need, ...] = (),
    ) -> None:
        request = group.request
        self.sequence_id = sequence_id
        self.group = group
        # Tier and tenant that its tokens are charged to.
        self.account = account_of(request)
        self.priority = request.priority
        # Empty for the base model.
        self.adapter = request.adapter
        self.choice_index = choice_index
        # Options for the runner. They may ask for more log-probabilities than the client did, because beams
        # and candidates are ranked by them.
        self.sampling = sampling
        # Those that it looks back on, from position 0 on, and those that it left behind the first of them.
        self.token_ids = [*request.prompt_token_ids, *request.output_token_ids]
        self.left_token_ids: list[int] = []
        # Those that are computed as a prompt; and where output begins, below 0 where some was left.
        self.num_prompt_tokens = self.output_start = len(request.prompt_token_ids)
        # Prompt, and output that another engine generated.
        self.num_given = len(self.token_ids)
        # Tokens that it generates at most: the least of max_tokens, context and tier. And where they end, or
        # the positions.
        self.max_output_tokens = max_tokens_total - self.num_prompt_tokens
        self.max_tokens_total = max_tokens_total
        self.status = Status.WAITING
        # The blocks that its answer looks at, where it may forget some.
        self.kept = kept
        self.table = BlockTable(kept)
        # Positions below it have their share in `took.lost_tokens`, or lose nothing. Rows of an epoch before
        # `whole_from` count for nothing: since then it forgets nothing.
        self.num_measured = self.whole_from = 0
        self.hasher = hasher
        self.num_computed = self.num_confirmed = 0
        # Tokens that steps in flight will sample at most: one each, and their drafts.
        self.num_pending = 0
        # Goes up whenever the blocks are lost, so that results of older steps can be recognized.
        self.epoch = 0
        # Tokens known when the sequence was (re)admitted; computing up to here is prefill.
        self.prefill_end = len(self.token_ids)
        self.draft_token_ids: tuple[int, ...] = ()
        self.drafter = ""
        # Preemptions that count towards the bound: all but those that share slots among equal tenants.
        self.num_forced = 0
        # Keeps its slot whatever comes: aged, or preempted as often as is allowed.
        self.boosted = False
        # Was preempted as often as is allowed: comes back only with all blocks that it can still need.
        self.awaits_promise = False
        # Parent whose prompt blocks the first admission may share.
        self.fork_parent: Sequence | None = None
        self.needs = needs
        # Whom it waits for, while it has no slot.
        self.awaited: Awaited | None = None
        # Where its prompt was computed, until that is asked.
        self.source = group.request.source
        # What it waits for from disk or there, or did before; whether that was begun for it.
        self.disk_read: DiskRead | None = None
        self.owns_disk_read = False
        # Order of submission; the second number is the beam's within one request.
        self.order = (sequence_id, 0)
        # Whether the runner has state for it.
        self.is_introduced = False
        self.is_beam = group.is_beam_search
        # Beam that it continues with one more token.
        self.beam_parent_id: int | None = None
        self.beam_logprobs: tuple[TokenLogprobs, ...] = ()
        self._start_statistics()
        if kept is not None and kept.num_positions:
            self.max_tokens_total = kept.num_positions
            self._leave()

    def _start_statistics(self) -> None:
        self.took = ChoiceStatistics()
        # Verified and accepted drafts by who proposed them.
        self.drafts: dict[str, tuple[int, int]] = {}
        self.first_token_s: float | None = None
        # When its pace began, with the tokens that were known then: with its first token, and again with the
        # first after a preemption.
        self.pace_start: tuple[float, int] | None = None
        # When it was preempted; None while it is not away. Then the times it was away, with their ends.
        self.away_since_s: float | None = None
        self.absences_s: list[tuple[float, float]] = []
        # (start, tokens) of a return to the batch, and of a restore from host memory, that later results end.
        self.coming_back: tuple[float, int] | None = None
        self.restoring: tuple[float, int] | None = None
        self.comebacks_s: list[tuple[float, float, int]] = []
        self.restores_s: list[tuple[float, float, int]] = []
        # The same of going on beyond the model's positions.
        self.renewing: tuple[float, int] | None = None
        self.renewals_s: deque[tuple[float, float, int]] = deque(maxlen=_MOST_RENEWALS)
        # For how long prompts of its tier had been held back when something of it was computed last; see
        # `HeldBack`.
        self.held_before_s: float | None = None
        # Cause and start of the present wait.
        self.waiting_for = ""
        self.waiting_since_s = self.group.request.arrival_s
        # Most positions ever computed: what is computed again below it is recomputation.
        self.high_water = 0
        self.prompt_logprobs: list[TokenLogprobs] = []
        self.sum_logprob = 0.0

    @property
    def num_known(self) -> int:
        """Tokens whose ids are known."""
        return len(self.token_ids)

    @property
    def num_expected(self) -> int:
        """Tokens after all steps in flight, whose drafts are counted as accepted."""
        return len(self.token_ids) + self.num_pending

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far, on whichever engine."""
        return len(self.token_ids) - self.output_start

    @property
    def is_finished(self) -> bool:
        """Whether the choice has ended."""
        return self.status is Status.FINISHED

    @property
    def num_slots(self) -> int:
        """Slots that admitting the sequence leads to: those of its group, before its start."""
        return slots_of(self.group.request) if self.group.first_scheduled_s is None else 1

    @property
    def num_held_blocks(self) -> int:
        """Blocks that come free with its slot."""
        return self.table.num_held

    @property
    def num_held_window_blocks(self) -> int:
        """The same, where only some layers have a window."""
        return self.table.num_in_window

    @property
    def goes_on(self) -> bool:
        """Whether the answer is to go on where the model's positions end."""
        return self.kept is not None and self.kept.num_positions > 0

    @property
    def rank(self) -> tuple[int, int, tuple[int, int]]:
        """Order among running sequences: the lowest is served first and displaced last."""
        return (0 if self.boosted else 1, -self.priority, self.order)

    @property
    def mean_logprob(self) -> float:
        """Mean log-probability of the tokens generated here; lowest when there are none."""
        generated = self.num_known - self.num_given
        return self.sum_logprob / generated if generated else float("-inf")

    @property
    def remaining_prefill(self) -> int:
        """Tokens to compute before the first (or, after preemption, next) token can be sampled."""
        return max(0, self.prefill_end - self.num_computed)

    @property
    def num_at_once(self) -> int:
        """Tokens that have blocks when the sequence starts: all that are known, or those after which it
        begins to forget, and a block. What follows is computed block by block.
        """
        kept = self.kept
        return self.num_known if kept is None else min(self.num_known, kept.start + kept.block_size)

    @property
    def num_measured_blocks(self) -> int:
        """Forgotten blocks of which it may come to have keys, because it says what it lost."""
        return 0 if self.kept is None else self.kept.num_measured(self.max_tokens_total - 1)

    @property
    def num_findable(self) -> int:
        """Tokens of which blocks may be found in the cache, as long as one is left to compute: all that are
        known, or those up to the first whose queries vote.
        """
        return self.num_known if self.kept is None else min(self.num_known, self.kept.first_voter + 1)

    def end_of_row(self, start: int, end: int) -> int:
        """Where a row of positions from `start` up to `end` ends, whose positions look at the same blocks."""
        return end if self.kept is None else min(end, self.kept.alike_until(start))

    @property
    def needs_every_position(self) -> bool:
        """Whether log-probabilities of the prompt are wanted: cached positions have no logits to report."""
        return self.sampling.prompt_logprobs is not None and self.first_token_s is None

    def child(self, sequence_id: int, token_id: int, logprob: float) -> Sequence:
        """A beam that goes on from this one with one more token; it has no blocks yet."""
        child = Sequence(
            sequence_id=sequence_id,
            group=self.group,
            choice_index=self.choice_index,
            sampling=self.sampling,
            max_tokens_total=self.max_tokens_total,
            hasher=self.hasher.copy(),
            kept=self.kept,
            needs=self.needs,
        )
        child.token_ids = [*self.token_ids, token_id]
        child.order = (self.order[0], sequence_id)
        child.prefill_end = 0
        child.boosted, child.awaits_promise = self.boosted, self.awaits_promise
        child.num_forced = self.num_forced
        child.beam_parent_id = self.sequence_id
        child.sum_logprob = self.sum_logprob + logprob
        child.beam_logprobs = (*self.beam_logprobs, TokenLogprobs(token_id, logprob))
        child.took.add(self.took)
        child.high_water = self.high_water
        child.first_token_s = self.first_token_s
        child.absences_s = list(self.absences_s)
        child.comebacks_s, child.restores_s = list(self.comebacks_s), list(self.restores_s)
        return child

    def counts_drafts(self, drafter: str, num_drafted: int, num_accepted: int) -> None:
        """Books drafts that were verified, by who proposed them."""
        self.took.drafted_tokens += num_drafted
        self.took.accepted_tokens += num_accepted
        drafted, accepted = self.drafts.get(drafter, (0, 0))
        self.drafts[drafter] = drafted + num_drafted, accepted + num_accepted

    def blames(self, cause: str, seconds: float) -> None:
        """Adds to the time lost to a named cause; waits that nobody caused are not reported."""
        if seconds > 0 and cause:
            self.took.delayed_by_s[cause] = self.took.delayed_by_s.get(cause, 0.0) + seconds

    def waits_for(self, cause: str, now: float) -> None:
        """Books the wait so far under its cause and goes on waiting for another one."""
        if cause != self.waiting_for:
            self.blames(self.waiting_for, now - self.waiting_since_s)
            self.waiting_for, self.waiting_since_s = cause, now

    def stops_waiting(self, now: float, *, num_computed: int = 0) -> None:
        """Books the wait that ends now; of the tokens, `num_computed` need not be computed again."""
        if self.away_since_s is not None:
            self.absences_s.append((self.away_since_s, now))
            self.away_since_s = None
            self.coming_back = (now, self.num_known - num_computed)
        self.blames(self.waiting_for, now - self.waiting_since_s)
        self.waiting_since_s = now

    def takes_result(self, now: float, *, is_sampled: bool) -> None:
        """Books what a step's result ends: a restore with any, a return to the batch and a renewal with a
        token.
        """
        if self.restoring is not None:
            self.restores_s.append((self.restoring[0], now, self.restoring[1]))
            self.restoring = None
        if is_sampled and self.coming_back is not None:
            self.comebacks_s.append((self.coming_back[0], now, self.coming_back[1]))
            self.coming_back = None
        if is_sampled and self.renewing is not None:
            self.renewals_s.append((self.renewing[0], now, self.renewing[1]))
            self.renewing = None

    def rewind(self) -> None:
        """Forgets all progress but the tokens: the blocks are gone."""
        self.epoch += 1
        self.coming_back = self.restoring = None
        self.disk_read = None
        self.is_introduced = False
        self.num_computed = 0
        self.num_confirmed = 0
        self.draft_token_ids = ()
        if self.first_token_s is None:
            self.prompt_logprobs.clear()

    def renew(self, now: float) -> None:
        """Goes on behind the model's positions, with what it takes along; its blocks are gone."""
        self.rewind()
        self._leave()
        self.renewing = (now, self.num_known)

    def _leave(self) -> None:
        """Leaves the tokens that a text of so many no longer looks back on."""
        assert self.kept is not None, "only who forgets goes on beyond the positions"
        num_tokens = len(self.left_token_ids) + self.num_known
        found = self.kept.renewal(num_tokens)
        if found is None:
            return
        end = found.num_sinks + found.num_left - len(self.left_token_ids)
        self.left_token_ids += self.token_ids[found.num_sinks : end]
        del self.token_ids[found.num_sinks : end]
        self.output_start -= end - found.num_sinks
        self.num_given -= end - found.num_sinks
        self.num_prompt_tokens, last = found.num_prompt, self.output_start + self.max_output_tokens
        again = last > self.kept.num_positions
        self.max_tokens_total = self.kept.num_positions if again else last
        self.kept = self.table.kept = self.kept.renewed(again=again)
        # Nobody else computes that.
        self.hasher = PrefixHasher(
            model="", adapter="", salt=b"", block_size=self.kept.block_size, most_tokens=0
        )
        self.prefill_end = self.num_known

    def history(self, now: float) -> ChoiceHistory:
        """What the choice took over its whole life."""
        history = ChoiceHistory(
            decode_s=0.0 if self.first_token_s is None else now - self.first_token_s,
            absences_s=tuple(self.absences_s),
            comebacks_s=tuple(self.comebacks_s),
            restores_s=tuple(self.restores_s),
            renewals_s=tuple(self.renewals_s),
            drafts=dict(self.drafts),
        )
        history.add(self.took)
        return history
