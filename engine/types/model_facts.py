"""What the engine's front must know of the loaded model, found out at start-up."""

from __future__ import annotations

import math

import msgspec

from engine.types.step import UNKNOWN_WORK, ModelWork


class ModelFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Properties of the model as it was loaded."""

    # Longest prompt plus completion, in tokens.
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    # For example "bfloat16".
    dtype: str
    attention_backend: str
    # Instructions that the native kernels use, for example "avx2"; empty where others serve.
    level: str = ""
    # For example "cpu" or "cuda:0".
    device: str
    num_layers: int
    # Positions that any layer looks back on, the own included: what lies before is never read again. None
    # where some layer, or a draft model, looks at everything.
    window: int | None = None
    # Tasks of a model that pools; empty where it generates.
    tasks: tuple[str, ...] = ()
    # Whether prompts are computed in one step each, and whether blocks of one may serve another.
    whole_prompts: bool = False
    shares_prefixes: bool = True
    # Why no answer may forget keys and values; empty where it may.
    remembers_because: str = ""
    # Why nobody sees queries, by which it is told what that loses and chosen what stays; empty where they are
    # seen.
    unmeasured_because: str = ""
    # Why nothing foresees what will be looked at, as kvzap needs it; empty where something does.
    unscored_because: str = ""
    # Why there is no memory for the keys of what is forgotten, by which it is told; empty where there is.
    unplanned_because: str = ""
    # Elements of what it makes of a text; 0 where it generates.
    num_pooled: int = 0
    work: ModelWork = UNKNOWN_WORK
    # A token that looks back on so many positions is twice the work of one that looks back on none.
    attention_balance: float = math.inf
    # Where drafts come from: engine.speculation.method.
    drafter: str = "off"


class MeasuredSpeed(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine reached in its first steps, in tokens per second; 0 where nothing was measured."""

    # The rate of one prompt, of so many tokens; and that of a short one.
    prompt_tokens_per_s: float = 0.0
    prompt_tokens: int = 0
    short_prompt_tokens_per_s: float = 0.0
    short_prompt_tokens: int = 0
    # Output tokens per second of one answer, and of several together.
    tokens_per_s_alone: float = 0.0
    tokens_per_s_together: float = 0.0
    num_together: int = 0


NOT_MEASURED = MeasuredSpeed()
