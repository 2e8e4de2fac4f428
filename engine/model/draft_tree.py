"""A tree of drafts of a fixed shape (Medusa, arXiv 2401.10774; EAGLE, arXiv 2401.15077): which drafts are
verified beside the likeliest ones, and which models that goes with. No torch.

A draft's path are ranks: of each token on the way from a text's last one among what is likeliest behind the
tokens before it, counted from 0. What makes the drafts is in engine/runner/speculation/tree.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from engine.config import EngineConfig
from engine.model.lookahead import MOST_SEQUENCES, LookaheadShape, check_branches, num_blocks_of
from engine.model.spec import ModelSpec
from engine.speculation_config import MOST_DRAFTS
from runtime.errors import ConfigError

KEY = "engine.speculation.tree"
# The parent of a branch that leaves the likeliest drafts.
LIKELIEST = -1


class TreeBranch(msgspec.Struct, frozen=True, kw_only=True):
    """Drafts that leave the likeliest ones, or those of an earlier branch: the first one is of this rank, and
    each further one the likeliest.
    """

    parent: int
    # Drafts that are its parent's.
    num_shared: int
    rank: int
    num_drafts: int


class DraftTree(msgspec.Struct, frozen=True, kw_only=True):
    """The branches beside the likeliest drafts, each behind its parent."""

    branches: tuple[TreeBranch, ...]
    # Sequences whose drafts are trees, and the scratch blocks of each.
    num_sequences: int
    num_blocks: int

    @classmethod
    def where_asked(cls, config: EngineConfig) -> DraftTree | None:
        """As the configuration says; None where drafts are chains."""
        return cls.of(config) if config.speculation.tree else None

    @classmethod
    def of(cls, config: EngineConfig) -> DraftTree:
        """The tree that has the configuration's paths."""
        nodes = _closed(config.speculation.tree, config.speculation.num_draft_tokens)
        # By the path of the first draft; its parent's is shorter.
        numbers = {path: number for number, path in enumerate(_firsts(nodes))}
        branches = []
        for path in numbers:
            before = path[:-1]
            while before and not before[-1]:
                before = before[:-1]
            ends = range(len(path), config.speculation.num_draft_tokens + 1)
            branches.append(
                TreeBranch(
                    parent=numbers[before] if before else LIKELIEST,
                    num_shared=len(path) - 1,
                    rank=path[-1],
                    num_drafts=sum((*path, *[0] * (end - len(path))) in nodes for end in ends),
                )
            )
        return cls(
            branches=tuple(branches),
            num_sequences=min(config.scheduler.max_num_seqs, MOST_SEQUENCES),
            num_blocks=num_blocks_of([each.num_drafts for each in branches], config.cache.block_size),
        )

    @property
    def rows_beside(self) -> list[int]:
        """By depth: drafts beside the likeliest."""
        depths = [each.num_shared + further for each in self.branches for further in range(each.num_drafts)]
        return [depths.count(depth) for depth in range(max(depths, default=-1) + 1)]

    @property
    def num_branches(self) -> int:
        """Of all sequences."""
        return self.num_sequences * len(self.branches)

    @property
    def num_logit_rows(self) -> int:
        """Rows of all sequences beside the likeliest drafts."""
        return self.num_sequences * sum(self.rows_beside)

    @property
    def num_scratch_blocks(self) -> int:
        """Of all sequences."""
        return self.num_sequences * self.num_blocks


def branch_shape(config: EngineConfig) -> LookaheadShape | DraftTree | None:
    """What is computed in branches of texts; None where nothing is."""
    return LookaheadShape.where_asked(config) or DraftTree.where_asked(config)


def check_tree(spec: ModelSpec, config: EngineConfig, device: str) -> None:
    """Raises ConfigError where drafts cannot be a tree, or not this one. (The configuration has refused what
    is no tree, and methods that make none.)
    """
    check_branches(KEY, spec, device, "leave it empty")
    paths, most = config.speculation.tree, config.speculation.num_draft_tokens
    if max(map(max, paths)) >= MOST_DRAFTS or len(_closed(paths, most)) > MOST_DRAFTS:
        raise ConfigError(
            f"{KEY} has more than {MOST_DRAFTS} drafts, with those that belong to its paths; shorten it"
        )


def _closed(paths: Iterable[tuple[int, ...]], num_likeliest: int) -> set[tuple[int, ...]]:
    """All drafts of a tree: those of its paths, what is likelier than any of them behind the same drafts, and
    the likeliest ones.
    """
    nodes = {(0,) * (depth + 1) for depth in range(num_likeliest)}
    for path in paths:
        for depth, rank in enumerate(path):
            nodes |= {(*path[:depth], each) for each in range(rank + 1)}
    return nodes


def _firsts(nodes: Iterable[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Where branches begin: shorter paths first, so that a parent stands before its children."""
    return sorted((path for path in nodes if path[-1]), key=lambda path: (len(path), path))
