"""best_of: more choices are generated than returned, and the most likely ones win.

Nothing can be streamed before the last choice has ended, so events are kept here until then.
"""

from __future__ import annotations

import msgspec

from engine.types import FinishReason, TokenEvent

# Reasons to end a request that nobody takes answers of any more.
_ENDED_EARLY = frozenset({FinishReason.CANCELLED, FinishReason.DEADLINE})


class BestOf:
    """Collects the events of all choices of one request."""

    def __init__(self, num_returned: int, first_index: int) -> None:
        self._num_returned = num_returned
        self._first_index = first_index
        self._events: dict[int, list[TokenEvent]] = {}
        self.num_tokens = 0

    def take(self, event: TokenEvent) -> None:
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
