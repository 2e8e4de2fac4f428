"""Calls that wait for disks, databases and other machines, in threads; their errors as clients are told."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ParamSpec, TypeVar

from sqlalchemy.exc import SQLAlchemyError

from contract.errors import MillraceError, Reason
from gateway.store.seal import SealBroken

_log = logging.getLogger(__name__)
_RETRY_S = 1.0

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


class WaitingThreads:
    """So many calls wait at a time; others wait for one of them."""

    def __init__(self, name: str, num_threads: int, *, database: str, remedy: str = "try again") -> None:
        """`database` says to clients what cannot be used when it is away, `remedy` what they can do then."""
        self._name, self._problem = name, f"{database} cannot be used now; {remedy}"
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix=name)

    async def call(
        self,
        function: Callable[Parameters, Result],
        *arguments: Parameters.args,
        **named: Parameters.kwargs,
    ) -> Result:
        """Has a thread call it. Raises what it raises; STORE_UNAVAILABLE where the database cannot be used,
        INTERNAL where what is stored cannot be decrypted, which the log says.
        """
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._threads, partial(function, *arguments, **named))
        except SQLAlchemyError as error:
            _log.error("%s: %s", self._name, str(error).splitlines()[0])
            raise MillraceError(Reason.STORE_UNAVAILABLE, self._problem, retry_after_s=_RETRY_S) from error
        except SealBroken as error:
            _log.error("%s: %s", self._name, error)
            raise MillraceError(
                Reason.INTERNAL, "what is stored under this id cannot be read; the operator's log says why"
            ) from error

    async def close(self) -> None:
        """Waits for the calls that are under way."""
        await asyncio.to_thread(self._threads.shutdown)
