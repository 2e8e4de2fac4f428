"""Log-probabilities as JSON, written as they come: an answer may have millions of them, and what is written
of a token is the same every time.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, islice

import msgspec

from contract.outputs import TokenLogprobs
from gateway.text.detokenizer import Detokenizer, Vocabulary

_encode = msgspec.json.Encoder().encode


def finite(logprob: float) -> float:
    """JSON has no infinity; a masked token is as good as impossible."""
    return max(logprob, -9999.0)


class ChatLogprobs:
    """`logprobs` of one choice of a chat, or of a part of one."""

    def __init__(self, vocabulary: Vocabulary, pieces: dict[int, tuple[bytes, bytes]]) -> None:
        """`pieces` is what stands before and behind a token's log-probability, shared by all choices."""
        self._vocabulary = vocabulary
        self._pieces = pieces
        # Each token as JSON.
        self.parts: list[bytes] = []

    def add(self, logprobs: Iterable[TokenLogprobs]) -> int:
        """Keeps them; how many bytes they take."""
        parts = list(map(self._token, logprobs))
        self.parts += parts
        return sum(map(len, parts))

    def written(self) -> bytes:
        """All that were added."""
        return b'{"content":[' + b",".join(self.parts) + b'],"refusal":null}'

    def _token(self, each: TokenLogprobs) -> bytes:
        top = b"},".join([self._alternative(*one) for one in each.top])
        end = b"}]}" if top else b"]}"
        return self._alternative(each.token_id, each.logprob) + b',"top_logprobs":[' + top + end

    def _alternative(self, token_id: int, logprob: float) -> bytes:
        pieces = self._pieces.get(token_id)
        if pieces is None:
            vocabulary = self._vocabulary
            pieces = self._pieces[token_id] = (
                b'{"token":' + _encode(vocabulary.token_text(token_id)) + b',"logprob":',
                b',"bytes":' + _encode(list(vocabulary.token_bytes(token_id))),
            )
        return pieces[0] + _encode(finite(logprob)) + pieces[1]


class CompletionLogprobs:
    """`logprobs` of one choice of a completion, or of a part of one."""

    def __init__(self, text_of: Callable[[int], str], reader: Detokenizer) -> None:
        """`text_of` is a token's text alone; `reader` has read the tokens before, and says how much text each
        adds to theirs.
        """
        self._text_of = text_of
        self._reader = reader
        self._parts: list[tuple[bytes, bytes, bytes]] = []
        self._lengths = array("I")

    def add(self, logprobs: Sequence[TokenLogprobs]) -> int:
        """Keeps them; how many bytes they take."""
        if not logprobs:
            return 0
        text_of = self._text_of
        texts = [text_of(each.token_id) for each in logprobs]
        values = [finite(each.logprob) for each in logprobs]
        tops = [
            {text_of(id_): finite(top) for id_, top in each.top} or {text: value}
            for each, text, value in zip(logprobs, texts, values, strict=True)
        ]
        self._lengths.extend([len(self._reader.feed((each.token_id,))) for each in logprobs])
        part = (_inner(texts), _inner(values), _inner(tops))
        self._parts.append(part)
        return sum(map(len, part))

    def lead(self, token_id: int) -> None:
        """A first token, which has no log-probability."""
        text = self._text_of(token_id)
        self._lengths.append(len(self._reader.feed((token_id,))))
        self._parts.append((_encode(text), b"null", b"null"))

    def written(self, offset: int = 0, earlier: CompletionLogprobs | None = None) -> tuple[bytes, int]:
        """All that were added, behind those of `earlier` and from `offset` on; and where the text ends."""
        parts = [*(earlier._parts if earlier is not None else ()), *self._parts]
        lengths = [*(earlier._lengths if earlier is not None else ()), *self._lengths]
        texts, values, tops = (b",".join(each) for each in zip(*parts, strict=True)) if parts else (b"",) * 3
        offsets = _inner(list(islice(accumulate(lengths, initial=offset), len(lengths))))
        whole = b'{"tokens":[%b],"token_logprobs":[%b],"top_logprobs":[%b],"text_offset":[%b]}'
        return whole % (texts, values, tops, offsets), offset + sum(lengths)


def _inner(items: Sequence[object]) -> bytes:
    return _encode(items)[1:-1]
