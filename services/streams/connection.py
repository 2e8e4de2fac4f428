"""One HTTP/2 connection, either side: frames to streams and back, windows, settings, keep-alive.

Everything that a peer can make this side keep is bounded: the header list, one incomplete frame, the streams,
what a stream holds that nobody has taken, and how many frames come that carry nothing.
"""

from __future__ import annotations

import asyncio
import logging
from typing import cast

import grpc
import hpack
from hpack.exceptions import HPACKError, OversizedHeaderListError

from services.streams import frames
from services.streams.frames import Violation
from services.streams.messages import Headers, StreamEnd
from services.streams.stream import STREAM_WINDOW, Stream

_log = logging.getLogger(__name__)

MAX_HEADER_BYTES = 32 * 1024
MAX_FRAME_BYTES = 64 * 1024
# What the peer may send on all streams without being told that it was read.
CONNECTION_WINDOW = 16 * 1024 * 1024
KEEPALIVE_S = 30.0
KEEPALIVE_LIMIT_S = 10.0
# Frames that carry nothing for a stream: so many at once, and so many a second. gRPC's own measures its
# bandwidth with a PING in every round trip.
_IDLE_FRAMES = 10_000
_IDLE_FRAMES_PER_S = 2_000.0
# Answers to such frames that wait for a peer that does not read.
_MAX_UNREAD_ANSWERS_BYTES = 64 * 1024

_CODE_OF_RESET = {
    frames.REFUSED_STREAM: grpc.StatusCode.UNAVAILABLE,
    frames.CANCEL: grpc.StatusCode.CANCELLED,
    frames.ENHANCE_YOUR_CALM: grpc.StatusCode.RESOURCE_EXHAUSTED,
}


