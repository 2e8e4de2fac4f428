"""The example for backend services in Python, with the client as it is here."""

from __future__ import annotations

import asyncio
import contextlib
import io
import runpy
import sys

from report import ADDRESS, ANSWER, API_KEY, MODEL, ROOT, works

sys.path += [str(ROOT / "client"), str(ROOT / "contract" / "stubs")]
example = runpy.run_path(str(ROOT / "client" / "examples" / "python" / "backend.py"))

with works("an answer, a stop and a refusal"):
    with contextlib.redirect_stdout(io.StringIO()) as told:
        asyncio.run(example["main"](ADDRESS, API_KEY, MODEL))
    for part in (
        ANSWER,
        "tokens, request ",
        "stopped after:",
        "refused: INVALID_ARGUMENT at sampling.temperature",
    ):
        assert part in told.getvalue(), told.getvalue()
