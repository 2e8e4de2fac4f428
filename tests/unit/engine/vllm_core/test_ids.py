"""What vLLM draws and ends at are the ids of the checkpoint's tokenizer, too."""

from __future__ import annotations

import asyncio
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from engine.vllm_core.inside.calls import CoreCall
from engine.vllm_core.inside.engine import CannotStart, VllmEngine
from tests.unit.engine.vllm_core import pretend

IDS = {"count": 2000, "num_of_text": 1990, "end": [2, 5], "holes": [17, 900]}


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    """The package goes with the folder that it is in."""
    yield
    for name in [name for name in sys.modules if name.split(".")[0] == "vllm"]:
        del sys.modules[name]


class Inputs:
    """Keeps the parameters of what was asked for."""

    def __init__(self) -> None:
        self.asked: list[Any] = []

    def process_inputs(self, key: str, prompt: Any, params: Any, *_: Any, **__: Any) -> Any:
        self.asked.append(params)
        return params


async def _added(request: Any) -> None:
    """What a core does with a request."""


def engine_of(
    folder: Path, monkeypatch: pytest.MonkeyPatch, ids: dict[str, Any]
) -> tuple[VllmEngine, Inputs]:
    pretend.write(folder)
    monkeypatch.syspath_prepend(str(folder))
    from vllm.engine.arg_utils import AsyncEngineArgs

    inputs = Inputs()
    model = {"path": str(folder), "token_ids": ids, "pooling": None}
    settings = AsyncEngineArgs(model=str(folder)).create_engine_config()
    return VllmEngine(SimpleNamespace(add_request_async=_added), inputs, settings, model), inputs


def test_padding_rows_are_never_drawn_and_never_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, inputs = engine_of(tmp_path, monkeypatch, IDS)
    assert (engine.facts["vocab_size"], engine.facts["eos_token_ids"]) == (2000, [2, 5])
    call = CoreCall("1", [5], {"logit_bias": {4: 1.5, 17: 99.0}}, None, "", 0)
    asyncio.run(engine.add(call))
    never = dict.fromkeys((17, 900, *range(2000, 2048)), -math.inf)
    assert inputs.asked[0].logit_bias == {4: 1.5} | never
    lists = SimpleNamespace(
        logprob_token_ids=np.array([[7, 2003, 7, 900, 9]]),
        logprobs=np.array([[-1.0, -0.5, -1.0, -1.5, -2.0]]),
    )
    assert engine.logprobs(SimpleNamespace(new_logprobs=lists)) == [[7, -1.0, [7, 9], [-1.0, -2.0]]]


def test_more_ids_than_rows_are_refused_with_both_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(CannotStart, match="tokenizer has 2049 ids, but the model has only 2048 rows"):
        engine_of(tmp_path, monkeypatch, IDS | {"count": 2060, "num_of_text": 2049})
