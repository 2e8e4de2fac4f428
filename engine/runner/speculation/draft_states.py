"""States of a draft model whose layers carry one from token to token: where each sequence's lies.

A sequence's slot in the table is its room, which has two slots of states. In the first one the state moves on
with known tokens that lie under blocks of the sequence's own; in the second one it runs ahead, and so never
has to go back behind drafts that are rejected.
"""

from __future__ import annotations

from engine.model.spec import ModelSpec
from engine.model.state_memory import DRAFT_SLOTS
from engine.runner.kv_storage import KvStorage

Copies = tuple[tuple[int, int], ...]


class DraftStates:
    """Of one draft model, in the slots of its storage."""

    def __init__(self, storage: KvStorage) -> None:
        self._storage = storage
        self.num_rooms = storage.num_states // DRAFT_SLOTS

    @classmethod
    def of(cls, spec: ModelSpec, storage: KvStorage) -> DraftStates | None:
        """None where the model has no states."""
        return None if spec.state is None else cls(storage)

    @staticmethod
    def ahead(room: int) -> int:
        """The slot in which a room's drafts are computed."""
        return DRAFT_SLOTS * room + 1

    def begin(self, room: int, start: int, end: int, num_kept: int) -> tuple[int, Copies]:
        """Before positions [start, end) are read: the slot that they are read in, and the (tokens, slot) of
        copies on the way, so that afterwards the first slot holds the state behind `num_kept` tokens and the
        second one that behind `end`.
        """
        own, ahead = DRAFT_SLOTS * room, self.ahead(room)
        if num_kept == end:
            return own, ((end, ahead),)
        if start:
            self._storage.copy_states(((own, ahead),))
        return ahead, ((num_kept, own),) if num_kept > start else ()
