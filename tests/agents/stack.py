"""A stack whose engines play a script, over the bundled tokenizer with room for what agents send."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from services.supervisor.config import BUNDLED_MODEL
from tests.agents.scripted import Script
from tests.e2e.stack import Stack, running_stack

_ROOT = Path(__file__).resolve().parents[2]
# Tokens: agents send ten thousand words of instructions and tools, and the bundled vocabulary is small.
_CONTEXT = 262_144
_CONFIG = """
[gateway]
default_tier = "standard"
[tiers.standard]
openai_name = "default"
priority = 10
[tenants.development]
tier = "standard"
"""


def _checkpoint(folder: Path) -> Path:
    """The bundled model's tokenizer and template, with a longer window."""
    made = folder / "scripted"
    made.mkdir(parents=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(BUNDLED_MODEL / name, made)
    config = msgspec.json.decode((BUNDLED_MODEL / "config.json").read_bytes())
    (made / "config.json").write_bytes(msgspec.json.encode(config | {"max_position_embeddings": _CONTEXT}))
    return made


@contextmanager
def scripted_stack(folder: Path, script: Script, num_engines: int = 1) -> Iterator[Stack]:
    """A healthy stack, whose engines answer by the script."""
    folder.mkdir(parents=True, exist_ok=True)
    written = folder / "script.json"
    written.write_bytes(msgspec.json.encode(script))
    environment = {
        "AGENTS_SCRIPT": str(written),
        "PYTHONPATH": f"{_ROOT / 'tests/agents/inject'}:{_ROOT}:{_ROOT / 'contract/stubs'}",
        "MILLRACE_ENGINE__SIMULATION__MAX_MODEL_LEN": str(_CONTEXT),
        "MILLRACE_ENGINE__SIMULATION__NUM_BLOCKS": str(4 * _CONTEXT // 16),
        # Long enough that something can be killed while it speaks.
        "MILLRACE_ENGINE__SIMULATION__STEP_MS": "3",
    }
    with running_stack(
        folder / "state",
        "--simulated",
        "--engines",
        str(num_engines),
        config=_CONFIG,
        environment=environment,
        model=_checkpoint(folder),
    ) as stack:
        yield stack
