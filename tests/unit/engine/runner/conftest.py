"""What tests share: a small model; for those of speculation, made once, one of a few layers and its words."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest
import transformers

from services.drafter.lessons import Lesson
from tests.unit.engine.checkpoints import make_checkpoint
from tests.unit.engine.runner.drafting import HEAD_DIM, NUM_LAYERS, learned_by_heart, lessons_of
from tests.unit.engine.runner.ranked import no_rank_stays, packed_parts, parts_are_kept

__all__ = ["no_rank_stays", "packed_parts", "parts_are_kept"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a small model, which `oracle` writes."""
    return tmp_path_factory.mktemp("llama")


@pytest.fixture(scope="module")
def oracle(folder: Path) -> transformers.PreTrainedModel:
    """The model as transformers has it, each module's own, because some change how it attends."""
    return make_checkpoint(folder, "llama")


@pytest.fixture(scope="session")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the model that drafts are for; see `target_oracle`, which writes it."""
    return tmp_path_factory.mktemp("target")


@pytest.fixture(scope="session")
def target_oracle(target_folder: Path) -> transformers.PreTrainedModel:
    return make_checkpoint(target_folder, "llama", num_hidden_layers=NUM_LAYERS, head_dim=HEAD_DIM)


@pytest.fixture(scope="session")
def lessons(target_oracle: transformers.PreTrainedModel) -> list[Lesson]:
    return lessons_of(target_oracle)


@pytest.fixture(scope="session")
def trained_head(
    target_folder: Path, lessons: list[Lesson], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Path]:
    """The head of a method that has learned the lessons, and draws so many ids (0 is all)."""

    @functools.cache
    def train(method: str, draft_vocab: int = 0) -> Path:
        out = tmp_path_factory.mktemp("head")
        return learned_by_heart(target_folder, lessons, out, draft_vocab=draft_vocab, method=method)

    return train
