"""The synthetic corpus: task families, and how much of each the model reads at each sequence length."""

from models.corpus.document import CorpusDocument, Draw, is_held_out
from models.corpus.mixture import Mixture, documents

__all__ = ["CorpusDocument", "Draw", "Mixture", "documents", "is_held_out"]
