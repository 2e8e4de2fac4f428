"""Decides what is proposed for each sequence's next step.

Tokens that a grammar forces come first (jump-forward: a JSON key is verified in one step, not sampled in
ten); then, where speculation is on and pays, prompt lookup or the draft model. All are verified alike, so
none of them can change what is generated.
"""

from __future__ import annotations

import time

from engine.config import SpeculationConfig
from engine.model.forward_batch import ForwardBatch
from engine.runner.kv_storage import KvStorage
from engine.runner.sequence_table import SequenceState, SequenceTable
from engine.runner.speculation.draft_model import DraftModel
from engine.runner.speculation.ngram import continuation

# Forced tokens that are verified in one step.
MAX_FORCED_TOKENS = 32
# Drafts after which a sequence's acceptance is judged.
TRIAL_DRAFTS = 24
# Weight of the latest measurement in the running cost of drafting.
SMOOTHING = 0.1


class Proposer:
    """Proposals for the sequences that sampled in a step."""

    def __init__(self, config: SpeculationConfig, draft_model: DraftModel | None = None) -> None:
        self.config = config
        self.draft_model = draft_model
        # Time of proposing for a step over the time of the target's forward; 0 until measured.
        self.relative_cost = 0.0

    def observe(self, batch: ForwardBatch, spare_slot: int) -> None:
        """Sees every step that the target computed."""
        if self.draft_model is not None:
            self.draft_model.observe(batch, spare_slot)

    def storages(self) -> list[KvStorage]:
        """Caches that follow the target's copies."""
        return [] if self.draft_model is None else [self.draft_model.storage]

    def propose(
        self, states: list[SequenceState], table: SequenceTable, forward_s: float
    ) -> list[tuple[int, ...]]:
        """Drafts after each sequence's last token; the target's forward took forward_s seconds."""
        proposals = [self._forced(state) for state in states]
        for state, forced in zip(states, proposals, strict=True):
            state.forced = bool(forced)
        open_places = [
            index
            for index, (state, forced) in enumerate(zip(states, proposals, strict=True))
            if not forced and self._pays(state)
        ]
        if not open_places or self.config.method == "off":
            return proposals
        chosen = [states[index] for index in open_places]
        if self.draft_model is not None:
            started = time.monotonic()
            found = self.draft_model.propose(chosen, table, self.config.num_draft_tokens)
            cost = (time.monotonic() - started) / max(forward_s, 1e-9)
            self.relative_cost += SMOOTHING * (cost - self.relative_cost) if self.relative_cost else cost
        else:
            found = [self._look_up(state, table) for state in chosen]
        for index, drafts in zip(open_places, found, strict=True):
            proposals[index] = drafts
        return proposals

    def judge(self, state: SequenceState, num_drafted: int, num_accepted: int) -> None:
        """Takes in how a sequence's drafts fared; forced tokens say nothing of speculation."""
        if not state.forced and num_drafted:
            state.num_rounds += 1
            state.num_drafted += num_drafted
            state.num_accepted += num_accepted

    def _forced(self, state: SequenceState) -> tuple[int, ...]:
        if state.matcher is None:
            return ()
        return tuple(state.matcher.forced()[:MAX_FORCED_TOKENS])

    def _pays(self, state: SequenceState) -> bool:
        """After a trial: enough drafts are accepted, and they gain more steps than proposing costs."""
        if state.sampling.beam_width:
            return False
        if not self.config.min_acceptance or state.num_drafted < TRIAL_DRAFTS:
            return True
        enough = state.num_accepted >= self.config.min_acceptance * state.num_drafted
        return enough and state.num_accepted >= self.relative_cost * state.num_rounds

    def _look_up(self, state: SequenceState, table: SequenceTable) -> tuple[int, ...]:
        tokens = table.tokens[state.slot, : int(table.num_tokens[state.slot])]
        drafts = continuation(
            tokens,
            longest=self.config.max_ngram,
            shortest=self.config.min_ngram,
            num_drafts=self.config.num_draft_tokens,
        )
        if state.matcher is not None and drafts:
            drafts = drafts[: state.matcher.valid_prefix(drafts)]
        return drafts
