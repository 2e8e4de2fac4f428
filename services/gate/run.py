"""Asks both servers round by round until every layer is decided or its cases are over."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from runtime.errors import ConfigError
from services.gate import suite as suites
from services.gate.cases import Case, GateVerdict, LayerName, Pair, Scored, ServerAnswer
from services.gate.client import Endpoint, GateClient, ServerIdentity
from services.gate.kept import KeptAnswers
from services.gate.sandbox import Sandbox
from services.gate.scoring import Scorer
from services.gate.suite import Suite
from services.gate.verdict import LayerResult, differences_of, judge_layer, overall, rule_of

# Cases between looks. Looking costs nothing; asking together keeps servers busy.
ROUND = 20
_JUDGING = (
    "You grade an answer. Question:\n{question}\n\nWhat a right answer says:\n{wanted}\n\nAnswer to grade:\n"
    "{answer}\n\nDoes it say so, and nothing that contradicts it? Reply yes or no."
)

# Layer, cases asked, cases there are, and the verdict so far.
Progress = Callable[[LayerName, int, int, GateVerdict], None]


class Side(msgspec.Struct, frozen=True, kw_only=True):
    """One server of a comparison, as the report names it."""

    url: str
    identity: ServerIdentity
    # What its answers were to forget.
    kv: dict[str, Any] | None = None

    @property
    def named(self) -> str:
        """As a person reads it."""
        kept = "" if self.kv is None else f" with {':'.join(map(str, self.kv.values()))}"
        return f"{self.identity.model}{kept} at {self.url}"


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a run."""

    suite: Suite
    suite_digest: str
    baseline: Side
    candidate: Side
    verdict: GateVerdict
    layers: tuple[LayerResult, ...]


class GateRun:
    """One run. What was asked of the baseline is kept in `folder`; of the candidate until the run is over."""

    def __init__(
        self,
        suite: Suite,
        *,
        suite_folder: Path,
        folder: Path,
        concurrency: int = 8,
        fresh: bool = False,
        all_cases: bool = False,
        judge_key: str = "",
    ) -> None:
        self._suite, self._suite_folder, self._folder = suite, suite_folder, folder
        self._judge_key = judge_key
        self._concurrency, self._fresh, self._all_cases = concurrency, fresh, all_cases

    async def compare(self, baseline: Endpoint, candidate: Endpoint, progress: Progress) -> Comparison:
        """Raises ConfigError for what cannot be compared, and when a server is lost: the same run goes on."""
        mode = self._suite.task.run_code if self._suite.task else "off"
        programs = Sandbox(mode) if mode != "off" else None
        clients = [GateClient(each, concurrency=self._concurrency) for each in (baseline, candidate)]
        async with clients[0] as ours, clients[1] as theirs:
            first, second = await asyncio.gather(ours.identify(), theirs.identify())
            check_comparable(self._suite, first, second)
            window = min(first.window, second.window)
            chars = min(first.chars_per_token, second.chars_per_token)
            forgets = baseline.kv is not None or candidate.kv is not None
            cases = suites.build_cases(self._suite, self._suite_folder, window, chars, forgets=forgets)
            digest = _digest(self._suite, cases)
            asked = [
                _Asked(client, self._kept(digest, identity, role))
                for client, identity, role in ((ours, first, "baseline"), (theirs, second, "candidate"))
            ]
            scorer = Scorer(seeds_hold=first.seeds_hold, programs=programs)
            done = False
            try:
                async with self._judge(ours) as judge:
                    rounds = _Rounds(self._suite, asked, scorer, judge, all_cases=self._all_cases)
                    results = [await rounds.layer(name, cases, progress) for name in self._suite.layers()]
                done = True
            finally:
                asked[0].kept.close()
                # A server whose model is replaced looks the same: its answers are not taken for another's.
                asked[1].kept.close(delete=done)
        return Comparison(
            suite=self._suite,
            suite_digest=digest,
            baseline=Side(url=baseline.url, identity=first, kv=baseline.kv),
            candidate=Side(url=candidate.url, identity=second, kv=candidate.kv),
            verdict=overall(results),
            layers=tuple(results),
        )

    def _kept(self, digest: str, identity: ServerIdentity, role: str) -> KeptAnswers:
        path = self._folder / f"{digest}-{identity.digest}-{role}.jsonl"
        if self._fresh:
            path.unlink(missing_ok=True)
        return KeptAnswers(path)

    def _judge(self, baseline: GateClient) -> GateClient:
        named = self._suite.task.judge if self._suite.task else ""
        if not named:
            return GateClient(baseline.endpoint, concurrency=self._concurrency)
        url, _, model = named.partition("#")
        if not model:
            raise ConfigError(f"[task] judge {named!r}: name the model as well, as in http://host:port#MODEL")
        # The baseline's key is for its own server: another one would learn it.
        same = urlsplit(url)[:2] == urlsplit(baseline.endpoint.url)[:2]
        key = self._judge_key or (baseline.endpoint.api_key if same else "")
        endpoint = Endpoint(url=url, model=model, api_key=key)
        return GateClient(endpoint, concurrency=self._concurrency)


