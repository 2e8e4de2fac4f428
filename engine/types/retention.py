"""Which blocks the positions of an answer look at that may forget some, in numbers of blocks.

A prompt is computed whole: its positions look at everything before them. Under `window+sinks` a position of
the answer looks at the first block, whose tokens take what attention has to spare (sinks, arXiv 2309.17453),
and at the last ones, its own among them. Under policies that choose, it looks at blocks into which tokens of
the prompt were copied when that was computed, and at everything behind these. Both are functions of the
position and the prompt alone, so an answer is the same however it was cut into steps, preempted or continued
elsewhere; and keys stay where they were rotated to.

Under `window+sinks` an answer may be longer than the model has positions. Where these end, it goes on as an
answer to its first block of tokens and its last ones, which are computed as a prompt is, at the first
positions (`Renewal`). How often it has done so follows from the number of its tokens.
StreamingLLM (arXiv 2309.17453) turns keys to their places in the cache in every step, and llama.cpp when its
context is full. That needs kernels for every form of keys, which rounds some twice, and rotated positions;
and it rests on what was computed from tokens that are gone, so who takes up a stream elsewhere would compute
all of it. Computing anew costs at most one token for each that is drawn, and a pause.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from contract.retention import CHOOSING, Retention

_NUM_SINKS = 1
# The one that is written to, and one that is whole.
_LEAST_RECENT = 2
# Of an answer that is measured: blocks whose keys stay in eight bits, and boxes around those of earlier ones,
# none of which is larger than such a block (engine/runner/forgotten/keys).
MOST_WHOLE_BLOCKS = 512
MOST_BOXES = 256
# Blocks that two steps may take before the first of them gives any back.
_IN_FLIGHT = 2
# Behind every position.
_NEVER = 2**62
# Under snapkv the last tokens of a prompt, whose queries vote and which stay (the paper's window).
NUM_SNAPKV_VOTERS = 32
# Under kvzap the last tokens of a prompt, which stay (the paper's window).
_NUM_KVZAP_LAST = 128
_LAST = {"snapkv": NUM_SNAPKV_VOTERS, "kvzap": _NUM_KVZAP_LAST}


class KeptBlocks(msgspec.Struct, frozen=True, array_like=True):
    """Of one sequence. The first `num_sinks` and the last `num_recent` blocks, from position `start` on."""

    num_sinks: int
    num_recent: int
    # Before it nothing is hidden: behind the prompt, and where more blocks are there than are kept.
    start: int
    block_size: int
    # Whether it is said what that loses.
    is_measured: bool = False
    # Of the model, where the answer goes on beyond them; else 0.
    num_positions: int = 0
    # Whether it has done so: then its first blocks, too, are nobody else's.
    is_renewed: bool = False

    @staticmethod
    def of(
        asked: Retention | None, num_prompt_tokens: int, block_size: int, num_positions: int = 0
    ) -> KeptBlocks | None:
        """What a request's prompt makes of what it asks for; None where nothing is ever forgotten. With
        `num_positions` the answer goes on beyond so many.
        """
        if asked is None or not asked.forgets:
            return None
        if asked.policy in CHOOSING:
            return ChosenTokens.of_prompt(asked, num_prompt_tokens, block_size)
        num_blocks = -(-asked.tokens_of(num_prompt_tokens) // block_size)
        if num_positions:
            num_blocks = min(num_blocks, -(-num_positions // block_size))
        num_recent = max(_LEAST_RECENT, num_blocks - _NUM_SINKS)
        start = max(num_prompt_tokens, (_NUM_SINKS + num_recent) * block_size)
        is_measured = asked.max_lost is not None
        return KeptBlocks(_NUM_SINKS, num_recent, start, block_size, is_measured, num_positions)

    @staticmethod
    def can_renew(num_positions: int, block_size: int) -> bool:
        """Whether a model has positions for what an answer goes on with at least, and for more."""
        return num_positions > (_NUM_SINKS + _LEAST_RECENT) * block_size

    def renewal(self, num_tokens: int) -> Renewal | None:
        """Where a sequence of so many tokens, prompt included, goes on beyond the model's positions; None
        where it does not yet.

        It takes as much along as it looks at, but no more than half of the positions, so that no more tokens
        are computed again than are drawn; three blocks at least.
        """
        if not self.num_positions or num_tokens < self.num_positions:
            return None
        most = max(_NUM_SINKS + _LEAST_RECENT, self.num_positions // 2 // self.block_size)
        num_carried = min(self.num_sinks + self.num_recent, most) * self.block_size
        num_new = self.num_positions - num_carried
        times = 1 + (num_tokens - self.num_positions) // num_new
        return Renewal(self.num_sinks * self.block_size, num_carried, times * num_new)

    def renewed(self, *, again: bool) -> KeptBlocks:
        """What is kept behind a renewal; `again` says whether another one comes."""
        start = (self.num_sinks + self.num_recent) * self.block_size
        num_positions = self.num_positions if again else 0
        return msgspec.structs.replace(self, start=start, num_positions=num_positions, is_renewed=True)

    @property
    def first_voter(self) -> int:
        """The first position of the prompt whose queries vote for what stays: it and those behind it are
        computed, whatever is cached.
        """
        return _NEVER

    @property
    def num_fresh(self) -> int:
        """Blocks that a sequence has beside its table until its prompt is computed."""
        return 0

    def num_hidden(self, position: int) -> int:
        """Blocks behind the sinks that a position does not look at."""
        if position < self.start:
            return 0
        return position // self.block_size + 1 - self.num_recent - self.num_sinks

    def num_measured(self, num_tokens: int) -> int:
        """Forgotten blocks of a sequence of so many tokens of which keys stay, at most."""
        if not self.is_measured:
            return 0
        return min(max(0, self.num_hidden(num_tokens - 1)), MOST_WHOLE_BLOCKS + MOST_BOXES)

    def first_recent(self, position: int) -> int:
        """The first block behind those."""
        return self.num_sinks + self.num_hidden(position)

    def alike_until(self, position: int) -> int:
        """Where the positions end that look at the same blocks as this one, those behind it left out."""
        if position < self.start:
            return self.start
        return (position // self.block_size + 1) * self.block_size

    @property
    def moves_on(self) -> bool:
        """Whether each block that it begins behind `start` hides another one."""
        return True

    @property
    def first_own(self) -> int:
        """The first block that no other sequence ever has: what comes before was computed like any prompt."""
        return 0 if self.is_renewed else self.start // self.block_size

    @property
    def _most_renewed(self) -> int:
        """Blocks that a sequence holds at most behind a renewal, all of them its own."""
        most = self.num_sinks + self.num_recent + _IN_FLIGHT
        return min(most, -(-self.num_positions // self.block_size)) if self.num_positions else most

    def most_blocks(self, num_tokens: int) -> int:
        """Blocks that a sequence of so many tokens takes before any is sure to come free: those of its prompt
        may be others' as well. Of one that goes on beyond the model's positions, up to these.
        """
        whole, first = -(-num_tokens // self.block_size), -(-self.start // self.block_size)
        if self.is_renewed:
            return min(whole, self._most_renewed)
        if self.num_positions:
            return min(whole, first) + self._most_renewed
        return min(whole, first + self.num_recent + _IN_FLIGHT)

    def num_to_come(self, num_blocks: int, num_own: int, num_tokens: int) -> int:
        """Blocks that a sequence may still come to need that has a table of `num_blocks`, of which it holds
        `num_own` from `first_own` on, and ends with `num_tokens`, or goes on there. Others may hold those
        before.
        """
        whole, first = -(-num_tokens // self.block_size), -(-self.start // self.block_size)
        growth = max(0, whole - num_blocks)
        if self.is_renewed or self.num_positions:
            before = 0 if self.is_renewed else max(0, min(whole, first) - num_blocks)
            left = max(0, self._most_renewed - num_own)
            return before + (left if self.num_positions else min(growth, left))
        until_start = max(0, first - num_blocks)
        return min(growth, until_start + max(0, self.num_recent + _IN_FLIGHT - num_own))


class Renewal(NamedTuple):
    """What a sequence looks back on that has gone on beyond the model's positions: of its tokens the first
    `num_sinks` and those behind the next `num_left`; the first `num_prompt` of them are computed as a prompt.
    """

    num_sinks: int
    num_prompt: int
    num_left: int


class ChosenTokens(KeptBlocks, frozen=True, array_like=True):
    """Of one sequence whose prompt's tokens are chosen, other ones in each layer and kv head, but as many.

    Of the prompt's whole blocks, `num_sinks` blocks of tokens are copied into as many fresh blocks, which
    come first in the table from then on. What lies behind the prompt's whole blocks stays.
    """

    policy: str = ""

    @staticmethod
    def of_prompt(asked: Retention, num_prompt_tokens: int, block_size: int) -> ChosenTokens | None:
        """See `of`."""
        num_whole, num_tail = divmod(num_prompt_tokens, block_size)
        least = max((_NUM_SINKS + _LEAST_RECENT) * block_size, _LAST.get(asked.policy, 0))
        num_chosen = max(0, max(least, asked.tokens_of(num_prompt_tokens)) - num_tail)
        num_blocks = -(-num_chosen // block_size)
        if num_blocks >= num_whole:
            return None
        is_measured = asked.max_lost is not None
        return ChosenTokens(num_blocks, 1, num_prompt_tokens, block_size, is_measured, policy=asked.policy)

    @property
    def moves_on(self) -> bool:
        """See KeptBlocks: what is chosen once stays."""
        return False

    @property
    def num_whole(self) -> int:
        """Whole blocks of the prompt, of which tokens are chosen."""
        return self.start // self.block_size

    @property
    def num_last(self) -> int:
        """Last tokens of the prompt that stay, chosen or not; half of what is kept under h2o."""
        if self.policy in _LAST:
            return _LAST[self.policy]
        return (self.num_sinks * self.block_size + self.start % self.block_size) // 2

    @property
    def first_voter(self) -> int:
        """See KeptBlocks: all queries of the prompt vote under h2o, all states are read under kvzap."""
        return self.start - NUM_SNAPKV_VOTERS if self.policy == "snapkv" else 0

    @property
    def num_fresh(self) -> int:
        """See KeptBlocks."""
        return self.num_sinks

    def num_hidden(self, position: int) -> int:
        """See KeptBlocks."""
        return 0 if position < self.start else self.num_whole - self.num_sinks

    def alike_until(self, position: int) -> int:
        """See KeptBlocks."""
        return self.start if position < self.start else _NEVER

    def most_blocks(self, num_tokens: int) -> int:
        """See KeptBlocks. Nothing of the prompt is sure to come free, since it may be others' as well."""
        return -(-num_tokens // self.block_size) + self.num_fresh

    def num_to_come(self, num_blocks: int, num_own: int, num_tokens: int) -> int:
        """See KeptBlocks; its fresh blocks it has from the beginning."""
        return max(0, -(-num_tokens // self.block_size) - num_blocks)
