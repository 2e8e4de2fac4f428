"""Models that pool equal transformers, and sentence-transformers' formulas, in float32 through the real
runner.
"""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from contract.pooling import PoolingParams
from engine.config import SchedulerConfig
from engine.model.families import read_spec
from engine.runner.runner import ModelRunner
from kernels.native.library import NativeUnavailableError, load_native
from runtime.errors import ConfigError
from tests.unit.engine.checkpoints import edit_config
from tests.unit.engine.pooled_checkpoints import cosine, pool, pooled_checkpoint, reference_embedding
from tests.unit.engine.runner.driver import open_runner, prompt_of

CLOSE = 1 - 1e-6
# Lengths around blocks, tiles and parts of the history.
LENGTHS = (1, 3, 16, 17, 40, 129, 250)
IDS = {"eos_token_id": 2, "bos_token_id": 2, "cls_token_id": 2, "sep_token_id": 2}
LOCAL = {"local_attention": 20, "num_hidden_layers": 4, "global_attn_every_n_layers": 3, **IDS}
# Name to a model type, how it pools, and changes to its configuration.
SHAPES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bert-mean": ("bert", "mean", {"type_vocab_size": 2}),
    "bge-cls": ("bert", "cls", {"num_hidden_layers": 3}),
    "roberta": ("roberta", "mean", {"max_position_embeddings": 260}),
    "xlm-roberta": ("xlm-roberta", "mean", {"max_position_embeddings": 260, "type_vocab_size": 1}),
    "modernbert": ("modernbert", "cls", LOCAL),
    "nomic": ("nomic_bert", "mean", {}),
    "gte": ("gte", "cls", {}),
    "qwen3-last": ("qwen3", "last", {"head_dim": 12}),
    "mistral-mean": ("mistral", "mean", {"sliding_window": None}),
    "llama-weighted": ("llama", "weighted", {}),
    "llama-max": ("llama", "max", {}),
}
BACK_ENDS = ["off"]
try:
    load_native()
    BACK_ENDS.append("required")
except NativeUnavailableError:
    pass


def texts_of(vocab_size: int = 199, lengths: tuple[int, ...] = LENGTHS) -> list[list[int]]:
    # Ids of padding mean something of their own to RoBERTa's positions.
    return [[max(3, each) for each in prompt_of(length, vocab_size, seed=length)] for length in lengths]


def opened(folder: Path, native: str, **options: Any) -> ModelRunner:
    return open_runner(folder, native=native, kv_cache_bytes=0, **options)


@pytest.mark.parametrize("native", BACK_ENDS)
@pytest.mark.parametrize("name", SHAPES)
def test_embeddings_equal_those_of_sentence_transformers(tmp_path: Path, name: str, native: str) -> None:
    model_type, pooling, changes = SHAPES[name]
    model = pooled_checkpoint(tmp_path, model_type, pooling=pooling, **changes)
    texts = texts_of()
    with closing(opened(tmp_path, native)) as runner:
        found = pool(runner, texts)
    for text, embedding in zip(texts, found, strict=True):
        expected = reference_embedding(model, text, pooling)
        assert cosine(embedding, expected) >= CLOSE, len(text)
        np.testing.assert_allclose(np.linalg.norm(embedding), 1.0, rtol=1e-6)


@pytest.mark.parametrize("native", BACK_ENDS)
@pytest.mark.parametrize("name", ["bert-mean", "modernbert", "qwen3-last", "llama-weighted"])
def test_a_text_gets_the_same_alone_and_among_others(tmp_path: Path, name: str, native: str) -> None:
    model_type, pooling, changes = SHAPES[name]
    pooled_checkpoint(tmp_path, model_type, pooling=pooling, **changes)
    texts = texts_of()
    with closing(opened(tmp_path, native)) as runner:
        together = pool(runner, texts, seed=1)
        alone = [pool(runner, [text], seed=2)[0] for text in texts]
    for one, other in zip(together, alone, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("name", ["qwen3-last", "mistral-mean", "llama-weighted", "llama-max"])
def test_a_decoders_text_may_come_in_chunks(tmp_path: Path, name: str) -> None:
    model_type, pooling, changes = SHAPES[name]
    model = pooled_checkpoint(tmp_path, model_type, pooling=pooling, **changes)
    texts = texts_of()
    with closing(opened(tmp_path, BACK_ENDS[-1])) as runner:
        found = pool(runner, texts, chunk=19)
    for text, embedding in zip(texts, found, strict=True):
        assert cosine(embedding, reference_embedding(model, text, pooling)) >= CLOSE


def test_dense_modules_follow_the_pooling_and_fewer_dimensions_are_its_beginning(tmp_path: Path) -> None:
    model = pooled_checkpoint(tmp_path, "bert", pooling="mean", dense=32)
    texts = texts_of()
    with closing(opened(tmp_path, BACK_ENDS[-1])) as runner:
        whole = pool(runner, texts)
        fewer = pool(runner, texts, pooling=[PoolingParams(dimensions=8)] * len(texts))
    for text, embedding, short in zip(texts, whole, fewer, strict=True):
        expected = reference_embedding(model, text, "mean", folder=tmp_path)
        assert embedding.shape == (32,)
        assert cosine(embedding, expected) >= CLOSE
        np.testing.assert_allclose(short, expected[:8] / np.linalg.norm(expected[:8]), atol=1e-5)


CLASSIFIERS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("bert", {"type_vocab_size": 2}),
    "xlm-roberta": ("xlm-roberta", {"max_position_embeddings": 260, "type_vocab_size": 1}),
    "modernbert-mean": ("modernbert", LOCAL | {"classifier_pooling": "mean"}),
    "qwen3": ("qwen3", {"head_dim": 12, "pad_token_id": 0}),
}


