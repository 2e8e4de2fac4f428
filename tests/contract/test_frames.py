"""Messages between processes come out as they went in, however the bytes arrive."""

from __future__ import annotations

import io

from hypothesis import given
from hypothesis import strategies as st

from contract.frames import FrameBuffer, framed, read_frame


@given(
    messages=st.lists(st.binary(max_size=300), max_size=6),
    cuts=st.lists(st.integers(min_value=1, max_value=50), min_size=1),
)
def test_frames_may_arrive_in_pieces_and_together(messages: list[bytes], cuts: list[int]) -> None:
    stream = b"".join(map(framed, messages))
    buffer, found, at = FrameBuffer(), [], 0
    while at < len(stream):
        size = cuts[at % len(cuts)]
        found += buffer.feed(stream[at : at + size])
        at += size
    assert found == messages


@given(messages=st.lists(st.binary(max_size=300), min_size=1, max_size=4), data=st.data())
def test_a_blocking_reader_gives_whole_messages_until_the_end(
    messages: list[bytes], data: st.DataObject
) -> None:
    whole = b"".join(map(framed, messages))
    lost = data.draw(st.integers(min_value=0, max_value=len(framed(messages[-1]))))
    stream = io.BytesIO(whole[: len(whole) - lost])
    for message in messages[:-1]:
        assert read_frame(stream) == message
    assert read_frame(stream) == (None if lost else messages[-1])
