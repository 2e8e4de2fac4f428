"""Args of the native look-up of embeddings (embedding.h)."""

from __future__ import annotations

from kernels.native.mirror import structure

# Name of a table's type to its number in embedding.h.
TABLE_TYPES = {"float32": 0, "bfloat16": 1, "float16": 2}
EmbeddingArgs = structure("EmbeddingArgs")