@pytest.mark.parametrize("native", BACK_ENDS)
@pytest.mark.parametrize("num_labels", [1, 3])
@pytest.mark.parametrize("name", CLASSIFIERS)
def test_classifiers_equal_transformers(tmp_path: Path, name: str, num_labels: int, native: str) -> None:
    model_type, changes = CLASSIFIERS[name]
    auto = transformers.AutoModelForSequenceClassification
    model = pooled_checkpoint(tmp_path, model_type, auto=auto, num_labels=num_labels, **changes)
    texts = texts_of(lengths=(5, 40, 200))
    # The second text of a pair begins somewhere inside.
    seconds = [2, 17, 130] if model_type == "bert" else [0, 0, 0]
    asked = [PoolingParams(task="classify", second_start=second) for second in seconds]
    with closing(opened(tmp_path, native)) as runner:
        found = pool(runner, texts, pooling=asked)
    for text, second, probabilities in zip(texts, seconds, found, strict=True):
        given: dict[str, Any] = {"input_ids": torch.tensor([text])}
        if second:
            given["token_type_ids"] = (torch.arange(len(text)) >= second).long()[None]
        with torch.no_grad():
            logits = model(**given).logits[0]
        expected = torch.sigmoid(logits) if num_labels == 1 else torch.softmax(logits, -1)
        # On processors with tiles numbers keep 16 bits in products.
        np.testing.assert_allclose(probabilities, expected.numpy(), atol=2e-6 if native == "off" else 3e-5)


@pytest.mark.parametrize(
    ("file", "change", "told"),
    [
        ("modules.json", {"type": "sentence_transformers.models.LayerNorm"}, "module 2 of type"),
        ("1_Pooling/config.json", {"pooling_mode_cls_token": True}, "exactly one of"),
        ("1_Pooling/config.json", {"include_prompt": False}, "include_prompt"),
        ("1_Pooling/config.json", {"word_embedding_dimension": 7}, "hidden size is 48"),
    ],
)
def test_files_that_say_what_is_not_computed_are_refused_by_name(
    tmp_path: Path, file: str, change: dict[str, Any], told: str
) -> None:
    pooled_checkpoint(tmp_path, "bert", pooling="mean")
    path = tmp_path / file
    values = json.loads(path.read_text())
    (values[2] if isinstance(values, list) else values).update(change)
    path.write_text(json.dumps(values))
    with pytest.raises(ConfigError, match=told):
        read_spec(tmp_path)


def test_an_encoder_is_planned_without_a_cache_and_its_window_is_a_step(tmp_path: Path) -> None:
    pooled_checkpoint(tmp_path, "bert", pooling="mean")
    with closing(
        opened(tmp_path, BACK_ENDS[-1], scheduler=SchedulerConfig(max_num_batched_tokens=64))
    ) as runner:
        assert runner.model.max_model_len == 64
        # Layers write to one place.
        assert len({id(layer) for layer in runner.storage.layers}) == 1
    with pytest.raises(ConfigError, match="reads a text in one step"):
        opened(tmp_path, "off", max_model_len=128, scheduler=SchedulerConfig(max_num_batched_tokens=64))


def test_fewer_dimensions_are_for_models_made_for_them(tmp_path: Path) -> None:
    pooled_checkpoint(tmp_path, "bert", pooling="mean")
    plain = read_spec(tmp_path).pooling
    assert plain is not None
    assert "not made for" in plain.asked.check_dimensions(8)
    edit_config(tmp_path, matryoshka_dimensions=[8, 16])
    made = read_spec(tmp_path).pooling
    assert made is not None
    assert not made.asked.check_dimensions(8)
    assert "8, 16" in made.asked.check_dimensions(9)
