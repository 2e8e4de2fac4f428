"""`[engine.speculation]`: what drafts, and how much of it is verified. `engine.config` has it as a part."""

from __future__ import annotations

from typing import Literal

import msgspec

from runtime.errors import ConfigError

# Whose drafts may be a tree; who drafts by files of its own, or by a look alone.
_TREE_METHODS = ("eagle3", "medusa", "mtp")
_METHODS_OF_FILES = ("draft_model", "eagle3", "medusa")
LOOKUPS = ("ngram", "suffix")
# Drafts of a sequence and step at most, those of a tree among them; and rows that lookahead adds to it.
MOST_DRAFTS, _MOST_LOOKAHEAD_ROWS = 64, 256
# Tokens that a lookup compares, and those of answers that suffix keeps.
_MOST_NGRAM, _MOST_ANSWER_TOKENS = 64, 1 << 24


class SpeculationConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[engine.speculation]`: tokens proposed cheaply and verified in one step. Never changes the output."""

    # ngram looks a sequence's end up in its own text; suffix also in the tenant's own recent answers.
    # draft_model runs a small model ahead; eagle3 a trained head over hidden states of the model itself;
    # medusa has a head for each draft, all over the last hidden state; mtp runs the layer that predicts
    # further tokens, of the model's own checkpoint or trained for it. lookahead has the model guess many
    # tokens ahead of each text at once, and verifies n-grams that come of it.
    method: Literal["off", "ngram", "suffix", "draft_model", "eagle3", "medusa", "mtp", "lookahead"] = "off"
    # Directory of the draft model, of the same vocabulary; of the heads where the method is eagle3 or medusa,
    # or of the layer where it is mtp. Empty with mtp: the layer lies in the model's own checkpoint.
    draft_model: str = ""
    num_draft_tokens: int = 4
    # Tokens that eagle3 and mtp look back on, of those that were computed since the sequence came in.
    head_context_tokens: int = 512
    # Longest and shortest suffix that prompt lookup searches for.
    max_ngram: int = 4
    min_ngram: int = 2
    # Tokens of recent answers that suffix keeps, of all tenants together: about 125 bytes of memory each.
    answer_tokens: int = 131_072
    # Columns of lookahead's window: each has num_draft_tokens guesses, and with the token behind them is an
    # n-gram. So many of those that begin with a text's last token are verified at once.
    lookahead_window: int = 3
    lookahead_candidates: int = 3
    # Drafts of eagle3, medusa and mtp beside the likeliest num_draft_tokens, written as Medusa's choices:
    # paths of ranks from 0. [1, 0, 0] is the second likeliest token, and what is likeliest behind it, twice.
    # What is before a path, and what is likelier behind the same drafts, belongs to the tree. Empty: a chain.
    tree: tuple[tuple[int, ...], ...] = ()
    # A sequence gets as many drafts as pay in measured time (at most num_draft_tokens), and none while fewer
    # than this share of them would be accepted. 0 always drafts, whatever it costs.
    min_acceptance: float = 0.1

    def validate(self) -> None:
        """Raises ConfigError naming the first key whose value cannot work, its limit and the remedy."""
        most_rows = self.num_draft_tokens * (self.lookahead_window + self.lookahead_candidates - 1)
        for key, is_wrong, words in (
            ("num_draft_tokens", self.num_draft_tokens > MOST_DRAFTS, f"{MOST_DRAFTS} at most; lower it"),
            ("max_ngram", self.max_ngram > _MOST_NGRAM, f"{_MOST_NGRAM} at most; lower it"),
            (
                "answer_tokens",
                self.answer_tokens > _MOST_ANSWER_TOKENS,
                f"{_MOST_ANSWER_TOKENS} at most, which take 2 GB; lower it",
            ),
            ("min_ngram", self.min_ngram < 1, "must be at least 1; raise it"),
            (
                "min_ngram",
                self.min_ngram > self.max_ngram,
                f"exceeds max_ngram = {self.max_ngram}, so that nothing is found; lower it, or raise that",
            ),
            ("min_acceptance", not 0 <= self.min_acceptance <= 1, "a share, from 0 to 1; 0.1 is usual"),
            (
                "lookahead_window",
                self.method == "lookahead" and most_rows > _MOST_LOOKAHEAD_ROWS,
                f"with lookahead_candidates and num_draft_tokens it adds {most_rows} rows to a sequence's "
                f"step, {_MOST_LOOKAHEAD_ROWS} at most; lower one of them",
            ),
        ):
            if is_wrong:
                raise ConfigError(f"engine.speculation.{key} = {getattr(self, key)!r}: {words}")
        self._check_tree()
        self._check_draft_model()

    def _check_draft_model(self) -> None:
        """A folder that is needed is named, and one that is named is read."""
        key, method = f"engine.speculation.draft_model = {self.draft_model!r}", f"method = {self.method!r}"
        if self.method in _METHODS_OF_FILES and not self.draft_model:
            raise ConfigError(
                f"{key}: {method} drafts by what lies in this folder; name it, or set the method to ngram, "
                "suffix or lookahead, which need none"
            )
        if self.draft_model and self.method in (*LOOKUPS, "lookahead"):
            raise ConfigError(
                f"{key}: {method} reads none; leave it empty, or set the method to draft_model, eagle3, "
                "medusa or mtp"
            )

    def _check_tree(self) -> None:
        """What is no tree, or one of a method that makes none, is refused."""
        if self.tree and self.method not in _TREE_METHODS:
            raise ConfigError(
                f"engine.speculation.tree: drafts of method = {self.method!r} are no tree; leave it empty, "
                f"or set the method to one of {', '.join(_TREE_METHODS)}"
            )
        for path in self.tree:
            if not 0 < len(path) <= self.num_draft_tokens or min(path) < 0:
                raise ConfigError(
                    f"engine.speculation.tree = [{list(path)}]: a path has ranks from 0, one to "
                    f"num_draft_tokens = {self.num_draft_tokens} of them; shorten it, or raise that"
                )
            if not any(path) or self.tree.count(path) > 1:
                raise ConfigError(
                    f"engine.speculation.tree has {list(path)}, which adds nothing to the likeliest drafts "
                    "and the other paths; leave it out"
                )
