"""Texts for models that pool: pairs, and what is cut of a long one, as `tokenizers` does it."""

from __future__ import annotations

import pytest
from millrace.tokenizer.v1 import tokenizer_pb2
from tokenizers import Tokenizer

from contract.errors import MillraceError
from contract.vocabulary import DecoderKind
from tests.unit.engine.pooled_checkpoints import pooled_checkpoint
from tests.unit.tokenizer_svc.pooled import write_word_pieces
from tokenizer_svc.config import PromptLimitsConfig
from tokenizer_svc.grammar.request import PromptRequest
from tokenizer_svc.messages.wire import vocabulary_response
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


def asked(most: int | None = None, truncation: Truncation = Truncation.REFUSE) -> PromptRequest:
    return PromptRequest(tenant="acme", length=LengthLimit(most, truncation))


def test_a_pair_is_put_together_as_the_tokenizer_does_it(
    tokenizer: tuple[Tokenizer, Checkpoint, Prompts],
) -> None:
    own, _, prompts = tokenizer
    found = prompts.prepared(tokenizer_pb2.PrepareRequest(text=LONG, pair=LONGER), asked())
    whole = own.encode(LONG, LONGER)
    assert found.token_ids == whole.ids
    assert found.second_start == whole.type_ids.index(1)


@pytest.mark.parametrize("most", [5, 8, 12, 13, 17])
@pytest.mark.parametrize(
    ("first", "second"), [(LONG, LONGER), (LONGER, LONG), (LONG, LONG), ("wind", LONGER)]
)
def test_the_longer_text_of_a_pair_is_cut_first(
    tokenizer: tuple[Tokenizer, Checkpoint, Prompts], most: int, first: str, second: str
) -> None:
    own, _, prompts = tokenizer
    message = tokenizer_pb2.PrepareRequest(text=first, pair=second)
    found = prompts.prepared(message, asked(most, Truncation.KEEP_START))
    whole = own.encode(first, second).ids
    own.enable_truncation(most)
    cut = own.encode(first, second)
    own.no_truncation()
    assert found.token_ids == cut.ids
    num_cut = len(whole) - len(cut.ids)
    assert (found.left_out.num_tokens if found.left_out else 0) == num_cut


@pytest.mark.parametrize(
    ("truncation", "direction"), [(Truncation.KEEP_START, "right"), (Truncation.KEEP_END, "left")]
)
def test_what_stands_around_a_text_stays_when_it_is_cut(
    tokenizer: tuple[Tokenizer, Checkpoint, Prompts], truncation: Truncation, direction: str
) -> None:
    own, _, prompts = tokenizer
    found = prompts.prepared(tokenizer_pb2.PrepareRequest(text=LONGER), asked(6, truncation))
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
        prompts.prepared(tokenizer_pb2.PrepareRequest(text=LONG, pair=LONGER), asked(8))
    encoded = tokenizer_pb2.EncodedPrompt(ids=[5, 6])
    with pytest.raises(MillraceError, match="two texts"):
        prompts.prepared(tokenizer_pb2.PrepareRequest(encoded=encoded, pair=LONGER), asked())


def test_what_the_checkpoint_says_of_itself_is_told(tokenizer: tuple[Tokenizer, Checkpoint, Prompts]) -> None:
    _, checkpoint, _ = tokenizer
    told = vocabulary_response(checkpoint).pooled
    assert list(told.tasks) == ["embed"]
    assert told.num_dimensions == 48
    assert told.has_fewer_dimensions
    assert list(told.dimensions) == [8]
    assert told.truncates
    assert checkpoint.vocabulary.decoder is DecoderKind.METASPACE
