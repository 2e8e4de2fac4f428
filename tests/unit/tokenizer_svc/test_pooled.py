"""Texts for models that pool: pairs, and what is cut of a long one, as `tokenizers` does it."""

from __future__ import annotations

from typing import Any

import pytest
from millrace.tokenizer.v1 import tokenizer_pb2
from tokenizers import Tokenizer

from contract.errors import MillraceError
from contract.vocabulary import DecoderKind
from tests.unit.engine.pooled_checkpoints import pooled_checkpoint
from tests.unit.tokenizer_svc.pooled import write_word_pieces
from tokenizer_svc.config import PromptLimitsConfig
from tokenizer_svc.grammar.request import PromptRequest
from tokenizer_svc.messages.wire import large, vocabulary_response
from tokenizer_svc.prompt.limits import is_large
from tokenizer_svc.prompt.prompts import Prompts
from tokenizer_svc.text.checkpoint import Checkpoint, load_checkpoint
from tokenizer_svc.types import LengthLimit, Truncation

LONG, LONGER = "the cold wind from the sea", "who sells red and blue and green fish there"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, Checkpoint, Prompts]:
    folder = tmp_path_factory.mktemp("bert")
    pooled_checkpoint(folder, "bert", pooling="mean", matryoshka_dimensions=[8])
    found = write_word_pieces(folder, truncates_at=32)
    checkpoint = load_checkpoint(folder)
    return found, checkpoint, Prompts(checkpoint, PromptLimitsConfig(), turn_cache_tokens=0)


def pairs(*texts: tuple[str, str | None]) -> tokenizer_pb2.PrepareRequest:
    """A request for these texts, and for the second ones of pairs."""
    each: list[Any] = [{"text": text, "pair": pair} for text, pair in texts]
    return tokenizer_pb2.PrepareRequest(texts={"texts": each})  # type: ignore[arg-type]


def asked(most: int | None = None, truncation: Truncation = Truncation.REFUSE) -> PromptRequest:
    return PromptRequest(tenant="acme", length=LengthLimit(most, truncation))


def test_a_pair_is_put_together_as_the_tokenizer_does_it(
    tokenizer: tuple[Tokenizer, Checkpoint, Prompts],
) -> None:
    own, _, prompts = tokenizer
    found = prompts.prepared(pairs((LONG, LONGER)), asked())
    whole = own.encode(LONG, LONGER)
    assert found.token_ids == whole.ids
    assert found.texts[0].second_start == whole.type_ids.index(1)


@pytest.mark.parametrize("most", [5, 8, 12, 13, 17])
@pytest.mark.parametrize(
    ("first", "second"), [(LONG, LONGER), (LONGER, LONG), (LONG, LONG), ("wind", LONGER)]
)
def test_the_longer_text_of_a_pair_is_cut_first(
    tokenizer: tuple[Tokenizer, Checkpoint, Prompts], most: int, first: str, second: str
) -> None:
    own, _, prompts = tokenizer
    found = prompts.prepared(pairs((first, second)), asked(most, Truncation.KEEP_START))
    whole = own.encode(first, second).ids
    own.enable_truncation(most)
    cut = own.encode(first, second)
    own.no_truncation()
    assert found.token_ids == cut.ids
    num_cut = len(whole) - len(cut.ids)
    assert found.texts[0].num_truncated_tokens == num_cut


@pytest.mark.parametrize(
    ("truncation", "direction"), [(Truncation.KEEP_START, "right"), (Truncation.KEEP_END, "left")]
)
def test_what_stands_around_a_text_stays_when_it_is_cut(
    tokenizer: tuple[Tokenizer, Checkpoint, Prompts], truncation: Truncation, direction: str
) -> None:
    own, _, prompts = tokenizer
    found = prompts.prepared(pairs((LONGER, None)), asked(6, truncation))
    own.enable_truncation(6, direction=direction)
    expected = own.encode(LONGER).ids
    own.no_truncation()
    assert found.token_ids == expected
    ids = list(found.token_ids)
    assert [ids[0], ids[-1]] == [own.token_to_id("[CLS]"), own.token_to_id("[SEP]")]


def test_a_long_pair_is_refused_by_default_and_one_of_ids_always(
    tokenizer: tuple[Tokenizer, Checkpoint, Prompts],
) -> None:
    _, _, prompts = tokenizer
    with pytest.raises(MillraceError, match="tokens"):
        prompts.prepared(pairs((LONG, LONGER)), asked(8))
    ids = tokenizer_pb2.TextInput(encoded=tokenizer_pb2.EncodedPrompt(ids=[5, 6]), pair=LONGER)
    with pytest.raises(MillraceError, match="two texts"):
        prompts.prepared(tokenizer_pb2.PrepareRequest(texts=tokenizer_pb2.TextList(texts=[ids])), asked())


def test_many_texts_are_what_each_is_alone_and_an_error_names_its_own(
    tokenizer: tuple[Tokenizer, Checkpoint, Prompts],
) -> None:
    _, _, prompts = tokenizer
    texts = [(LONG, None), (LONG, LONGER), ("wind", None), (LONGER, LONG), (LONGER, None)]
    request = asked(9, Truncation.KEEP_START)
    together = prompts.prepared(pairs(*texts), request)
    alone = [prompts.prepared(pairs(each), request) for each in texts]
    assert together.texts == tuple(each.texts[0] for each in alone)
    assert together.token_ids == [token_id for each in alone for token_id in each.token_ids]
    with pytest.raises(MillraceError, match="tokens") as refused:
        prompts.prepared(pairs(*texts), asked(9))
    assert refused.value.field == "texts[1]"


def test_a_list_for_a_worker_comes_back_as_it_is_sent(
    tokenizer: tuple[Tokenizer, Checkpoint, Prompts],
) -> None:
    _, _, prompts = tokenizer
    message = pairs(*[(LONG, None)] * 3000)
    assert is_large(message)
    assert not is_large(pairs(*[(LONG, None)] * 100))
    whole = large(message.SerializeToString())
    assert whole.input == "texts"
    assert prompts.limits.large(whole.input, whole.num_input_bytes, 0, LengthLimit()) == "texts"


def test_what_the_checkpoint_says_of_itself_is_told(tokenizer: tuple[Tokenizer, Checkpoint, Prompts]) -> None:
    _, checkpoint, _ = tokenizer
    told = vocabulary_response(checkpoint).pooled
    assert list(told.tasks) == ["embed"]
    assert told.num_dimensions == 48
    assert told.has_fewer_dimensions
    assert list(told.dimensions) == [8]
    assert told.truncates
    assert checkpoint.vocabulary.decoder is DecoderKind.METASPACE
