"""What answers that forget (`kv`) still find in their prompts: needles by depth, for each policy and keep.

    python -m benchmarks.kept_needles [--keeps 0.5 0.25 0.1] [--repeats 12] [--json OUT]

The bundled model answers greedily what is asked at the end of texts of about 1,024 tokens (those of `millrace
gate`, every second with distractors). The line in the text that answers it lies at its beginning, in its
middle or at its end. Beside what is found stands the share of their attention that the answers lost at most.
Nothing here is a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import transformers

from benchmarks.engine.report import Row, options, publish
from benchmarks.forgotten import answered
from benchmarks.gate import WINDOW
from contract.retention import POLICIES, Retention
from services.gate.cases import Case, Pair, ServerAnswer
from services.gate.generated import needles
from services.gate.scoring import Scorer
from services.supervisor.config import BUNDLED_MODEL

_DEPTHS = (0.0, 0.5, 1.0)
_MOST_TOKENS = 24
# Of the bundled model's texts.
_CHARS_PER_TOKEN = 3.6


def found(
    cases: Sequence[Case], tokenizer: Any, prompts: list[tuple[int, ...]], asked: Retention | None
) -> tuple[dict[float, float], float]:
    """Part of the needles that is found at each depth, and the share of attention that was lost."""
    answers, lost = answered(BUNDLED_MODEL, prompts, _MOST_TOKENS, asked, 0.0)
    scorer = Scorer(seeds_hold=True)
    scores: dict[float, list[float]] = {depth: [] for depth in _DEPTHS}
    for case, tokens in zip(cases, answers, strict=True):
        text = tokenizer.decode(tokens, skip_special_tokens=False).partition("<|im_end|>")[0]
        said = ServerAnswer(text=text)
        pair = Pair(case=case, baseline=said, candidate=said)
        scores[case.depth].append(scorer.score(pair).candidate)
    shares = {depth: float(np.mean(each)) for depth, each in scores.items()}
    return shares, float(np.mean(lost)) / _MOST_TOKENS


def main() -> None:
    """Prints one row for each policy and keep."""
    parser = options(__doc__)
    parser.add_argument("--keeps", type=float, nargs="+", default=(0.5, 0.25, 0.1))
    parser.add_argument("--repeats", type=int, default=12)
    arguments = parser.parse_args()
    tokenizer = transformers.AutoTokenizer.from_pretrained(BUNDLED_MODEL)
    cases = needles(
        7,
        window=WINDOW,
        chars_per_token=_CHARS_PER_TOKEN,
        lengths=(1.0,),
        depths=_DEPTHS,
        repeats=arguments.repeats,
        kinds=("single", "distractors"),
        max_tokens=_MOST_TOKENS,
    )
    texts = [
        tokenizer.apply_chat_template(each.body["messages"], tokenize=False, add_generation_prompt=True)
        for each in cases
    ]
    prompts = [tuple(tokenizer(each, add_special_tokens=False)["input_ids"]) for each in texts]
    asked: list[Retention | None] = [
        None,
        *(
            Retention(policy=policy, keep=keep, max_lost=1.0)
            for policy in POLICIES[1:]
            for keep in arguments.keeps
        ),
    ]
    rows: list[Row] = []
    for each in asked:
        shares, lost = found(cases, tokenizer, prompts, each)
        rows.append(
            {
                "policy": "full" if each is None else each.policy,
                "keep": 1.0 if each is None or each.keep is None else each.keep,
                **{f"found at {100 * depth:g} %": share for depth, share in shares.items()},
                "attention lost": lost,
            }
        )
    lengths = f"{min(map(len, prompts))} to {max(map(len, prompts))} tokens"
    notes = f"{arguments.repeats} texts of {lengths} for each depth."
    publish("What answers that forget find in their prompts", rows, arguments.json, notes)


if __name__ == "__main__":
    main()
