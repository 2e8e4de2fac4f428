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
from engine.model.weight_memory import CODED_BYTES, GGUF_BYTES

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
    "num_experts": 16,
    "num_local_experts": 16,
    "n_routed_experts": 16,
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
    "DeepseekV32ForCausalLM": {"q_lora_rank": 16},
    "FalconMambaForCausalLM": {"intermediate_size": 128},
    "MambaForCausalLM": {"intermediate_size": 128},
    "Mamba2ForCausalLM": {"intermediate_size": 128, "num_heads": 8, "head_dim": 16},
    "Gemma3nForCausalLM": {"num_kv_shared_layers": 2},
    "Gemma4ForCausalLM": {"num_kv_shared_layers": 2},
    "GlmMoeDsaForCausalLM": {"q_lora_rank": 16},
    "GraniteMoeHybridForCausalLM": {"layer_types": ["attention", "mamba"] * 6},
    "MiMoV2FlashForCausalLM": {"num_key_value_heads": 2},
    "OPTForCausalLM": {"ffn_dim": 64},
    "MiniMaxForCausalLM": {"sliding_window": None},
    "MiniMaxM1ForCausalLM": {"attn_type_list": [0, 0, 0, 1] * 3, "sliding_window": None},
    "MiniMaxText01ForCausalLM": {"attn_type_list": [0, 0, 0, 1] * 3, "sliding_window": None},
    "NemotronHForCausalLM": {"hybrid_override_pattern": "M-M*-" * 3},
    "Zamba2ForCausalLM": {"layers_block_type": ["mamba", "hybrid"] * 6},
    "BambaForCausalLM": {"attn_layer_indices": [5, 11]},
    "Lfm2ForCausalLM": {"full_attn_idxs": [5, 11]},
    "Lfm2MoeForCausalLM": {"layer_types": ["conv", "full_attention"] * 6},
}
# What some families refuse, or read otherwise.
_WITHOUT = {
    "GraniteMoeForCausalLM": "shared_intermediate_size",
    "MiniMaxM1ForCausalLM": "shared_intermediate_size",
    "MiniMaxM2ForCausalLM": "shared_intermediate_size",
    "MiniMaxText01ForCausalLM": "shared_intermediate_size",
}
_PLACEMENTS = {
    "pre": "before half layers",
    "post": "after half layers",
    "sandwich": "before and after half layers",
    "sum": "of the stream after half layers",
    "parallel": "before half layers side by side",
    "parallel_shared": "one before half layers side by side",
}
_QK_NORMS = {"head": "per head", "each": "per head", "full": "over all heads", "unit": "per head"}
_STATES = {
    "convolution": "short convolutions",
    "mamba2": "Mamba 2",
    "delta": "the gated delta rule",
    "linear": "linear attention at fixed rates",
    "rg_lru": "recurrent units (RG-LRU)",
    "selective": "Mamba",
}
HEADINGS = ("architecture", "attention", "norms", "feed-forward", "forms")
FORM_HEADINGS = ("form", "bits on CPUs", "bits elsewhere")
# Those that are not of GGUF, with scales of the usual groups; bits are those of weight_memory.
_OTHER_FORMS = [
    ("GGUF IQ1, IQ2, IQ3, TQ1, TQ2", "dense", "dense"),
    ("MXFP4 (gpt-oss, compressed-tensors)", "4.25", "9"),
    ("NVFP4 (compressed-tensors, Model Optimizer)", "4.5", "dense"),
    ("NF4, FP4 (bitsandbytes, blocks of 64)", "4.5", "dense"),
    ("fp8 (per output, or blocks of 128)", "8", "8"),
    ("AWQ, GPTQ, pack-quantized (4 bits, groups of 128, asymmetric)", "4.5", "4.5"),
    ("GPTQ, int-quantized (8 bits)", "8", "8"),
]


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


def form_rows() -> list[tuple[str, str, str]]:
    """Each form that weights of checkpoints are held in, with its bits in memory on CPUs and elsewhere."""
    found = [
        (f"GGUF {name}", f"{8 * coded:.4g}", f"{8 * GGUF_BYTES[name]:.4g}" if name in GGUF_BYTES else "dense")
        for name, coded in CODED_BYTES.items()
    ]
    return [*sorted(found), *_OTHER_FORMS]


