"""How tokens are chosen, and what is reported about them."""

from __future__ import annotations

import msgspec


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of one request, complete: defaults of model and API are already applied."""

    # 0 is greedy decoding.
    temperature: float = 1.0
    # 0 keeps all tokens.
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    # 1 is off; applies to tokens of prompt and output.
    repetition_penalty: float = 1.0
    # Token id to additive bias.
    logit_bias: dict[int, float] = {}
    # Empty allows every token.
    allowed_token_ids: tuple[int, ...] = ()
    # The random stream of output position i is a pure function of (seed, choice index, i).
    seed: int = 0
    max_tokens: int = 16
    # Stop tokens are masked before this many output tokens.
    min_tokens: int = 0
    # Tokens that end the choice, the model's own end-of-sequence tokens included unless ignored.
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    n: int = 1
    best_of: int = 1
    # Number of alternatives reported per token; None reports nothing, 0 the sampled token alone.
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    # 0 samples; otherwise the number of beams.
    beam_width: int = 0

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature == 0.0


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probability (natural) of one token and of its most likely alternatives, best first."""

    token_id: int
    logprob: float
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()
