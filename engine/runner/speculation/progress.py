"""What is remembered of one sequence's drafts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(kw_only=True)
class DraftProgress:
    """How its drafts fared, and how far the draft model has read."""

    # Drafts that were decided: all that were accepted, and the first of each round that was not.
    num_tried: int = 0
    num_accepted: int = 0
    # Prompt look-ups, and those that found something.
    num_lookups: int = 0
    num_found: int = 0
    # The latest proposal was forced by the grammar, and says nothing of speculation.
    forced: bool = False
    # Leading tokens whose keys and values the draft model has under the sequence's own blocks.
    num_read: int = 0
    # Tokens that it would have to read first.
    num_unread: int = 0
    # Tokens that were known when the latest drafts were made, and the place up to which blocks were its own.
    num_known: int = 0
    num_owned: int = 0
    num_proposed: int = 0

    def verified(self, num_drafted: int, num_accepted: int) -> None:
        """Takes in how the latest drafts fared."""
        self.num_accepted += num_accepted
        self.num_tried += num_accepted + (num_accepted < num_drafted)
        # The draft model has read every draft but its last; what lies in scratch blocks is lost.
        read = self.num_known + min(num_accepted, self.num_proposed - 1)
        self.num_read = max(self.num_read, min(read, self.num_owned))
