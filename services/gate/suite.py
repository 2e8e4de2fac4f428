"""`suite.toml`: which layers are judged, by which cases, and what counts as worse.

A layer is judged if its table is there; one without a `file` has generated cases. Whatever is wrong is named
with its file and line before anything is asked.
"""

from __future__ import annotations

import hashlib
import tomllib
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from runtime.errors import ConfigError
from services.gate import generated, lines
from services.gate.cases import LAYERS, USUAL_CHARS_PER_TOKEN, USUAL_WINDOW, Case, LayerName

# How much worse is worse: of scores from 0 to 1, or in nats a token (intrinsic).
Delta = Annotated[float, msgspec.Meta(gt=0, lt=1)]
_Count = Annotated[int, msgspec.Meta(ge=1, le=100_000)]
_Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
_Probability = Annotated[float, msgspec.Meta(gt=0, lt=0.5)]
_MaxTokens = Annotated[int, msgspec.Meta(ge=1, le=32_768)]


class TokensLayer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Equal prompts and seeds: is it the same model at the same precision?"""

    delta: Delta = 0.05
    # False: it is told, and the verdict does not depend on it, as where the precision differs on purpose.
    decides: bool = True
    file: str = ""
    cases: _Count = 120
    max_tokens: _MaxTokens = 32
    temperature: Annotated[float, msgspec.Meta(ge=0, le=2)] = 1.0


class IntrinsicLayer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Perplexity on texts. `delta` is in nats a token: 0.02 is a perplexity 2 % higher."""

    delta: Delta = 0.02
    decides: bool = True
    file: str = ""
    cases: _Count = 60


class TaskLayer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Questions whose answers can be checked."""

    delta: Delta = 0.05
    decides: bool = True
    file: str = ""
    cases: _Count = 120
    max_tokens: _MaxTokens = 128
    # Answers of the check "code" are programs of a model: see sandbox.py for what holds them.
    run_code: Literal["off", "confined", "with network"] = "off"
    # Who judges answers of the check "judge", as http://host:port#MODEL; the baseline when empty.
    judge: str = ""


class StructureLayer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Validity under schemas, tools chosen when they should be, and valid arguments."""

    delta: Delta = 0.05
    decides: bool = True
    file: str = ""
    cases: _Count = 120
    max_tokens: _MaxTokens = 128


class LongContextLayer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Needles, by depth and length."""

    delta: Delta = 0.05
    decides: bool = True
    # Shares of the window.
    lengths: tuple[Annotated[float, msgspec.Meta(gt=0, le=1)], ...] = (0.25, 0.5, 0.9)
    depths: tuple[_Share, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)
    # Cases of each length and depth; kinds take turns.
    repeats: _Count = 8
    kinds: tuple[generated.NeedleKind, ...] = ("single", "distractors", "several", "cited")
    # In tokens; 0 is the smaller of both servers' windows, and 4,096 at most.
    window: Annotated[int, msgspec.Meta(ge=0, le=10_000_000)] = 0
    max_tokens: _MaxTokens = 64


class BehaviourLayer(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Refusals, language and format are kept."""

    delta: Delta = 0.05
    decides: bool = True
    file: str = ""
    cases: _Count = 120
    max_tokens: _MaxTokens = 64


