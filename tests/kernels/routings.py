"""Every way to choose experts, over odd numbers of them, for the tests of every back end."""

from __future__ import annotations

from kernels.experts.routing import Routing

GROUPS = {"num_groups": 4, "num_active_groups": 2}
ROUTINGS = {
    "softmax": Routing(num_experts=9, num_active=3),
    "not normalized": Routing(num_experts=5, num_active=2, normalized=False, scaling=2.5),
    "all": Routing(num_experts=4, num_active=4),
    "softmax of best": Routing(num_experts=32, num_active=4, scoring="softmax_of_best"),
    "softmax of nearly all": Routing(num_experts=5, num_active=4, scoring="softmax_of_best"),
    "one by sigmoid": Routing(num_experts=8, num_active=1, scoring="sigmoid", scaling=1.5),
    "sparse mixer": Routing(num_experts=12, num_active=2, scoring="sparse_mixer", tolerance=0.4),
    "weighing inputs": Routing(
        num_experts=6, num_active=2, scoring="sigmoid", normalized=False, weighs_inputs=True
    ),
    "groups by their best": Routing(num_experts=20, num_active=3, **GROUPS),
    "groups by their two best": Routing(
        num_experts=24, num_active=6, scoring="sigmoid", scaling=1.5, group_score="two_best", **GROUPS
    ),
    "odd groups by their two best": Routing(
        num_experts=15,
        num_active=4,
        scoring="sigmoid",
        num_groups=3,
        num_active_groups=2,
        group_score="two_best",
    ),
}
