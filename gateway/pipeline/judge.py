"""Finished answers whose schema is enforced in parts only are judged by the schema as it was sent."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable

from contract.errors import MillraceError
from contract.grammar import Verdict
from contract.outputs import FinishReason
from gateway.pipeline.delta import ChoiceDelta

_log = logging.getLogger(__name__)


class OutputJudge:
    """Collects the text of a request's choices; `judge` decides about one that is complete."""

    def __init__(self, judge: Callable[[str], Awaitable[Verdict]]) -> None:
        self._judge = judge
        self._texts: defaultdict[int, list[str]] = defaultdict(list)
        # Whether no complete answer has failed.
        self.all_valid = True

    async def see(self, deltas: Iterable[ChoiceDelta]) -> None:
        """Takes the next deltas, and writes a verdict into those that complete an answer.

        An answer that cannot be judged stays without a verdict: that is no reason to lose it.
        """
        for delta in deltas:
            self._texts[delta.index].append(delta.content)
            if delta.finish_reason is not FinishReason.STOP:
                continue
            try:
                delta.verdict = await self._judge("".join(self._texts.pop(delta.index)))
            except MillraceError as error:
                _log.warning("an answer could not be judged by its schema: %s", error.message)
            else:
                self.all_valid = self.all_valid and delta.verdict.valid
