"""Memory that a rank takes only because there are others, for the plan. No torch."""

from __future__ import annotations

from engine.model.spec import ModelSpec
from kernels.ranks.native import PIECE_BYTES
from kernels.ranks.shares import Degrees


def shared_bytes(spec: ModelSpec, degrees: Degrees, num_tokens: int, num_rows: int) -> int:
    """A rank's part of the memory that ranks share, of steps of so many tokens and rows of logits: parts of
    sums, what experts gave, and its logits. `spec` is the rank's.
    """
    # And what a stage sends.
    sums = (3 if degrees.pipeline > 1 else 2) * num_tokens * spec.hidden_size
    if spec.experts is not None:
        width = spec.experts.latent_size or spec.hidden_size
        sums += 2 * num_tokens * spec.experts.num_active * width // degrees.expert
    return 4 * (sums + num_rows * spec.vocab_size // degrees.size)


def moving_bytes(spec: ModelSpec, degrees: Degrees, bytes_each: float) -> int:
    """Room for one more expert, and for pieces of one that leaves, where experts change ranks; a weight takes
    so many bytes on average.
    """
    experts = spec.experts
    if experts is None or degrees.expert == 1:
        return 0
    width = experts.latent_size or spec.hidden_size
    num_weights = (3 if spec.gated else 2) * width * experts.intermediate_size
    return int(num_weights * bytes_each) + 2 * PIECE_BYTES
