"""What four bits of keys and values lose by how they are grouped: token by token, rotated; keys by channel,
as ours and KIVI's are (arXiv 2402.02750); both.

    python -m benchmarks.kv_channels [--models bundled smollm2-135m] [--texts 12] [--tokens 512] [--json OUT]

Texts are read by transformers in float32, whose attention sees keys and values as a cache would hold them;
"token, rotated" is how `kivi4` has values, and "keys by channel (kivi4)" the form itself, by their own code.
What is grouped by channel has one scale for each channel of so many tokens. Who does so keeps the tokens of
the newest group whole until it is full, so "newest ... whole" tells that apart. Bytes are those of a token in
one kv head, keys and values, of groups that are full. KIVI's groups have a least value beside the scale (keys
by channel, values by token).

`nats lost` is the mean of a token that counts, beside the model with float32 keys and values, with its
standard error over texts; `of the first` is that as a multiple of the first form's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.engine.report import Row, options, publish
from benchmarks.quality_forms import SUBJECTS, Text
from kernels.paged_cache import four_bits, key_groups
from kernels.paged_cache.host import KEY_GROUP

# Shape letters: K kv heads, T tokens, D head dim, G tokens of a group.

Rounding = Callable[[Tensor], Tensor]

_SCALE_BYTES = 2  # bfloat16, but for the rotated
_FIRST = "token, rotated"


def by_token(x: Tensor) -> Tensor:
    """Rotated, as values of `kivi4` are: [K, T, D]."""
    return four_bits.dequantize(*four_bits.quantize(x))


def as_kivi4(x: Tensor) -> Tensor:
    """Keys [K, T, D] as `kivi4` rounds them; those of a block that is not full are whole anyway."""
    full = x.shape[1] // KEY_GROUP * KEY_GROUP
    if not full:
        return x
    blocks = x[:, :full].unflatten(1, (-1, KEY_GROUP))
    return torch.cat((key_groups.dequantize(*key_groups.quantize(blocks)).flatten(1, 2), x[:, full:]), 1)


def even(x: Tensor, axis: int) -> Tensor:
    """16 levels around zero, whose scale is common along the axis, in bfloat16."""
    scale = (x.abs().amax(axis, keepdim=True) / four_bits.LIMIT).bfloat16().float().clamp_min(1e-30)
    levels = ((x / scale).clamp(-four_bits.LIMIT, four_bits.LIMIT) + four_bits.LIMIT) / 2
    return (2 * levels.round() - four_bits.LIMIT) * scale


def between(x: Tensor, axis: int) -> Tensor:
    """16 levels from the least to the most along the axis, both in bfloat16 (KIVI's)."""
    least = x.amin(axis, keepdim=True).bfloat16().float()
    step = ((x.amax(axis, keepdim=True) - least) / 15).bfloat16().float().clamp_min(1e-30)
    return ((x - least) / step).round().clamp(0, 15) * step + least


def by_channel(rounded: Callable[[Tensor, int], Tensor], group: int, *, rotated: bool = False) -> Rounding:
    """Keys [K, T, D] in groups of tokens; the last, if it is not full, as if it were."""

    def apply(x: Tensor) -> Tensor:
        turned = four_bits.turn(x) if rotated else x
        parts = [rounded(part, 1) for part in turned.split(group, dim=1)]
        found = torch.cat(parts, 1)
        return four_bits.turn_back(found) if rotated else found

    return apply


def in_parts(x: Tensor, size: int = 32) -> Tensor:
    """KIVI's values [K, T, D]: each token in parts of 32 elements."""
    parts = x.unflatten(-1, (-1, min(size, x.shape[-1])))
    return between(parts, -1).flatten(-2)


@dataclass(frozen=True, kw_only=True)
class CacheForm:
    """How keys and values are rounded, and of how many tokens the newest group is whole (0: none is)."""

    keys: Rounding
    values: Rounding
    newest: int = 0
    # Whether values are never whole.
    whole_keys_alone: bool = False
    # Of a token in one kv head of D elements.
    bytes_of: Callable[[int], float]


def forms(group: int) -> dict[str, CacheForm]:
    """By name. Those by channel in groups of a block, and of as many tokens as make their bytes those of the
    first.
    """

    def by_one_scale(dim: int) -> float:
        return 2 * (dim / 2 + 4)

    def channels(tokens: int, numbers: int) -> Callable[[int], float]:
        return lambda dim: by_one_scale(dim) - 4 + numbers * _SCALE_BYTES * dim / tokens

    found = {
        _FIRST: CacheForm(keys=by_token, values=by_token, bytes_of=by_one_scale),
        **{
            f"token, rotated, newest {tokens} whole": CacheForm(
                keys=by_token, values=by_token, newest=tokens, bytes_of=by_one_scale
            )
            for tokens in (group, 2 * group, 4 * group)
        },
        "token, not rotated": CacheForm(
            keys=lambda x: even(x, -1),
            values=lambda x: even(x, -1),
            bytes_of=lambda dim: by_one_scale(dim) - 4,
        ),
        "keys by token, values whole": CacheForm(
            keys=by_token, values=lambda x: x, bytes_of=lambda dim: by_one_scale(dim) / 2 + 2 * dim
        ),
    }
    for tokens in (group, 2 * group, 4 * group):
        for name, rounded, numbers in (("", even, 1), (", least and step", between, 2)):
            for rotated in (False, True):
                kind = "both" if rotated else "keys by channel"
                found[f"{kind}, {tokens} tokens{name}"] = CacheForm(
                    keys=by_channel(rounded, tokens, rotated=rotated),
                    values=by_token,
                    newest=tokens,
                    bytes_of=channels(tokens, numbers),
                )
    found["keys by channel (kivi4)"] = CacheForm(
        keys=as_kivi4,
        values=by_token,
        newest=KEY_GROUP,
        whole_keys_alone=True,
        bytes_of=channels(KEY_GROUP, 2),
    )
    kivi = 2 * group
    found[f"KIVI, {kivi} tokens"] = CacheForm(
        keys=by_channel(between, kivi),
        values=in_parts,
        newest=kivi,
        bytes_of=lambda dim: dim + 2 * _SCALE_BYTES * (dim / kivi + dim / min(32, dim)),
    )
    return found


class FormedAttention:
    """Attention that sees what a cache of some form holds."""

    def __init__(self) -> None:
        self.form: CacheForm | None = None

    def attend(
        self, module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, scaling: float, **_: Any
    ) -> tuple[Tensor, None]:
        """q [1, H, T, D], k and v [1, K, T, D] -> [1, T, H, D]."""
        form, times = self.form, q.shape[1] // k.shape[1]
        num_tokens = q.shape[2]
        seen_k, seen_v = (k, v) if form is None else (form.keys(k[0])[None], form.values(v[0])[None])
        k, seen_k, v, seen_v = (each.repeat_interleave(times, 1) for each in (k, seen_k, v, seen_v))
        scores = q @ seen_k.mT * scaling
        positions = torch.arange(num_tokens)
        is_new = torch.zeros(num_tokens, num_tokens, dtype=torch.bool)
        if form is not None and form.newest:
            is_new = (positions // form.newest)[:, None] == positions // form.newest
            scores = torch.where(is_new, q @ k.mT * scaling, scores)
        future = positions > positions[:, None]
        weights = scores.masked_fill(future, float("-inf")).softmax(-1)
        if form is not None and form.whole_keys_alone:
            return (weights @ seen_v).transpose(1, 2), None
        found = weights.masked_fill(is_new, 0.0) @ seen_v
        if form is not None and form.newest:
            found = found + weights.masked_fill(~is_new, 0.0) @ v
        return found.transpose(1, 2), None


@contextmanager
def reading(checkpoint: Path) -> Iterator[tuple[Any, FormedAttention]]:
    """A model with such an attention."""
    attention = FormedAttention()
    transformers.AttentionInterface.register("formed", attention.attend)
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    model.config._attn_implementation = "formed"
    with torch.inference_mode():
        yield model, attention


def nats(model: Any, texts: list[Text]) -> list[NDArray[np.float64]]:
    """Of each text the tokens that count."""
    found = []
    for ids, counts in texts:
        logits = model(torch.tensor([ids]), use_cache=False).logits[0, :-1]
        said = torch.nn.functional.cross_entropy(logits, torch.tensor(ids[1:]), reduction="none")
        found.append(said.double().numpy()[np.asarray(counts[1:], bool)])
    return found


def rows_of(model: Any, attention: FormedAttention, texts: list[Text], name: str, group: int) -> list[Row]:
    """One for each form."""
    whole = nats(model, texts)
    num_tokens = sum(map(len, whole))
    mean = sum(each.sum() for each in whole) / num_tokens
    dim = getattr(model.config, "head_dim", None) or (
        model.config.hidden_size // model.config.num_attention_heads
    )
    rows: list[Row] = []
    for form_name, form in forms(group).items():
        attention.form = form
        told = nats(model, texts)
        attention.form = None
        by_text = np.array([(a - b).sum() for a, b in zip(told, whole, strict=True)])
        lost = float(by_text.sum() / num_tokens)
        spread = float(np.std(by_text, ddof=1) * len(by_text) ** 0.5 / num_tokens)
        rows.append(
            {
                "model": name,
                "four bits": form_name,
                "bytes": form.bytes_of(dim),
                "perplexity": float(np.exp(mean + lost)),
                "rise %": float(100 * np.expm1(lost)),
                "nats lost": lost,
                "±": spread,
                "of the first": lost / float(rows[0]["nats lost"]) if rows else 1.0,
            }
        )
    return rows


def main() -> None:
    """Prints one row for each model and form."""
    parser = options(__doc__)
    parser.add_argument("--models", nargs="+", choices=tuple(SUBJECTS), default=list(SUBJECTS))
    parser.add_argument("--texts", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=512, help="of each text, at most")
    parser.add_argument("--group", type=int, default=16, help="tokens of a block")
    parser.add_argument("--work", type=Path, default=Path("build/quality"))
    given = parser.parse_args()
    rows: list[Row] = []
    counts: Mapping[str, int] = {}
    for name in given.models:
        work = given.work / name
        work.mkdir(parents=True, exist_ok=True)
        subject = SUBJECTS[name](work, given.texts, given.tokens)
        counts = {**counts, subject.name: sum(len(ids) for ids, _ in subject.texts)}
        with reading(subject.checkpoint) as (model, attention):
            rows += rows_of(model, attention, subject.texts, subject.name, given.group)
    said = ", ".join(f"{count} of {name}" for name, count in counts.items())
    publish("Four bits of keys and values", rows, given.json, f"Tokens that were read: {said}.")


if __name__ == "__main__":
    main()
