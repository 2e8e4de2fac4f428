"""What is too long is refused by its size, before any of it is encoded, and never what is not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from contract.errors import MillraceError, Reason
from tests.unit.tokenizer_svc.building import Text, conversation
from tests.unit.tokenizer_svc.families import FAMILIES, make
from tokenizer_svc.config import PromptLimitsConfig
from tokenizer_svc.prompt.limits import RequestLimits, longest_token
from tokenizer_svc.text.encoding import TextEncoder
from tokenizer_svc.types import LengthLimit, Truncation


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Text:
    return Text(make(request.param, tmp_path_factory.mktemp(request.param)))


@given(text=st.text(max_size=200))
def test_no_text_has_fewer_tokens_than_its_bytes_say(family: Text, text: str) -> None:
    checkpoint = family.checkpoint
    longest = longest_token(checkpoint.description, checkpoint.vocabulary.tokens)
    ids = family.encoder.encode_text(text, add_special_tokens=False)
    assert not longest or len(ids) * longest >= len(text.encode())


def test_there_is_a_bound_for_byte_level_and_none_where_bytes_can_get_lost(tmp_path: Path) -> None:
    checkpoint = Text(make("llama3", tmp_path)).checkpoint
    tokens = checkpoint.vocabulary.tokens
    assert longest_token(checkpoint.description, tokens) == max(map(len, tokens))
    lossy: list[dict[str, Any]] = [
        {"normalizer": {"type": "Lowercase"}},
        {"pre_tokenizer": None},
        {"added_tokens": [{"content": "<m>", "lstrip": True, "rstrip": False}]},
    ]
    for changed in lossy:
        assert longest_token({**checkpoint.description, **changed}, tokens) == 0
    composed = {**checkpoint.description, "normalizer": {"type": "NFC"}}
    assert longest_token(composed, tokens) == 3 * max(map(len, tokens))


def test_a_prompt_that_cannot_fit_is_refused_without_being_encoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = Text(make("llama3", tmp_path))
    limits = RequestLimits(
        PromptLimitsConfig(), text.checkpoint, writes_user_turns=text.templates.writes_user_turns
    )
    length = LengthLimit(100)

    def encode(*_: Any, **__: Any) -> list[int]:
        raise AssertionError("nothing is encoded")

    monkeypatch.setattr(TextEncoder, "encode_text", encode)
    with pytest.raises(MillraceError, match="at least") as caught:
        limits.text_size(50_000, length, "prompt")
    assert caught.value.reason is Reason.CONTEXT_LENGTH_EXCEEDED
    with pytest.raises(MillraceError, match="at least"):
        limits.conversation(conversation([{"role": "user", "content": "word " * 10_000}]), length)
    # Text that a template may leave out does not count.
    thoughts = [{"role": "assistant", "content": "word " * 10_000}, {"role": "user", "content": "q"}]
    limits.conversation(conversation(thoughts), length)


def test_truncation_keeps_what_stands_in_front_of_every_text(tmp_path: Path) -> None:
    text = Text(make("mistral", tmp_path))
    tokenizer = Tokenizer.from_str(text.checkpoint.tokenizer_json)
    front = tokenizer.encode("", add_special_tokens=True).ids
    ids = text.encoder.encode_text("a b c d e f", add_special_tokens=True)
    cut = text.encoder.truncated(ids, 4, Truncation.KEEP_END)
    assert cut == front + ids[len(ids) - 4 + len(front) :]
    assert text.encoder.truncated(ids, 4, Truncation.KEEP_START) == ids[:4]
    assert text.encoder.truncated(ids, None, Truncation.KEEP_END) == ids
