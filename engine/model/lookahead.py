"""How much lookahead decoding (engine/runner/speculation/lookahead) computes beside a sequence, and which
models it goes with. No torch.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from engine.config import EngineConfig
from engine.model.spec import ModelSpec
from runtime.errors import ConfigError

# The method of speculation.
LOOKAHEAD = "lookahead"
# Sequences that have branches in the same step. With more of them a step has so many rows already that
# further ones take longer than they bring.
MOST_SEQUENCES = 8


class LookaheadShape(msgspec.Struct, frozen=True, kw_only=True):
    """The window's levels and columns, the n-grams that are verified, and who may look ahead."""

    num_levels: int
    num_columns: int
    num_candidates: int
    num_sequences: int
    # Scratch blocks of each sequence.
    num_blocks: int

    @classmethod
    def where_asked(cls, config: EngineConfig) -> LookaheadShape | None:
        """As the configuration says; None where its method is another."""
        return cls.of(config) if config.speculation.method == LOOKAHEAD else None

    @classmethod
    def of(cls, config: EngineConfig) -> LookaheadShape:
        """As the configuration says."""
        speculation, size = config.speculation, config.cache.block_size
        # A token more than the drafts behind it is an n-gram.
        levels, columns = speculation.num_draft_tokens, speculation.lookahead_window
        candidates = speculation.lookahead_candidates
        # The first level with its last column, the other columns, and n-grams beside the first.
        lens = [columns + levels - 1, *[levels - 1] * (columns - 1), *[levels] * (candidates - 1)]
        return cls(
            num_levels=levels,
            num_columns=columns,
            num_candidates=candidates,
            num_sequences=min(config.scheduler.max_num_seqs, MOST_SEQUENCES),
            num_blocks=num_blocks_of(lens, size),
        )

    @property
    def num_rows(self) -> int:
        """Rows of a sequence beside its last token and its drafts."""
        return self.num_levels * (self.num_columns + self.num_candidates - 1)

    @property
    def num_logit_rows(self) -> int:
        """Those of all sequences whose logits are wanted."""
        each = self.num_columns + self.num_levels * (self.num_candidates - 1)
        return self.num_sequences * each

    @property
    def num_branches(self) -> int:
        """Of all sequences."""
        return self.num_sequences * (self.num_columns + self.num_candidates - 1)

    @property
    def num_scratch_blocks(self) -> int:
        """Of all sequences."""
        return self.num_sequences * self.num_blocks


def num_blocks_of(lens: Iterable[int], block_size: int) -> int:
    """Scratch blocks of branches of such lengths, each of which may begin at the end of a block."""
    return sum(-(-(block_size - 1 + each) // block_size) for each in lens)


def check_lookahead(spec: ModelSpec, config: EngineConfig, device: str) -> None:
    """Raises ConfigError where there is no lookahead."""
    remedy = "set it to ngram, suffix or off"
    check_branches(f"engine.speculation.method = {LOOKAHEAD!r}", spec, device, remedy)
    if config.speculation.num_draft_tokens < 2:
        raise ConfigError(
            f"engine.speculation.num_draft_tokens = {config.speculation.num_draft_tokens}: n-grams of "
            "lookahead have one token more, and at least three; raise it to 2"
        )


def check_branches(field: str, spec: ModelSpec, device: str, remedy: str) -> None:
    """Raises ConfigError where texts have no branches; `field` asks for some."""
    if device != "cpu":
        raise ConfigError(
            f"{field}: branches of a text are computed on CPUs alone, and engine.device is {device}; "
            f"{remedy}, or engine.device to cpu"
        )
    for is_so, why in (
        (spec.state is not None, "has layers that carry a state, which cannot go on in several branches"),
        (spec.pooling is not None, "pools what it reads, and draws no tokens"),
        (spec.bidirectional, "sees what is ahead, and draws no tokens"),
        (
            bool(spec.sliding_layers),
            "has layers with a window among others, whose blocks branches cannot share",
        ),
    ):
        if is_so:
            raise ConfigError(f"{field}: {spec.architecture} {why}; {remedy}")
