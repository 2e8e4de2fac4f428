"""`benchmarks.kv_channels`: attention sees what a form says, and levels are as far apart as they may be."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.kv_channels import CacheForm, Rounding, between, by_channel, even, forms, in_parts, reading
from engine.model.families import read_spec
from engine.model.kv_memory import kv_bytes_per_token
from kernels.paged_cache import four_bits
from services.supervisor.config import BUNDLED_MODEL
from tests.unit.engine.checkpoints import make_checkpoint

IDS = [torch.arange(3, 53)[None]]


def logits(folder: Path, form: CacheForm | None) -> torch.Tensor:
    with reading(folder) as (model, attention):
        attention.form = form
        return torch.cat([model(ids, use_cache=False).logits for ids in IDS])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("model")
    make_checkpoint(found, "llama", head_dim=16)
    return found


def form(keys: Rounding, values: Rounding, newest: int) -> CacheForm:
    return CacheForm(keys=keys, values=values, newest=newest, bytes_of=lambda dim: dim)


def test_attention_is_the_models_where_nothing_is_rounded(folder: Path) -> None:
    with reading(folder) as (model, _):
        model.config._attn_implementation = "eager"
        wanted = torch.cat([model(ids, use_cache=False).logits for ids in IDS])
    whole = form(lambda x: x, lambda x: x, 16)
    for each in (None, whole):
        torch.testing.assert_close(logits(folder, each), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("which", ["keys", "values"])
def test_the_newest_group_is_whole_and_no_other(folder: Path, which: str) -> None:
    def spoiled(x: torch.Tensor) -> torch.Tensor:
        return x * 5 + 1

    def kept(x: torch.Tensor) -> torch.Tensor:
        return x

    given = (spoiled, kept) if which == "keys" else (kept, spoiled)
    wanted = logits(folder, None)
    found = logits(folder, form(*given, newest=20))
    torch.testing.assert_close(found[:, :20], wanted[:, :20], rtol=1e-4, atol=1e-4)
    # Its first position looks at itself and at a group that is full.
    assert ((found - wanted)[:, 20:].abs().amax(-1) > 1e-3).all()


def test_levels_are_as_far_apart_as_said() -> None:
    x = torch.randn(2, 50, 32, generator=torch.Generator().manual_seed(1)) * 3 + 2
    for part in x.split(16, dim=1):
        wide = part.amax(1, keepdim=True) - part.amin(1, keepdim=True)
        assert ((between(part, 1) - part).abs() <= 0.6 * wide / 15 + 0.02).all()
        most = part.abs().amax(1, keepdim=True)
        assert ((even(part, 1) - part).abs() <= 1.1 * most / 15).all()
    for start, end in ((0, 16), (16, 32), (48, 50)):
        # A group does not depend on the others.
        torch.testing.assert_close(by_channel(between, 16)(x)[:, start:end], between(x[:, start:end], 1))
    rotated = four_bits.turn(by_channel(even, 16, rotated=True)(x))
    torch.testing.assert_close(rotated, by_channel(even, 16)(four_bits.turn(x)), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(in_parts(x, 16)[..., 16:], between(x[..., 16:], -1))


def test_bytes_are_those_of_a_cache() -> None:
    spec = read_spec(BUNDLED_MODEL)
    heads = sum(shape.num_heads for layer in spec.attending if (shape := spec.cache_shape(layer)) is not None)
    ours = forms(16)["keys by channel (kivi4)"]
    taken = kv_bytes_per_token(spec, ["kivi4"] * spec.num_layers)
    assert heads * ours.bytes_of(spec.query_key_dim) == taken
