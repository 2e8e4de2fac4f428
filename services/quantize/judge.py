"""Whether the result is still as good: the gate, with the original as baseline, each served by a stack of its
own meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import msgspec

from services.cli.temporary import temporary_stack
from services.gate.command import compare_shown, endpoint_of
from services.gate.run import Comparison, GateRun
from services.gate.suite import IntrinsicLayer, StructureLayer, Suite, TaskLayer, TokensLayer
from services.quantize.calibration import CalibrationText
from services.supervisor.config import state_directory

# In nats a token: a perplexity 5 % higher is worse.
DELTA = 0.05
# Characters of a held-out text that perplexity is measured on.
_TEXT_CHARS = 2000


def default_suite(held_out: Sequence[CalibrationText], folder: Path) -> Suite:
    """Perplexity on texts that calibrated nothing, or on generated ones, with generated tasks and structures.
    Tokens are told only, as the precision differs on purpose. Writes its file into `folder`.
    """
    file = ""
    if held_out:
        file = "held-out.jsonl"
        lines = [msgspec.json.encode({"text": plain(text)[:_TEXT_CHARS]}) for text in held_out]
        (folder / file).write_bytes(b"\n".join(lines) + b"\n")
    return Suite(
        name="quantize",
        tokens=TokensLayer(decides=False),
        intrinsic=IntrinsicLayer(delta=DELTA, file=file),
        task=TaskLayer(),
        structure=StructureLayer(),
    )


def plain(text: CalibrationText) -> str:
    """A text, or what a conversation's messages say."""
    return text.text or "\n\n".join(message["content"] for message in text.messages)


def judge(original: str, result: Path, suite: Suite, suite_folder: Path) -> Comparison:
    """The gate's comparison. Raises ConfigError where nothing can be compared."""
    run = GateRun(suite, suite_folder=suite_folder, folder=state_directory() / "gate")
    with ExitStack() as stacks:
        baseline = stacks.enter_context(temporary_stack(original))
        candidate = stacks.enter_context(temporary_stack(str(result)))
        return asyncio.run(compare_shown(run, endpoint_of(baseline), endpoint_of(candidate)))