class _Asked:
    """One server and what it has answered."""

    def __init__(self, client: GateClient, kept: KeptAnswers) -> None:
        self.client, self.kept = client, kept

    async def answer(self, case: Case, repetition: int, judge: GateClient) -> ServerAnswer:
        key = case.key(repetition) + (f":{case.id}" if case.check == "judge" else "")
        found = self.kept.get(key)
        if found is not None:
            return found
        answer = await self.client.answer(case)
        if answer.refusal:
            # It may be served another time.
            return answer
        if case.check == "judge":
            question = case.body["messages"][-1].get("content")
            text = _JUDGING.format(question=question, wanted=case.answer, answer=answer.text)
            answer = msgspec.structs.replace(answer, judged=await judge.says_yes(text))
        self.kept.put(key, answer)
        return answer


class _Rounds:
    """Looks at a layer after every round of it."""

    def __init__(
        self, suite: Suite, asked: Sequence[_Asked], scorer: Scorer, judge: GateClient, *, all_cases: bool
    ) -> None:
        self._suite, self._asked, self._scorer, self._judge = suite, asked, scorer, judge
        self._all_cases = all_cases

    async def layer(self, name: LayerName, cases: Sequence[Case], progress: Progress) -> LayerResult:
        """Its result, early where it is decided."""
        own = [case for case in cases if case.layer == name]
        scored: list[Scored] = []
        two_sided = name == "tokens" and not self._scorer.seeds_hold
        rule = rule_of(name, self._suite, two_sided=two_sided)
        for some in _rounds(own):
            pairs = await asyncio.gather(*map(self._pair, some))
            # Programs that are run take their time, in which nothing else waits for an answer.
            scored += [self._scorer.score(pair) for pair in pairs]
            verdict = rule.decide(differences_of(scored))
            progress(name, len(scored), len(own), verdict)
            if verdict is not GateVerdict.NOT_ENOUGH and not self._all_cases:
                break
        return judge_layer(name, scored, self._suite, two_sided=two_sided)

    async def _pair(self, case: Case) -> Pair:
        ours, theirs = self._asked
        wanted = [ours.answer(case, 0, self._judge), theirs.answer(case, 0, self._judge)]
        if case.check == "tokens":
            wanted.append(ours.answer(case, 1, self._judge))
        answers = await asyncio.gather(*wanted)
        for answer in (answers[0], *answers[2:]):
            if answer.refusal:
                raise ConfigError(
                    f"{case.id}: the baseline refuses it ({answer.refusal}); change the case or leave it out"
                )
        return Pair(
            case=case,
            baseline=answers[0],
            candidate=answers[1],
            control=answers[2] if len(answers) > 2 else None,
        )


def _rounds(cases: Sequence[Case]) -> list[list[Case]]:
    """About ROUND cases each; a question's stay together, since half of it would be counted as all."""
    found: list[list[Case]] = []
    for case in cases:
        if not found or (len(found[-1]) >= ROUND and found[-1][-1].question != case.question):
            found.append([])
        found[-1].append(case)
    return found


def check_comparable(suite: Suite, baseline: ServerIdentity, candidate: ServerIdentity) -> None:
    """Raises ConfigError that names what differs: no verdict could be given."""
    names = suite.layers()
    for role, identity in (("baseline", baseline), ("candidate", candidate)):
        if "tokens" in names and not identity.has_logprobs:
            raise ConfigError(
                f"the {role} ({identity.model}) gives no log-probabilities of chats; leave out [tokens]"
            )
        if "intrinsic" in names and not identity.has_echo:
            raise ConfigError(
                f"the {role} ({identity.model}) does not echo prompts with log-probabilities "
                "(/v1/completions, echo and logprobs); leave out [intrinsic]"
            )
    by_tokens = [name for name in ("tokens", "intrinsic") if name in names]
    if by_tokens:
        _check_tokenizers(baseline, candidate, " and ".join(f"[{name}]" for name in by_tokens))


def _check_tokenizers(baseline: ServerIdentity, candidate: ServerIdentity, tables: str) -> None:
    both = f"{baseline.model} and {candidate.model}"
    for ours, theirs in (
        (baseline.token_ids, candidate.token_ids),
        (baseline.token_texts, candidate.token_texts),
    ):
        if not (ours and theirs):
            continue
        if ours == theirs:
            return
        differing = (at for at, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b)
        at = next(differing, min(len(ours), len(theirs)))
        raise ConfigError(
            f"the tokenizers of {both} differ (at token {at} of a probe), so their tokens cannot be "
            f"compared; leave out {tables}"
        )
    raise ConfigError(
        f"nothing tells whether the tokenizers of {both} agree: that takes /tokenize, or /v1/completions "
        f"with echo and logprobs, at both; leave out {tables}"
    )


def _digest(suite: Suite, cases: Sequence[Case]) -> str:
    told = msgspec.json.encode((suite.seed, cases), order="deterministic")
    return hashlib.sha256(told).hexdigest()[:16]
