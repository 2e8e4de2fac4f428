"""What a batch is, what becomes of its lines, and what a face has to say of it."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum, StrEnum
from typing import Protocol

import msgspec

from contract.errors import MillraceError
from gateway.types.request import Identity


class BatchStatus(StrEnum):
    """Where a batch stands."""

    VALIDATING = "validating"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    COMPLETED = "completed"
    FAILED = "failed"
    EXPIRED = "expired"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"


class LineOutcome(IntEnum):
    """What became of a line; the numbers stand in files."""

    SUCCEEDED = 0
    ERRORED = 1
    CANCELLED = 2
    EXPIRED = 3


class Problem(msgspec.Struct, frozen=True, omit_defaults=True):
    """Why a batch failed as a whole; `line` counts from 1, 0 for none."""

    code: str
    message: str
    param: str = ""
    line: int = 0


class RequestBatch(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A batch. Moments are seconds since the Unix epoch, 0 for what has not been."""

    id: str
    api: str
    endpoint: str
    input_file_id: str
    # Who created it: its lines are requests of theirs.
    identity: Identity
    completion_window: str = ""
    metadata: dict[str, str] = {}
    # Seconds that its results are kept; 0 keeps them as long as any file.
    output_kept_s: int = 0
    status: BatchStatus = BatchStatus.VALIDATING
    created_unix_s: int
    # Then what is not answered expires.
    deadline_unix_s: int
    in_progress_unix_s: int = 0
    finalizing_unix_s: int = 0
    cancelling_unix_s: int = 0
    # It is completed, failed, expired or cancelled.
    ended_unix_s: int = 0
    num_lines: int = 0
    # Lines by what became of them, in the order of LineOutcome.
    counts: list[int] = msgspec.field(default_factory=lambda: [0] * len(LineOutcome))
    output_file_id: str = ""
    error_file_id: str = ""
    problems: list[Problem] = []
    # Gateways that took it since a line was answered last.
    num_takes: int = 0
    # Whether its input and its results are encrypted, since when they were begun.
    is_input_sealed: bool = False
    is_sealed: bool = False
    # What holds it up, or that its window is out of reach; for people.
    detail: str = ""

    @property
    def is_open(self) -> bool:
        """Whether something is left to do."""
        return not self.ended_unix_s

    @property
    def num_answered(self) -> int:
        """Lines of which it is known what became of them."""
        return sum(self.counts)


class LineResult(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a line: an answer over HTTP, or the error for which there was none."""

    # As the line names itself, if it does.
    custom_id: str | None
    # Its number in the input, from 1.
    line: int
    outcome: LineOutcome
    request_id: str = ""
    status: int = 0
    body: bytes = b""
    error: MillraceError | None = None


class ResultForm(Protocol):
    """How an API writes results."""

    def write(self, batch: RequestBatch, result: LineResult) -> bytes:
        """The result as a line, its end included."""
        ...

    def is_error(self, result: LineResult) -> bool:
        """Whether it goes into the file of errors."""
        ...

    def purposes(self) -> Sequence[str]:
        """Of the file of results, and of that of errors."""
        ...