def forms_markdown() -> str:
    """The table of forms of docs/models.md."""
    lines = ["| " + " | ".join(FORM_HEADINGS) + " |", "|" + "---|" * len(FORM_HEADINGS)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in form_rows())]) + "\n"


def main(arguments: list[str] | None = None) -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(prog="millrace models families", description=__doc__)
    parser.add_argument("--json", action="store_true", help="machine-readable output")
    parser.add_argument("--markdown", action="store_true", help="as docs/models.md has it")
    parser.add_argument("--forms", action="store_true", help="of markdown, the table of forms of weights")
    options = parser.parse_args(arguments)
    if options.json:
        print(json.dumps(msgspec.to_builtins(rows())))
    elif options.markdown:
        print(forms_markdown() if options.forms else markdown(), end="")
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
    forms = Table(title="Forms of weights")
    for heading in FORM_HEADINGS:
        forms.add_column(heading)
    for form in form_rows():
        forms.add_row(*form)
    Console().print(table, forms)


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
        attention=", ".join(_attention(spec) if spec.attending else _no_attention(spec)),
        norms=", ".join(_norms(spec)),
        feed_forward=", ".join(_feed_forward(spec)),
        forms=", ".join(forms),
    )


def _no_attention(spec: ModelSpec) -> Iterator[str]:
    if spec.state is not None:
        yield f"none: {_STATES[spec.state.kind]} in all layers"


def _attention(spec: ModelSpec) -> Iterator[str]:
    yield "looks both ways" if spec.bidirectional else "latent" if spec.latent else "grouped-query"
    if spec.latent is not None and spec.latent.indexer is not None:
        yield "positions that an indexer chooses (computed by torch alone)"
    if len({heads.head_dim for heads in spec.layer_heads}) > 1:
        yield "heads of several sizes"
    if len({(heads.num_heads, heads.num_kv_heads) for heads in spec.layer_heads}) > 1:
        yield "numbers of heads by layer"
    if any(heads.value_dim != heads.head_dim for heads in spec.layer_heads):
        yield "values of another size"
    if any(heads.cache_of is not None for heads in spec.layer_heads):
        yield "last layers read earlier keys and values"
    if any(spec.chunks):
        yield "chunks in some layers"
    sliding = [window is not None for window in spec.attention_windows]
    if any(sliding):
        yield "windows" if all(sliding) else "windows in some layers"
    if spec.state is not None:
        beside = " beside it" if set(spec.state.layers) <= set(spec.attending) else " in other layers"
        channels = " with decays by channel" if spec.state.channel_decays else ""
        yield _STATES[spec.state.kind] + channels + beside
    if spec.attention_gate != "none":
        yield "a gate behind it"
    yield from _positions(spec)
    if spec.qk_norm != "none":
        after = " after the rotation" if spec.qk_norm_last else ""
        what = "queries, keys and values" if spec.value_norm else "queries and keys"
        yield f"{what} normed {_QK_NORMS[spec.qk_norm]}{after}"
    if spec.attention_sinks:
        yield "sinks"
    if spec.attention_soft_cap is not None:
        yield "soft cap"


def _positions(spec: ModelSpec) -> Iterator[str]:
    if spec.shared_block is not None:
        yield "in blocks that layers share (computed by torch alone)"
    if spec.learned_positions:
        yield "learned positions"
    ropes = [spec.ropes[each] for each in spec.rope_of_layer]
    turned = {rope.rotary_dim if rope.parameters.get("turning_share") != 0 else 0 for rope in ropes}
    if turned == {0} and not spec.learned_positions:
        yield "no rotation" if spec.latent else "rotation where stated"
    if 0 in turned and len(turned) > 1:
        yield "no rotation in some layers"
    if not spec.latent and 0 < max(turned) < spec.head_dim:
        yield "partial rotation"


def _norms(spec: ModelSpec) -> Iterator[str]:
    yield "layer norm" if spec.norm == "layer" else "RMS"
    yield _PLACEMENTS[spec.norm_placement]


def _feed_forward(spec: ModelSpec) -> Iterator[str]:
    if not spec.feeding:
        yield "none"
        return
    gate = "gated " if spec.gated else ""
    yield f"{gate}{spec.activation.replace('_', ' ')}"
    if any(spec.gate_cuts):
        yield "few gates count in some layers"
    if spec.per_layer is not None:
        yield "embeddings of each layer's own"
    if spec.altup is not None:
        yield "several streams (AltUp)"
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
