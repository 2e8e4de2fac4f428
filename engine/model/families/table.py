"""Every architecture with what its layers are made of and the forms that it loads from, derived from what the
families read: `millrace models families` prints it, and docs/models.md holds it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import msgspec

from engine.model.config_reader import ConfigReader
from engine.model.families.base import FAMILIES
from engine.model.families.multimodal import WHOLES
from engine.model.gguf_config import gguf_names
from engine.model.spec import ModelSpec

# A configuration that every family can read: what decides about kinds of layers is left to its defaults.
_PROBE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 12,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 64,
    "max_position_embeddings": 65_536,
    "n_embd": 64,
    "n_layer": 12,
    "n_head": 4,
    "n_positions": 1024,
    "num_experts": 8,
    "num_local_experts": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "shared_intermediate_size": 64,
    "kv_lora_rank": 16,
    "head_dim": 16,
    "sliding_window": 4096,
}
# What some families need besides, in words of their own.
_WITH: dict[str, dict[str, Any]] = {
    "GraniteMoeHybridForCausalLM": {"layer_types": ["attention", "mamba"] * 6},
    "NemotronHForCausalLM": {"hybrid_override_pattern": "M-M*-" * 3},
    "BambaForCausalLM": {"attn_layer_indices": [5, 11]},
    "Lfm2ForCausalLM": {"full_attn_idxs": [5, 11]},
    "Lfm2MoeForCausalLM": {"layer_types": ["conv", "full_attention"] * 6},
}
# What some families refuse, or read otherwise.
_WITHOUT = {
    "GraniteMoeForCausalLM": "shared_intermediate_size",
    "MiniMaxM2ForCausalLM": "shared_intermediate_size",
}
_PLACEMENTS = {
    "pre": "before half layers",
    "post": "after half layers",
    "sandwich": "before and after half layers",
    "parallel": "before half layers side by side",
    "parallel_shared": "one before half layers side by side",
}
_QK_NORMS = {"head": "per head", "each": "per head", "full": "over all heads", "unit": "per head"}
_STATES = {
    "convolution": "short convolutions",
    "mamba2": "Mamba 2",
    "delta": "the gated delta rule",
}
HEADINGS = ("architecture", "attention", "norms", "feed-forward", "forms")


class FamilyRow(msgspec.Struct, frozen=True, kw_only=True):
    """One architecture."""

    architecture: str
    attention: str
    norms: str
    feed_forward: str
    forms: str


def rows() -> list[FamilyRow]:
    """All of them, by name."""
    return [_row(name) for name in sorted(FAMILIES)]


def markdown() -> str:
    """The table of docs/models.md."""
    lines = ["| " + " | ".join(HEADINGS) + " |", "|" + "---|" * len(HEADINGS)]
    for row in rows():
        name, *rest = msgspec.structs.astuple(row)
        lines.append(f"| `{name}` | " + " | ".join(rest) + " |")
    return "\n".join(lines) + "\n"


def main(arguments: list[str] | None = None) -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(prog="millrace models families", description=__doc__)
    parser.add_argument("--json", action="store_true", help="machine-readable output")
    parser.add_argument("--markdown", action="store_true", help="as docs/models.md has it")
    options = parser.parse_args(arguments)
    if options.json:
        print(json.dumps(msgspec.to_builtins(rows())))
    elif options.markdown:
        print(markdown(), end="")
    else:
        _print_table()
    return 0


def _print_table() -> None:
    from rich.console import Console
    from rich.table import Table

    found, (first, *others) = rows(), HEADINGS
    table = Table(show_lines=True)
    table.add_column(first, no_wrap=True, min_width=max(len(row.architecture) for row in found))
    for heading in others:
        table.add_column(heading, overflow="fold")
    for row in found:
        table.add_row(*msgspec.structs.astuple(row))
    Console().print(table)


def _row(name: str) -> FamilyRow:
    forms = ["safetensors"]
    if name in WHOLES:
        return FamilyRow(
            architecture=name,
            attention="the text model's",
            norms="the text model's",
            feed_forward="the text model's",
            forms="safetensors, of which images are left out",
        )
    values = {key: value for key, value in _PROBE.items() if key != _WITHOUT.get(name)}
    spec = FAMILIES[name](ConfigReader(values | _WITH.get(name, {}), name))
    forms += [f"GGUF `{each}`" for each in gguf_names(name)]
    return FamilyRow(
        architecture=name,
        attention=", ".join(_attention(spec)),
        norms=", ".join(_norms(spec)),
        feed_forward=", ".join(_feed_forward(spec)),
        forms=", ".join(forms),
    )


def _attention(spec: ModelSpec) -> Iterator[str]:
    yield "latent" if spec.latent else "grouped-query"
    sliding = [window is not None for window in spec.attention_windows]
    if any(sliding):
        yield "windows" if all(sliding) else "windows in some layers"
    if spec.state is not None:
        beside = " beside it" if set(spec.state.layers) <= set(spec.attending) else " in other layers"
        yield _STATES[spec.state.kind] + beside
    if spec.attention_gate:
        yield "a gate behind it"
    if spec.learned_positions:
        yield "learned positions"
    turned = {spec.ropes[each].rotary_dim for each in spec.rope_of_layer}
    if turned == {0} and not spec.learned_positions:
        yield "rotation where stated"
    if 0 in turned and len(turned) > 1:
        yield "no rotation in some layers"
    if not spec.latent and 0 < max(turned) < spec.head_dim:
        yield "partial rotation"
    if spec.qk_norm != "none":
        after = " after the rotation" if spec.qk_norm_last else ""
        yield f"queries and keys normed {_QK_NORMS[spec.qk_norm]}{after}"
    if spec.attention_sinks:
        yield "sinks"
    if spec.attention_soft_cap is not None:
        yield "soft cap"


def _norms(spec: ModelSpec) -> Iterator[str]:
    yield "layer norm" if spec.norm == "layer" else "RMS"
    yield _PLACEMENTS[spec.norm_placement]


def _feed_forward(spec: ModelSpec) -> Iterator[str]:
    gate = "gated " if spec.gated else ""
    yield f"{gate}{spec.activation.replace('_', ' ')}"
    experts = spec.experts
    if experts is None:
        return
    sparse = experts.layers
    steps = {after - before for before, after in pairwise(sparse)}
    where = (
        ""
        if len(sparse) == spec.num_layers
        else " in some layers"
        if steps != {1}
        else " but for first layers"
    )
    yield f"experts{where}"
    if experts.shared_intermediate_size:
        yield "a shared one"


if __name__ == "__main__":
    sys.exit(main())
