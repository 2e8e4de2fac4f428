"""What an answer may forget, as engines take it from the wire: what a model cannot is refused by name."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from millrace.common.v1 import context_pb2, retention_pb2, sampling_pb2
from millrace.engine.v1 import engine_pb2
from safetensors.numpy import save_file

from contract.errors import MillraceError
from contract.proto.engine import retention_fields
from contract.retention import Retention
from engine.config import AdaptersConfig
from engine.service.adapters import ServedAdapters
from engine.service.convert import ModelLimits, to_request
from tests.unit.engine.service.engine_client import Gateway, start_engine, tokens
from tests.unit.engine.service.test_prefix_disk import BASE
from tests.unit.engine.service.test_promises import FACTS

HALF = Retention(policy="window+sinks", keep=0.5)


def taken(
    asked: Retention | None, simulated: bool = True, beams: int = 0, **facts_of: Any
) -> Retention | None:
    facts = msgspec.structs.replace(FACTS, **facts_of)
    adapters = ServedAdapters(AdaptersConfig(), lambda command: None, lambda: None)
    options = sampling_pb2.SamplingOptions(seed=1, max_tokens=4, beam_width=beams or None)
    submit = engine_pb2.Submit(prompt_token_ids=[1], sampling=options, kv=retention_fields(asked))
    limits = ModelLimits(facts=facts, max_tokens_total=1024, simulated=simulated, adapters=adapters)
    context = context_pb2.RequestContext(request_id="r")
    return to_request(submit, context, limits, request_id=1, now_s=0.0, now_unix_ms=0).retention


@pytest.mark.parametrize(
    ("asked", "found"), [(None, None), (Retention(), None), (HALF, HALF), (Retention(policy="full"), None)]
)
def test_what_is_asked_arrives(asked: Retention | None, found: Retention | None) -> None:
    assert taken(asked) == found


def test_a_model_that_can_forget_nothing_says_why() -> None:
    with pytest.raises(
        MillraceError, match=r"^kv\.policy: window\+sinks is not for this model: it is latent"
    ):
        taken(HALF, remembers_because="it is latent")
    assert taken(msgspec.structs.replace(HALF, if_possible=True), remembers_because="it is latent") is None
    assert taken(Retention(), remembers_because="it is latent") is None


@pytest.mark.parametrize(
    ("given", "because"),
    [
        ({"simulated": True}, "the simulated engine has no attention"),
        ({"unmeasured_because": "of two ranks"}, "of two ranks"),
        ({"unplanned_because": "there is no memory"}, "there is no memory"),
        ({"beams": 2}, "beams share what they forget"),
    ],
)
def test_where_no_bound_can_be_told_it_is_said_why(given: dict[str, Any], because: str) -> None:
    bounded = msgspec.structs.replace(HALF, max_lost=0.1)
    assert taken(bounded, simulated=False) == bounded
    with pytest.raises(MillraceError, match=rf"^kv\.max_lost: no bound can be told: {because}"):
        taken(bounded, **({"simulated": False} | given))


@pytest.mark.parametrize(
    ("given", "because"), [({"unmeasured_because": "of two ranks"}, "of two ranks"), ({"beams": 2}, "beams")]
)
def test_where_no_tokens_can_be_chosen_it_is_said_why(given: dict[str, Any], because: str) -> None:
    asked = Retention(policy="snapkv", keep=0.5)
    assert taken(asked) == asked
    with pytest.raises(MillraceError, match=rf"^kv\.policy: snapkv chooses what stays of .*: {because}"):
        taken(asked, **given)
    assert taken(msgspec.structs.replace(asked, if_possible=True), **given) is None


def test_an_engine_without_a_scorer_says_so() -> None:
    asked = Retention(policy="kvzap", keep=0.5)
    assert taken(asked) == asked
    with pytest.raises(MillraceError, match=r"^kv\.policy: kvzap chooses what stays of .*: it has none;"):
        taken(asked, unscored_because="it has none")
    assert taken(msgspec.structs.replace(asked, if_possible=True), unscored_because="it has none") is None
    snapkv = msgspec.structs.replace(asked, policy="snapkv")
    assert taken(snapkv, unscored_because="it has none") == snapkv


def test_the_engine_checks_for_itself() -> None:
    with pytest.raises(MillraceError, match=r"^kv\.keep: 2\.0 is not above 0"):
        taken(Retention(policy="window+sinks", keep=2.0))


def random_scorer(folder: Path) -> Path:
    """For the bundled model."""
    random = np.random.default_rng(1)
    names = {f"layers.{layer}.weight": (2, 256) for layer in range(6)}
    names |= {f"layers.{layer}.bias": (2,) for layer in range(6)}
    tensors = {name: random.standard_normal(shape).astype(np.float32) for name, shape in names.items()}
    save_file(tensors, folder / "model.safetensors")
    config = {"model_type": "kvzap", "input_dim": 256, "output_dim": 2, "n_modules": 6, "hidden_dim": None}
    (folder / "config.json").write_bytes(msgspec.json.encode(config))
    return folder


async def test_an_engine_forgets_for_who_asks_and_goes_on_where_another_one_ended(tmp_path: Path) -> None:
    """The bundled model in a process of its own, whose prefix cache all requests share."""
    prompt, asked = [5 + each % 90 for each in range(100)], {"temperature": 0.0, "max_tokens": 90}
    kv = retention_pb2.Retention(policy="window+sinks", window_tokens=1)
    options = {"simulated": "false", "num_threads": "1", "dtype": "float32"}
    options["cache__forgotten_bytes"] = "100000000"
    options["cache__kvzap"] = str(random_scorer(tmp_path))
    async with start_engine(BASE, **options) as engine:
        gateway = Gateway(engine, "")
        await gateway.hello()

        async def answer(handle: int, text: Sequence[int] = prompt, **more: Any) -> list[int]:
            await gateway.submit(handle, text, ignore_eos=True, **asked, **more)
            return tokens((await gateway.until_ended(1))[handle, 0])

        plain, forgetful = await answer(1), await answer(2, kv=kv)
        assert len(plain) == len(forgetful) == 90
        # The prompt is computed whole.
        assert plain[0] == forgetful[0]
        assert plain != forgetful
        assert await answer(3) == plain
        assert await answer(4, kv=kv, output=forgetful[:37]) == forgetful[37:]
        kv.policy = "h2o"
        chosen = await answer(5, kv=kv)
        assert chosen[0] == plain[0]
        assert chosen not in (plain, forgetful)
        assert await answer(6) == plain
        assert await answer(7, kv=kv, output=chosen[:37]) == chosen[37:]
        kv.policy = "kvzap"
        assert await answer(9, text=prompt * 2) != await answer(10, kv=kv, text=prompt * 2)
        kvzap = await answer(11, kv=kv, text=prompt * 2)
        assert await answer(12, kv=kv, text=prompt * 2, output=kvzap[:37]) == kvzap[37:]
        kv.policy = "h2o"
        # What would lose next to anything goes on as the plain answer does.
        kv.max_lost = 1e-6
        assert await answer(8, kv=kv) == plain
        books = await engine.wait_until_idle()
        assert books.ok
        assert books.num_unreferenced_blocks == books.num_total_blocks
