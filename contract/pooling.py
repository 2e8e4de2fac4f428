"""What is asked of a model that pools what it reads, and what its checkpoint says of itself."""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

Task: TypeAlias = Literal["embed", "score", "classify"]
GENERATE = "generate"
"""The task of every other model."""


class PoolingParams(msgspec.Struct, frozen=True, kw_only=True):
    """One request's: its prompt is all that is computed, and numbers are the answer."""

    task: Task = "embed"
    # Leading elements of an embedding that are wanted; 0 is all.
    dimensions: int = 0
    # Position at which the second text of a pair begins, to models that tell them apart; 0: there is none.
    second_start: int = 0


class PooledModel(msgspec.Struct, frozen=True, kw_only=True):
    """What those who ask a model that pools must know of it."""

    tasks: tuple[Task, ...]
    # Elements of an embedding.
    num_dimensions: int = 0
    # Whether fewer may be asked for, and which numbers of them; empty: any.
    has_fewer_dimensions: bool = False
    dimensions: tuple[int, ...] = ()
    # Longest text in tokens, by the checkpoint's own word, 0 where it says nothing; and whether a longer
    # one is
    # cut unless the request says otherwise.
    max_tokens: int = 0
    truncates: bool = False
    # Instructions that texts begin with, by name; and the name of the one that is used where none is named.
    prompts: dict[str, str] = {}
    default_prompt: str = ""
    # Of a classifier, by index.
    labels: tuple[str, ...] = ()

    def check_dimensions(self, asked: int) -> str:
        """What is wrong with so many elements; empty where they can be had, 0 being all."""
        if not asked or asked == self.num_dimensions:
            return ""
        if not self.has_fewer_dimensions:
            return (
                f"{asked} were asked for, and the model's embeddings have {self.num_dimensions}: "
                "it is not made for fewer (config.json names no matryoshka_dimensions); leave it out"
            )
        if self.dimensions and asked not in self.dimensions:
            return (
                f"{asked} is none of those that the model is made for: {', '.join(map(str, self.dimensions))}"
            )
        if not 1 <= asked <= self.num_dimensions:
            return f"{asked} is not from 1 to {self.num_dimensions}"
        return ""
