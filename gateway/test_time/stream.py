"""The stream of an attempt that thinks longer: samples under way, of which one becomes its answer.

To the attempt it is the stream of one submission whose answer is chosen at the end, as with best_of: news of
what is computed until then, which the journal keeps, and at last the answer, beside which all other samples'
tokens are those of candidates. So reservation, limits, ledger, metrics and traces are those of any request.

Every sample is a submission of its own, with the same seed and a choice's number of its own: it is what
n would have given, and ends in the engine's scheduler at the moment at which it cannot win. The first one
begins alone; the others find its prompt in the engine's cache of prefixes.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from msgspec.structs import replace

from contract.engines import CancelReason
from contract.errors import MillraceError, Reason
from contract.outputs import ChoiceStatistics, EngineTime
from gateway.engines.attachment import Computed
from gateway.engines.continuation import ContinuousStream
from gateway.engines.fleet import Fleet
from gateway.engines.types import Chosen, EngineOutput, Submission
from gateway.pipeline.attempt import check_ended
from gateway.pipeline.delta import ChoiceStream
from gateway.test_time import ballots
from gateway.test_time.asked import AskedAnswer, Begin, Question, spent_by_model
from gateway.test_time.branch import AnswerPart, RunningSample
from gateway.test_time.scorers import AnswerScorer, unanswered
from gateway.test_time.strategies import (
    Concluded,
    Decision,
    Event,
    Grown,
    Rated,
    Sample,
    Strategy,
    Unaffordable,
)
from gateway.types.deliberation import Deliberated, Deliberation, ScorerSpec, TokensOfModel

_log = logging.getLogger(__name__)
# An answer must reach its client before the deadline: this part of the time is kept for it, and no more than
# so many seconds.
_PART_FOR_ANSWER, _MOST_FOR_ANSWER_S = 0.05, 0.5


class Plan(NamedTuple):
    """How one request deliberates."""

    ask: Deliberation
    strategy: Strategy
    scorer: AnswerScorer | None
    # What is voted on, and its pattern; None where nothing is.
    ballot: ScorerSpec | None
    pattern: Any
    # Generated tokens that all samples may take together.
    budget_tokens: int
    # What the client asked for; engines are asked for more.
    logprobs: int | None
    # The client's names for the model and for the scorer.
    model: str
    scorer_field: str
    # Reads the tokens of a sample.
    choice: Callable[[], ChoiceStream]
    # Told of every part that has ended.
    note: Callable[[AnswerPart], None]
    # Seconds until the deadline; infinity without one.
    left_s: float
    # The question whose answer is the next part, where a request of its own computes it; what begins that.
    question: Callable[[Sequence[AnswerPart]], Question | None] = lambda before: None
    begin: Begin | None = None


class DeliberateStream(ContinuousStream):
    """See the module. `events` and `steps` are what was decided and why, for a replay."""

    def __init__(self, fleet: Fleet, submission: Submission, *, plan: Plan, **options: Any) -> None:
        super().__init__(fleet, submission, **options)
        self.events: list[Event] = []
        self.steps: list[Decision] = []
        self._plan = plan
        self._options = {name: each for name, each in options.items() if name != "backlog"}
        self._branches: list[AnswerPart] = []
        # Samples that are to begin, and wait for the first one's prompt or for room in the budget.
        self._num_waiting = 0
        # The steps that these go on from, where they do.
        self._parents: deque[int] = deque()
        self._failure: MillraceError | None = None
        self._note_failure = ""
        # Why nothing begins any more.
        self._over_by = ""
        self._rating: set[asyncio.Task[None]] = set()
        self._deadline: asyncio.TimerHandle | None = None
        self._statistics = ChoiceStatistics()
        # The answer, once it is chosen.
        self._pieces: list[EngineOutput] | None = None
        self._interruption: MillraceError | None = None
        self._has_news = False

    # --- what an attempt asks of its stream ---------------------------------------------------------------

    def start(self) -> None:
        """Begins the first sample; see `ContinuousStream.start`."""
        self._submission = self._fleet.adapters.asked_for(self._submission)
        self._num_waiting = self._plan.strategy.begin().start
        self.steps.append(Decision(start=self._num_waiting))
        first = self._open_sample()
        self.route, self.engine, self.pool = first.stream.route, first.stream.engine, first.stream.pool
        left_s = self._plan.left_s
        if left_s < float("inf"):
            early_s = min(_PART_FOR_ANSWER * left_s, _MOST_FOR_ANSWER_S)
            loop = asyncio.get_running_loop()
            self._deadline = loop.call_later(max(0.0, left_s - early_s), self.conclude, "deadline")

    async def take(self) -> list[EngineOutput]:
        """News while nothing is chosen, then the answer piece by piece."""
        if self._interruption is not None:
            raise self._interruption
        if self._pieces is None:
            news = await super().take()
            self._has_news = False
            return news
        piece, self._pieces = self._pieces[0], self._pieces[1:]
        return [piece]

    def interrupt(self, error: MillraceError) -> None:
        """See ContinuousStream; a deadline that has passed does not keep from the client what is chosen."""
        if error.reason is Reason.DEADLINE_EXCEEDED and self._pieces:
            return
        self._interruption = error
        super().interrupt(error)

    def cancel(self, reason: CancelReason) -> None:
        """Takes everything back, unless a deadline has passed and there is an answer."""
        if reason is CancelReason.DEADLINE and (self._pieces or self.conclude("deadline")):
            return
        self._end_others(None, reason)
        super().cancel(reason)

    async def taken_back(self) -> Computed:
        """See ContinuousStream: all tokens that came are paid for."""
        told = await asyncio.gather(*(each.stream.taken_back() for each in self._own))
        num_tokens = self._num_own_tokens
        has_begun = num_tokens > 0 or any(each.has_begun for each in told)
        return Computed(has_begun=has_begun, num_tokens=num_tokens)

    @property
    def engine_time(self) -> EngineTime:
        """See ContinuousStream."""
        spent = EngineTime()
        for branch in self._own:
            spent += branch.stream.engine_time
        return spent

    @property
    def num_generated(self) -> int:
        """See ContinuousStream."""
        return sum(branch.stream.num_generated for branch in self._own)

    def unheard(self) -> list[asyncio.Future[None]]:
        return [each for branch in self._own for each in branch.stream.unheard()]

    @property
    def _own(self) -> list[RunningSample]:
        """The parts that are this submission's, and in its row of the ledger."""
        return [each for each in self._branches if isinstance(each, RunningSample)]

    @property
    def _asked(self) -> list[AskedAnswer]:
        return [each for each in self._branches if isinstance(each, AskedAnswer)]

    # --- samples ------------------------------------------------------------------------------------------

    def conclude(self, ended_by: str) -> bool:
        """Ends with the best answer so far: whether there is one. What was cut is one where none ended."""
        self._over_by = self._over_by or ended_by
        for branch in self._branches:
            if self._pieces is None and branch.is_open and branch.num_tokens:
                branch.close(None)
                self._record(branch)
                self._feed(self._sample(branch))
        self._feed(Concluded(ended_by=self._over_by))
        return self._pieces is not None

    def _open(self) -> None:
        """Begins the next part; raises what `ContinuousStream.start` does."""
        question, index = self._plan.question(self._branches), len(self._branches)
        if question is None or self._parents:
            self._open_sample()
            return
        assert self._plan.begin is not None, "what asks has somebody to ask"
        self._num_waiting -= 1
        branch = AskedAnswer(index, question, self._plan.begin)
        self._branches.append(branch)
        branch.task = asyncio.create_task(self._hear(branch), name=f"{branch.part} {index}")

    def _open_sample(self) -> RunningSample:
        index = len(self._branches)
        sampling = self._submission.sampling
        if index:
            # They are told with the first.
            sampling = replace(sampling, prompt_logprobs=None)
        plan, parent = self._plan, self._next_parent
        submission = replace(
            self._submission,
            choice_index=index,
            sampling=sampling,
            output_token_ids=() if parent is None else parent.path_ids,
        )
        stream = ContinuousStream(self._fleet, submission, **self._options)
        stream.start()
        self._num_waiting -= 1
        if self._parents:
            self._parents.popleft()
        branch = RunningSample(
            index, stream, plan.choice(), plan.logprobs, parent=parent, delimiter=plan.ask.delimiter
        )
        branch.part = "draft" if plan.ask.is_chain else "step" if plan.ask.delimiter else None
        self._branches.append(branch)
        branch.task = asyncio.create_task(self._read(branch), name=f"sample {index}")
        return branch

    @property
    def _next_parent(self) -> RunningSample | None:
        """The step that the next sample goes on from."""
        if not self._parents:
            return None
        parent = self._branches[self._parents[0]]
        assert isinstance(parent, RunningSample), "a strategy whose samples go on asks nobody else"
        return parent

    def _open_more(self) -> None:
        """Begins what waits: not before the first one's prompt is computed, and while the budget has room for
        all that each may take.
        """
        is_prompt_cached = bool(self._branches[0].first_output_s) or not self._branches[0].is_open
        each = self._submission.sampling.max_tokens
        while self._num_waiting and is_prompt_cached and self._pieces is None:
            promised = sum(self._most(one) if one.is_open else one.num_tokens for one in self._branches)
            before = 0 if self._next_parent is None else self._next_parent.num_path_tokens
            if promised + each - before > self._plan.budget_tokens:
                break
            try:
                self._open()
            except MillraceError as error:
                self._failure, self._num_waiting = error, 0
        if self._pieces is None and not any(one.is_open for one in self._branches) and not self._rating:
            number, self._num_waiting = self._num_waiting, 0
            self._parents.clear()
            if number and not self._over_by:
                self._feed(Unaffordable(number=number))
            else:
                self.conclude("failure")

    def _most(self, branch: AnswerPart) -> int:
        """Tokens that an open part may take."""
        before = branch.num_path_tokens - branch.num_tokens if isinstance(branch, RunningSample) else 0
        return self._submission.sampling.max_tokens - before

    async def _read(self, branch: RunningSample) -> None:
        with self._failing(branch):
            while branch.is_open:
                for output in await branch.stream.take():
                    if branch.is_open:
                        self._take(branch, output)
                self._report()

    async def _hear(self, branch: AskedAnswer) -> None:
        with self._failing(branch):
            await branch.run(self._report)
            # It was ended meanwhile, where it has no reason of its own.
            if self._pieces is None and branch.finish is not None:
                self._ended(branch)

    @contextmanager
    def _failing(self, branch: AnswerPart) -> Iterator[None]:
        try:
            yield
        except MillraceError as error:
            self._fail(branch, error)
        except Exception:
            _log.exception("a sample of request %s failed", self._submission.request_id)
            self._fail(branch, MillraceError(Reason.INTERNAL, "a sample failed; the gateway's log has why"))

    def _take(self, branch: RunningSample, output: EngineOutput) -> None:
        check_ended(output.finish_reason)
        if output.statistics is not None:
            self._statistics.add(output.statistics)
        confidences = branch.take(output)
        if self._plan.strategy.watches and confidences:
            self._feed(Grown(index=branch.index, confidences=confidences, is_over=not branch.is_open))
        # One that was ended meanwhile has no reason of its own.
        is_over = branch.finish is not None or branch.is_step
        if not branch.is_open and self._pieces is None and is_over:
            self._ended(branch)
        if self._num_waiting:
            self._open_more()

    def _ended(self, branch: AnswerPart) -> None:
        self._record(branch)
        ballot = self._plan.ballot
        if ballot is not None and branch.is_complete:
            branch.vote = ballots.vote(ballot, self._plan.pattern, branch.text, branch.calls)
        self._feed(self._sample(branch))
        if self._over_by:
            # It came in the time that was left.
            self.conclude(self._over_by)

    def _stop(self, branch: AnswerPart) -> None:
        """Ends a sample that is not wanted, be it with its last token."""
        branch.close(None)
        branch.finish = None
        self._record(branch)

    def _fail(self, branch: AnswerPart, error: MillraceError) -> None:
        if not branch.is_open:
            return
        if isinstance(branch, AskedAnswer):
            branch.has_failed = True
            branch.close(None)
            self._record(branch)
            if self._plan.ask.on_failure != "answer":
                self._unanswered(error)
                return
            self._note_failure = error.message
            self._feed(self._sample(branch))
            return
        branch.has_failed = True
        branch.close(None)
        self._record(branch)
        self._failure = self._failure or error
        if len(self._branches) == 1 and not branch.num_tokens:
            # What the first one is refused for, the request is.
            self._num_waiting = 0
            super().interrupt(error)
            return
        self._feed(Sample(index=branch.index, is_complete=False, is_answer=False))
        if self._num_waiting:
            self._open_more()

    def _sample(self, branch: AnswerPart) -> Sample:
        return Sample(
            index=branch.index,
            is_complete=branch.is_complete,
            is_answer=branch.num_tokens > 0 and not branch.has_failed,
            is_step=branch.is_step,
            has_text=bool(branch.text.strip()) and not branch.calls,
            num_tokens=branch.num_tokens,
            mean_logprob=branch.mean_logprob,
            vote=branch.vote,
        )

    # --- decisions ----------------------------------------------------------------------------------------

    def _feed(self, event: Event) -> None:
        """Has the strategy take an event, and does what it says."""
        if self._pieces is not None:
            return
        step = self._plan.strategy.take(event)
        self.events.append(event)
        self.steps.append(step)
        for index in step.end:
            self._stop(self._branches[index])
        if step.ended_by:
            self._choose(step)
            return
        if self._over_by:
            return
        if step.rate:
            self._rate(step.rate)
        self._num_waiting += step.start
        self._parents.extend(step.parents)
        if step.start or step.end:
            self._open_more()

    def _rate(self, indices: Iterable[int]) -> None:
        task = asyncio.create_task(self._score(tuple(indices)), name="score samples")
        self._rating.add(task)
        task.add_done_callback(self._rating.discard)

    async def _score(self, indices: tuple[int, ...]) -> None:
        plan = self._plan
        assert plan.scorer is not None, "a strategy that rates has a scorer"
        try:
            scores = await plan.scorer.score([self._branches[index].text for index in indices])
            for index, score in zip(indices, scores, strict=True):
                self._branches[index].score = score
            self._rating.discard(asyncio.current_task())  # type: ignore[arg-type]
            self._feed(Rated(scores=dict(zip(indices, scores, strict=True))))
        except MillraceError as error:
            self._unrated(error)
        except Exception:
            _log.exception("the samples of request %s were not scored", self._submission.request_id)
            self._unrated(MillraceError(Reason.INTERNAL, "it failed; the gateway's log has why"))

    def _unrated(self, error: MillraceError) -> None:
        self._unanswered(unanswered(self._plan.ask, self._plan.scorer_field, error))

    def _unanswered(self, told: MillraceError) -> None:
        """What should have judged or answered does not: the best answer so far, where it may be given."""
        if self._plan.ask.on_failure == "answer":
            self._note_failure = told.message
            self.conclude("failure")
        elif self._pieces is None:
            self._end_others(None, CancelReason.STOP_STRING)
            self.interrupt(told)

    def _choose(self, step: Decision) -> None:
        if step.winner is None:
            # At a deadline there is a little time left, in which something may come.
            if step.ended_by != "deadline" and not any(each.is_open for each in self._branches):
                super().interrupt(self._failure or _no_sample())
            return
        winner = self._branches[step.winner]
        self._end_others(winner, CancelReason.STOP_STRING)
        self._pieces = winner.pieces()
        first = self._pieces[0]
        heard = next((each for each in self._own if each.first_token is not None), self._own[0])
        first.first_token = heard.first_token
        first.chosen = Chosen(since_s=heard.first_output_s or heard.started_s, tpot_s=winner.tpot_s)
        # With the first piece: the text may end before the last one.
        given = winner.num_path_tokens if isinstance(winner, RunningSample) else 0
        self._statistics.candidate_tokens += self._num_own_tokens - given
        if self._num_own_tokens:
            # Of a sample that was ended an engine's last word may be on its way.
            self._statistics.num_steps = max(1, self._statistics.num_steps)
        first.statistics = self._statistics
        self.deliberated = self._summary(step, winner)
        self._report(at_once=True)

    def _end_others(self, winner: AnswerPart | None, reason: CancelReason) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._num_waiting = 0
        running = asyncio.current_task()
        for branch in self._branches:
            if branch is not winner and branch.is_open:
                branch.close(None, reason)
                self._record(branch)
            if branch.task is not None and branch.task is not running:
                branch.task.cancel()
        for task in self._rating:
            if task is not running:
                task.cancel()

    def _record(self, branch: AnswerPart) -> None:
        """Of a part that has ended: its span, and what was lost under it."""
        if isinstance(branch, RunningSample):
            stream = branch.stream
            self.losses.update(stream.losses)
            self.interruptions += stream.interruptions
            self.engine, self.pool = stream.engine, stream.pool
        self._plan.note(branch)

    def _spent(self) -> list[TokensOfModel]:
        """By model, where requests were made for it; and all of theirs together, beside this one's own."""
        first = self._own[0].first_token
        own = TokensOfModel(
            model=self._plan.model,
            prompt_tokens=len(self._submission.prompt_token_ids),
            cached_prompt_tokens=0 if first is None else first.cached_prompt_tokens,
            completion_tokens=self._num_own_tokens,
        )
        asked = [each.spent for each in self._asked]
        if asked:
            self.elsewhere = sum(asked, TokensOfModel(model=""))
        return spent_by_model([own, *asked])

    def _summary(self, step: Decision, winner: AnswerPart) -> Deliberated:
        plan, strategy = self._plan, self._plan.strategy
        ranks = plan.ballot is None and plan.scorer is None and not plan.ask.is_chain
        asked = plan.ask.num_parts
        return Deliberated(
            strategy=plan.ask.strategy,
            ended_by=self._over_by or step.ended_by,
            max_samples=asked,
            samples=[
                each.told(
                    is_chosen=each is winner,
                    score=each.mean_logprob if ranks and each.is_complete else each.score,
                )
                for each in self._branches
            ],
            completion_tokens=sum(each.num_tokens for each in self._branches),
            stopped_early=sum(each.finish is None and each is not winner for each in self._branches),
            not_begun=max(0, asked - len(self._branches)),
            votes=strategy.votes(),
            scorer_tokens=plan.scorer.num_tokens if plan.scorer is not None else 0,
            failure=self._note_failure,
            models=self._spent() if plan.ask.is_chain else [],
        )

    @property
    def _num_own_tokens(self) -> int:
        return sum(branch.num_tokens for branch in self._own)

    def _report(self, *, at_once: bool = False) -> None:
        """Has the attempt note what is computed, where it has noted what was before."""
        num_tokens = self._num_own_tokens
        if num_tokens and (at_once or not self._has_news):
            self._has_news = True
            self._inbox.put_last(EngineOutput(0, [], withheld_tokens=num_tokens))


def _no_sample() -> MillraceError:
    return MillraceError(Reason.INTERNAL, "no sample has an answer; send the request again")