class Suite(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The whole file."""

    name: str = "default"
    seed: int = 0
    # Probability that identical deployments are called worse in any layer, however often somebody looks.
    false_alarm: _Probability = 0.01
    # Probability that "not worse by more than delta" is said of a layer that is.
    miss: _Probability = 0.05
    tokens: TokensLayer | None = None
    intrinsic: IntrinsicLayer | None = None
    task: TaskLayer | None = None
    structure: StructureLayer | None = None
    long_context: LongContextLayer | None = None
    behaviour: BehaviourLayer | None = None

    def layers(self) -> tuple[LayerName, ...]:
        """Those that are judged."""
        return tuple(name for name in LAYERS if getattr(self, name) is not None)

    def delta(self, layer: LayerName) -> float:
        """How much worse is worse, in the layer's unit."""
        return float(getattr(self, layer).delta)

    def decides(self, layer: LayerName) -> bool:
        """Whether the verdict depends on this layer."""
        return bool(getattr(self, layer).decides)

    def alarm(self) -> float:
        """What each layer may spend of `false_alarm`: layers that decide share it equally (Bonferroni)."""
        return self.false_alarm / max(sum(map(self.decides, self.layers())), 1)


DEFAULT = Suite(
    tokens=TokensLayer(),
    intrinsic=IntrinsicLayer(),
    task=TaskLayer(),
    structure=StructureLayer(),
    long_context=LongContextLayer(),
    behaviour=BehaviourLayer(),
)


def read_suite(path: Path | None) -> Suite:
    """The suite of a file, or the default one; raises ConfigError that names key and remedy."""
    if path is None:
        return DEFAULT
    try:
        suite = msgspec.convert(tomllib.loads(path.read_text(encoding="utf-8")), Suite)
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not TOML: {error}") from error
    except msgspec.ValidationError as error:
        known = ", ".join(("name, seed, false_alarm, miss", *LAYERS))
        raise ConfigError(f"{path}: {error}; its keys are {known}, and docs/gate.md lists theirs") from error
    if not any(map(suite.decides, suite.layers())):
        raise ConfigError(f"{path}: no layer decides; add a table of {', '.join(LAYERS)} with decides = true")
    return suite


def check_cases(suite: Suite, path: Path | None) -> None:
    """Raises ConfigError for what is wrong in files of the suite at `path`, before anything is served, asked
    or quantized. The cases are made anew for the window and the tokenizer that servers turn out to have.
    """
    build_cases(suite, path.parent if path else Path(), USUAL_WINDOW, USUAL_CHARS_PER_TOKEN)


def build_cases(
    suite: Suite, folder: Path, window: int, chars_per_token: float, *, forgets: bool = False
) -> list[Case]:
    """All cases of a suite whose files lie in `folder`, in an order that mixes what is easy and hard.

    `window` is in tokens. Where a side `forgets`, texts are continued instead of echoed: a prompt is computed
    before anything is forgotten. Raises ConfigError that names file and line.
    """
    cases: list[Case] = []
    for name in suite.layers():
        settings = getattr(suite, name)
        if isinstance(settings, LongContextLayer):
            cases += generated.needles(
                suite.seed,
                window=settings.window or min(window, 4096),
                chars_per_token=chars_per_token,
                lengths=settings.lengths,
                depths=settings.depths,
                repeats=settings.repeats,
                kinds=settings.kinds,
                max_tokens=settings.max_tokens,
            )
            continue
        if settings.file:
            found = lines.read_lines(folder / settings.file, name)
        else:
            found = generated.lines_of(name, suite.seed, settings.cases, is_long=forgets)
        if forgets and name == "intrinsic":
            cases += map(lines.continued, found)
        else:
            cases += lines.to_cases(found, name, settings, suite.seed)
    _check_code(suite, cases)
    return _shuffled(cases, suite.seed)


def _check_code(suite: Suite, cases: list[Case]) -> None:
    runs = suite.task is not None and suite.task.run_code != "off"
    for case in cases:
        if case.check == "code" and not runs:
            raise ConfigError(
                f"{case.id}: its answer is a program, and [task] run_code is off; set it to "
                '"confined" to run what models write in a sandbox'
            )


def _shuffled(cases: list[Case], seed: int) -> list[Case]:
    """By a digest, so that one case more leaves the others where they are; a question's stay together."""

    def place(case: Case) -> tuple[int, str, str]:
        drawn = hashlib.sha256(f"{seed} {case.layer} {case.question}".encode()).hexdigest()
        return (LAYERS.index(case.layer), drawn, case.id)

    return sorted(cases, key=place)
