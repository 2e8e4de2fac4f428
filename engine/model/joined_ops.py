"""A dense feed-forward and experts side by side as native ops; `joined_experts` has the same in torch.

Shape letters: T tokens, E hidden size.
"""

from __future__ import annotations

from engine.model.ops_builder import OpsBuilder
from engine.model.records import Floats, JoinedFeedForward, Norm
from kernels.host import address_of
from kernels.norm.native import NormArgs, norm_op


def feed_joined(builder: OpsBuilder, joined: JoinedFeedForward, x: Floats, out: Floats) -> None:
    """out [T, E] from x [T, E], which the dense feed-forward takes, and from the stream."""
    sparse = builder.buffer("sparse_change", out.shape[1])
    builder.feed_forward(joined.dense, x, out, False)
    asked = builder.norm(joined.router_norm, "asked")
    inner = builder.norm(joined.sparse_norm, "second_normed")
    builder.sparse_feed_forward(joined.sparse, inner, sparse, False, asked)
    for norm, change in ((joined.dense_after, None), (joined.sparse_after, sparse)):
        _add_normed(builder, norm, out, change)


def _add_normed(builder: OpsBuilder, norm: Norm, out: Floats, change: Floats | None) -> None:
    """The norm of out [T, E] in its place; or that of a change added to it."""
    args = NormArgs(step=builder.step, x=address_of(out), width=out.shape[1], eps=norm.eps)
    if change is None:
        args.weight, args.out = address_of(norm.weight), address_of(out)
    else:
        args.change, args.change_weight = address_of(change), address_of(norm.weight)
        args.residual = address_of(out)
    builder.ops.append(norm_op(builder.library, args, norm, out, change))