class Connection(asyncio.Protocol):
    """Frames in, frames out. The two sides differ in who opens streams: `accept`, and `open` of a client."""

    # Whether this side answers calls: it then ends a stream with its own end.
    answers = False

    def __init__(self, settings: dict[int, int], max_message_bytes: int) -> None:
        self.streams: dict[int, Stream] = {}
        self.is_paused = False
        self.is_closed = False
        # Of the peer's.
        self.last_stream = 0
        self._settings = settings
        self._max_message_bytes = max_message_bytes
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._cutter = frames.FrameCutter(MAX_FRAME_BYTES)
        self._decoder = hpack.Decoder(MAX_HEADER_BYTES)
        self._encoder = hpack.Encoder()
        self._unsent: list[bytes] = []
        self._is_reading = False
        self._num_unread_answer_bytes = 0
        self._send_window = frames.DEFAULT_WINDOW
        self._peer_stream_window = frames.DEFAULT_WINDOW
        self._peer_frame_bytes = frames.DEFAULT_FRAME_BYTES
        self._receive_window = CONNECTION_WINDOW
        self._credit = 0
        # A header block that is not complete: stream, flags of its first frame, bytes.
        self._block: tuple[int, int, bytearray] | None = None
        self._idle_frames_left = float(_IDLE_FRAMES)
        self._idle_frames_at_s = self._last_read_s = self._loop.time()
        self._pinged_s: float | None = None
        self._keepalive: asyncio.TimerHandle | None = None

    # What the event loop calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio.Protocol."""
        # uvloop's transports are not subclasses of asyncio's.
        self._transport = cast(asyncio.Transport, transport)
        self.write(
            frames.settings(
                {
                    **self._settings,
                    frames.INITIAL_WINDOW_SIZE: STREAM_WINDOW,
                    frames.MAX_FRAME_SIZE: MAX_FRAME_BYTES,
                    frames.MAX_HEADER_LIST_SIZE: MAX_HEADER_BYTES,
                }
            )
            + frames.window_update(0, CONNECTION_WINDOW - frames.DEFAULT_WINDOW)
        )
        self._keepalive = self._loop.call_later(KEEPALIVE_S, self._check_alive)

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio.Protocol."""
        self._close("the connection was lost" + (f": {exc}" if exc else ""))

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol. What is written meanwhile goes out together."""
        self._last_read_s = self._loop.time()
        self._is_reading = True
        try:
            for kind, flags, stream, payload in self._cutter.feed(data):
                if self.is_closed:
                    break
                self._take(kind, flags, stream, payload)
        except Violation as violation:
            self._break_off(violation.code, str(violation))
        except Exception:
            _log.exception("a stream's connection broke")
            self._break_off(frames.INTERNAL_ERROR, "an unexpected failure")
        finally:
            self._is_reading = False
            self._flush()

    def pause_writing(self) -> None:
        """See asyncio.Protocol."""
        self.is_paused = True

    def resume_writing(self) -> None:
        """See asyncio.Protocol."""
        self.is_paused = False
        self._num_unread_answer_bytes = 0
        self._pump_all()

    # What streams call.

    def write(self, data: bytes) -> None:
        """Sends bytes at once; what is written while data is read goes out after it."""
        if self._is_reading:
            self._unsent.append(data)
        elif self._transport is not None:
            self._transport.write(data)

    def _flush(self) -> None:
        unsent, self._unsent = self._unsent, []
        if unsent and self._transport is not None:
            self._transport.write(unsent[0] if len(unsent) == 1 else b"".join(unsent))

    def write_headers(self, stream: int, headers: Headers, *, ends: bool) -> None:
        """A header block in as many frames as it takes."""
        block = self._encoder.encode(headers)
        pieces = [
            block[start : start + self._peer_frame_bytes]
            for start in range(0, len(block), self._peer_frame_bytes)
        ]
        for index, piece in enumerate(pieces):
            flags = frames.END_HEADERS if index == len(pieces) - 1 else 0
            if index == 0:
                flags |= frames.END_STREAM if ends else 0
            kind = frames.CONTINUATION if index else frames.HEADERS
            self.write(frames.frame(kind, flags, stream, piece))

    def takes(self, num_bytes: int) -> bool:
        """Whether one frame of so many bytes may be sent."""
        return not self.is_paused and num_bytes <= self._send_window and num_bytes <= self._peer_frame_bytes

    def room(self) -> int:
        """Bytes that may be sent in one frame."""
        return 0 if self.is_paused else min(self._send_window, self._peer_frame_bytes)

    def spend(self, num_bytes: int) -> None:
        """So many bytes are sent."""
        self._send_window -= num_bytes

    def forget(self, number: int) -> None:
        """A stream is over."""
        self.streams.pop(number, None)

    def go_away(self) -> None:
        """Tells the peer to open no more streams."""
        self.write(frames.goaway(self.last_stream, frames.NO_ERROR))

    def close(self, why: str = "the connection was closed") -> None:
        """Ends the connection and its streams."""
        self._close(why)

    # Frames.

    def _take(self, kind: int, flags: int, number: int, payload: bytes) -> None:
        if self._block is not None and (kind != frames.CONTINUATION or number != self._block[0]):
            raise Violation(frames.PROTOCOL_ERROR, "a header block was interrupted")
        if kind == frames.DATA:
            self._take_data(flags, number, payload)
        elif kind == frames.WINDOW_UPDATE:
            self._take_window_update(number, payload)
        elif kind in (frames.HEADERS, frames.CONTINUATION):
            self._take_headers(kind, flags, number, payload)
        else:
            self._count_idle()
            self._take_control(kind, flags, number, payload)

    def _take_control(self, kind: int, flags: int, number: int, payload: bytes) -> None:
        if kind in (frames.SETTINGS, frames.PING, frames.GOAWAY) and number:
            raise Violation(frames.PROTOCOL_ERROR, "a frame of the connection names a stream")
        if kind == frames.SETTINGS:
            self._take_settings(flags, payload)
        elif kind == frames.PING:
            if len(payload) != 8:
                raise Violation(frames.FRAME_SIZE_ERROR, f"a PING frame has {len(payload)} bytes")
            if flags & frames.ACK:
                self._pinged_s = None
            else:
                self._answer(frames.frame(frames.PING, frames.ACK, 0, payload))
        elif kind == frames.RST_STREAM:
            code = frames.read_number(payload, "RST_STREAM")
            stream = self._known(number)
            if stream is not None:
                stream.fail(
                    StreamEnd(
                        _CODE_OF_RESET.get(code, grpc.StatusCode.INTERNAL),
                        f"the peer reset the stream with code {code}",
                    )
                )
        elif kind == frames.GOAWAY:
            self.went_away(*frames.read_goaway(payload))
        elif kind == frames.PUSH_PROMISE:
            raise Violation(frames.PROTOCOL_ERROR, "nothing may be pushed here")
        # PRIORITY, and kinds that are not known, say nothing here.

    def _take_data(self, flags: int, number: int, payload: bytes) -> None:
        size = len(payload)
        self._receive_window -= size
        if self._receive_window < 0:
            raise Violation(frames.FLOW_CONTROL_ERROR, "the connection has sent more than its window")
        self._credit += size
        if self._credit >= CONNECTION_WINDOW // 2:
            self.write(frames.window_update(0, self._credit))
            self._receive_window += self._credit
            self._credit = 0
        data = frames.unpadded(flags, payload) if flags & frames.PADDED else payload
        if not data and not flags & frames.END_STREAM:
            self._count_idle()
        stream = self._known(number)
        if stream is None:
            # It was on its way when the stream ended.
            return
        if stream.ended_there or not stream.has_headers:
            self._end_closed(stream)
            return
        self._tell(stream, data, size, bool(flags & frames.END_STREAM))

    def _end_closed(self, stream: Stream) -> None:
        self.write(frames.reset(stream.number, frames.STREAM_CLOSED))
        stream.fail(StreamEnd(grpc.StatusCode.INTERNAL, "the peer sent on a side that was not open"))

    def _tell(self, stream: Stream, data: bytes, size: int, ends: bool) -> None:
        try:
            stream.take_data(data, size)
            if ends:
                stream.take_end(None)
        except StreamEnd as end:
            self.refuse(stream, end)

    def _take_window_update(self, number: int, payload: bytes) -> None:
        num_bytes = frames.read_number(payload, "WINDOW_UPDATE") & frames.MAX_WINDOW
        if not num_bytes:
            raise Violation(frames.PROTOCOL_ERROR, "a WINDOW_UPDATE frame of nothing")
        if number == 0:
            self._send_window += num_bytes
            if self._send_window > frames.MAX_WINDOW:
                raise Violation(frames.FLOW_CONTROL_ERROR, "the connection's window is too large")
            self._pump_all()
            return
        stream = self._known(number)
        if stream is not None:
            stream.widen(num_bytes)
            stream.pump()
            stream.has_room()

    def _take_settings(self, flags: int, payload: bytes) -> None:
        if flags & frames.ACK:
            if payload:
                raise Violation(frames.FRAME_SIZE_ERROR, "an acknowledgement of settings has settings")
            return
        values = frames.read_settings(payload)
        if values.get(frames.ENABLE_PUSH, 0) > 1:
            raise Violation(frames.PROTOCOL_ERROR, "ENABLE_PUSH is neither 0 nor 1")
        size = values.get(frames.MAX_FRAME_SIZE, self._peer_frame_bytes)
        if not frames.DEFAULT_FRAME_BYTES <= size <= frames.LARGEST_FRAME_BYTES:
            raise Violation(frames.PROTOCOL_ERROR, f"MAX_FRAME_SIZE is {size}")
        self._peer_frame_bytes = size
        window = values.get(frames.INITIAL_WINDOW_SIZE, self._peer_stream_window)
        if window > frames.MAX_WINDOW:
            raise Violation(frames.FLOW_CONTROL_ERROR, f"INITIAL_WINDOW_SIZE is {window}")
        more, self._peer_stream_window = window - self._peer_stream_window, window
        for stream in self.streams.values():
            stream.widen(more)
        if frames.HEADER_TABLE_SIZE in values:
            self._encoder.header_table_size = min(values[frames.HEADER_TABLE_SIZE], 4096)
        self._answer(frames.frame(frames.SETTINGS, frames.ACK, 0))
        self._pump_all()

    def _take_headers(self, kind: int, flags: int, number: int, payload: bytes) -> None:
        if kind == frames.HEADERS:
            payload = frames.unpadded(flags, payload)
            if flags & frames.PRIORITIZED:
                payload = payload[5:]
            self._block = (number, flags, bytearray(payload))
        elif self._block is None:
            raise Violation(frames.PROTOCOL_ERROR, "a header block goes on that has not begun")
        else:
            self._count_idle()
            self._block[2].extend(payload)
        first, begun = self._block[1], self._block[2]
        if len(begun) > MAX_HEADER_BYTES:
            raise Violation(frames.ENHANCE_YOUR_CALM, f"headers of more than {MAX_HEADER_BYTES} bytes")
        if flags & frames.END_HEADERS:
            self._block = None
            self._take_block(number, self._decode(bytes(begun)), ends=bool(first & frames.END_STREAM))

    def _decode(self, block: bytes) -> dict[str, str]:
        try:
            pairs = self._decoder.decode(block, raw=True)
        except OversizedHeaderListError as error:
            raise Violation(
                frames.ENHANCE_YOUR_CALM, f"headers of more than {MAX_HEADER_BYTES} bytes"
            ) from error
        except HPACKError as error:
            raise Violation(frames.COMPRESSION_ERROR, "the headers cannot be decoded") from error
        return {bytes(name).decode("latin-1"): bytes(value).decode("latin-1") for name, value in pairs}

    def _take_block(self, number: int, headers: dict[str, str], *, ends: bool) -> None:
        stream = self.streams.get(number)
        if stream is None:
            stream = self._accept_new(number)
            if stream is None:
                return
        elif stream.ended_there:
            self._end_closed(stream)
            return
        try:
            if stream.has_headers:
                if not ends:
                    raise StreamEnd(grpc.StatusCode.INTERNAL, "headers came twice")
                stream.take_end(headers)
                return
            stream.has_headers = True
            self.begin(stream, headers)
            if ends:
                stream.take_end(headers)
        except StreamEnd as end:
            self.refuse(stream, end)

    def _accept_new(self, number: int) -> Stream | None:
        if number <= self.last_stream:
            # It was on its way when the stream ended.
            return None
        if not self.may_open(number):
            raise Violation(frames.PROTOCOL_ERROR, f"stream {number} may not be opened")
        self.last_stream = number
        return self.accept(number)

    def _known(self, number: int) -> Stream | None:
        """The stream, None if it is over; a stream that never was is a violation."""
        stream = self.streams.get(number)
        if stream is None and not self.was_open(number):
            raise Violation(frames.PROTOCOL_ERROR, f"a frame of stream {number}, which is idle")
        return stream

    # What the two sides do differently.

    def may_open(self, number: int) -> bool:
        """Whether the peer may open this stream."""
        raise NotImplementedError

    def was_open(self, number: int) -> bool:
        """Whether there has been such a stream."""
        raise NotImplementedError

    def accept(self, number: int) -> Stream | None:
        """The stream that the peer opens, None if it is refused, which the peer has been told."""
        raise NotImplementedError

    def begin(self, stream: Stream, headers: dict[str, str]) -> None:
        """A stream's first headers from the peer. Raises StreamEnd."""
        raise NotImplementedError

    def refuse(self, stream: Stream, end: StreamEnd) -> None:
        """This side ends a stream for what came on it."""
        raise NotImplementedError

    def went_away(self, last_stream: int, code: int, why: str) -> None:
        """The peer opens or takes no more streams."""

    # Streams, and the end.

    def new_stream(self, number: int) -> Stream:
        """A stream of this connection."""
        stream = Stream(self, number, self._peer_stream_window, self._max_message_bytes)
        self.streams[number] = stream
        return stream

    def _pump_all(self) -> None:
        for stream in list(self.streams.values()):
            stream.pump()
            stream.has_room()

    def _answer(self, data: bytes) -> None:
        """Sends what a peer can ask for without end, unless it does not read what it has asked for."""
        if self.is_paused:
            self._num_unread_answer_bytes += len(data)
            if self._num_unread_answer_bytes > _MAX_UNREAD_ANSWERS_BYTES:
                raise Violation(
                    frames.ENHANCE_YOUR_CALM, "the peer does not read the answers that it asks for"
                )
        self.write(data)

    def _count_idle(self) -> None:
        now_s = self._last_read_s
        since_s, self._idle_frames_at_s = now_s - self._idle_frames_at_s, now_s
        self._idle_frames_left = min(_IDLE_FRAMES, self._idle_frames_left + since_s * _IDLE_FRAMES_PER_S) - 1
        if self._idle_frames_left < 0:
            raise Violation(frames.ENHANCE_YOUR_CALM, "too many frames that carry nothing")

    def _check_alive(self) -> None:
        now_s = self._loop.time()
        wait_s = KEEPALIVE_S - (now_s - self._last_read_s)
        if self._pinged_s is not None and self._last_read_s < self._pinged_s:
            self._close(f"the peer has not answered for {KEEPALIVE_S + KEEPALIVE_LIMIT_S:g} s", abort=True)
            return
        self._pinged_s = None
        if wait_s <= 0:
            self._pinged_s = now_s
            self.write(frames.frame(frames.PING, 0, 0, b"millrace"))
            wait_s = KEEPALIVE_LIMIT_S
        self._keepalive = self._loop.call_later(wait_s, self._check_alive)

    def _break_off(self, code: int, why: str) -> None:
        if not self.is_closed:
            _log.warning("a connection for streams is ended: %s", why)
            self.write(frames.goaway(self.last_stream, code, why))
        self._close(why)

    def _close(self, why: str, *, abort: bool = False) -> None:
        if self.is_closed:
            return
        self.is_closed = True
        if self._keepalive is not None:
            self._keepalive.cancel()
        self._flush()
        transport, self._transport = self._transport, None
        if transport is not None:
            if abort:
                transport.abort()
            else:
                transport.close()
                # A peer that does not read what is left must not keep the connection.
                self._loop.call_later(KEEPALIVE_LIMIT_S, transport.abort)
        for stream in list(self.streams.values()):
            stream.fail(StreamEnd(grpc.StatusCode.UNAVAILABLE, why))
        self.streams.clear()
        self.closed()

    def closed(self) -> None:
        """The connection is over."""
