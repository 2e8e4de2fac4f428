"""What the engine's front must know of the loaded model, found out by the runner at start-up."""

from __future__ import annotations

import msgspec


class ModelFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Properties of the model as it was loaded."""

    # Longest prompt plus completion, in tokens.
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    # For example "bfloat16".
    dtype: str
    attention_backend: str
    # For example "cpu" or "cuda:0".
    device: str
    num_layers: int
    # Positions that any layer looks back on, the own included: what lies before is never read again. None
    # where some layer, or a draft model, looks at everything.
    window: int | None = None
