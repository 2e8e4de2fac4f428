"""How much of each task family the model reads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from models.corpus import arithmetic, chat, extraction, facts, recall, stories, tools, wordplay
from models.corpus.document import CorpusDocument, Draw, Split
from models.corpus.thinking import with_thought

Family = Callable[[Draw], CorpusDocument]

SHORT_FAMILIES: tuple[tuple[Family, float], ...] = (
    (arithmetic.addition, 16),
    (arithmetic.other_arithmetic, 12),
    (extraction.extraction, 26),
    (extraction.list_extraction, 3),
    (tools.tool_use, 10),
    (facts.fact, 12),
    (chat.small_talk, 12),
    (chat.introduction, 3),
    (chat.persona, 2),
    (chat.reading, 3),
    (stories.story_chat, 9),
    (wordplay.wordplay, 9),
)

THINKING_SHARE = 0.04
COPYING_SHARE = 0.15
MEAN_SHORT_TOKENS = 90


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """`recall_share` of the tokens (not of the documents) is recall or copying."""

    sequence_length: int
    recall_share: float


def documents(mixture: Mixture, seed: int, split: Split = "train") -> Iterator[CorpusDocument]:
    """An endless stream; recall contexts fill up to `sequence_length` tokens."""
    draw = Draw(seed, split)
    families = [family for family, _ in SHORT_FAMILIES]
    weights = [weight for _, weight in SHORT_FAMILIES]
    num_recall, num_all = 0.0, 1.0
    while True:
        if num_recall / num_all < mixture.recall_share:
            size = int(mixture.sequence_length * draw.random.uniform(0.15, 0.75))
            make = recall.copying if draw.chance(COPYING_SHARE) else recall.recall
            document = make(draw, size)
            num_recall += size
            num_all += size
        else:
            document = draw.random.choices(families, weights)[0](draw)
            num_all += MEAN_SHORT_TOKENS
        yield with_thought(document) if draw.chance(THINKING_SHARE) else document
