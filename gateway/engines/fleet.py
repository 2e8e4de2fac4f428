"""All engines of this deployment: who is attached, what they serve, and the choice among them."""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import random
import re
import socket
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence, Set
from hashlib import blake2b
from pathlib import Path
from typing import Any

import msgspec

from contract.engines import EngineInfo, KvEvent
from contract.errors import MillraceError, Reason, unsupported
from contract.sampling import special_needs
from gateway.config import AutoscalingConfig, RoutingConfig
from gateway.engines.adapters import AdapterNames
from gateway.engines.attachment import Attachment
from gateway.engines.demand import EngineDemand
from gateway.engines.prefix import PrefixIndex, PromptHashes
from gateway.engines.router import (
    DECODE,
    PREFILL,
    RouteCandidate,
    RouteReason,
    can_be_split,
    choose,
    pays,
    seconds_to_first,
)
from gateway.engines.types import EngineState, Submission
from runtime.errors import ConfigError

# Where engines are found: a fixed list, DNS records, or a file; followed while the gateway runs.

_log = logging.getLogger(__name__)

Lookup = Callable[[], Awaitable[list[str]]]

# host:port, [IPv6]:port, with gRPC's dns: or without; or a Unix socket.
_ADDRESS = re.compile(r"unix:\S+|(?:dns:/*)?(?:\[[0-9a-fA-F:.]+\]|[\w.-]+):[0-9]{1,5}", re.ASCII)
# Whoever writes a file in place has been through with it for at least this long.
_SETTLED_S = 0.05
# Kinds of submissions, by what engines they ask for, whose engines are remembered.
_MOST_KINDS = 1024
# Weight of the newest hand-over in what one takes, and what is left of that after each prompt that was not
# handed over for it.
_HAND_OVER, _FORGOTTEN = 0.2, 0.95
# Odd factors that mix 64 bits well (Steele, Lea and Flood, "Fast splittable pseudorandom number generators").
_MIXES, _WORD = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB), (1 << 64) - 1
# All that stands in a file where it is meant that no engine runs: models may be loaded on demand.
NO_ENGINES = "# no engine runs now"


def lookup_of(discovery: str, static: Sequence[str]) -> Lookup:
    """The lookup that `discovery` names: "static", "dns:<host>:<port>" or "file:<path>"; else a
    ConfigError.
    """
    kind, _, rest = discovery.partition(":")
    if kind == "static" and not rest:
        return lambda: _static(static)
    if kind == "dns":
        host, _, port = rest.rpartition(":")
        if host and port.isdigit():
            return lambda: _dns(host, int(port))
    if kind == "file" and rest:
        return lambda: asyncio.to_thread(_file, Path(rest))
    raise ConfigError(
        f'gateway.discovery: {discovery!r} is not "static", "dns:<host>:<port>" or "file:<path>"'
    )


async def _static(targets: Sequence[str]) -> list[str]:
    return list(targets)


async def resolve(host: str, port: int) -> list[Any]:
    """Address records of a name, in getaddrinfo's form."""
    return await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)


async def _dns(host: str, port: int) -> list[str]:
    # A headless service resolves to one record per ready pod.
    infos = await resolve(host, port)
    addresses = {info[4][0] for info in infos}
    return sorted(
        f"[{address}]:{port}" if ":" in str(address) else f"{address}:{port}" for address in addresses
    )


def _file(path: Path) -> list[str]:
    """The addresses in a file. Raises ValueError for one that is being written, or cannot be meant: engines
    are not given up for that.
    """
    content = path.read_bytes()
    time.sleep(_SETTLED_S)
    if path.read_bytes() != content:
        raise ValueError(f"{path} is being written")
    # With or without a byte order mark; what is not UTF-8 can only be a comment, or no address.
    text = content.decode("utf-8-sig", errors="replace")
    lines = (line.partition("#")[0].strip() for line in text.splitlines())
    # An address that stands there twice is one engine.
    addresses = list(dict.fromkeys(line for line in lines if line))
    wrong = next((each for each in addresses if not _ADDRESS.fullmatch(each)), None)
    if wrong is not None:
        raise ValueError(f"{path}: {wrong!r} is not host:port")
    if not addresses and text.strip() != NO_ENGINES:
        raise ValueError(f"{path} names no engine")
    return addresses


async def follow(
    lookup: Lookup, apply: Callable[[Sequence[str]], Awaitable[None]], interval_s: float
) -> None:
    """Applies every change of what `lookup` finds, until cancelled.

    A lookup that fails changes nothing: engines that were found stay.
    """
    known: list[str] | None = None
    while True:
        try:
            found = await lookup()
        except (OSError, ValueError) as error:
            # A name that cannot be looked up is a ValueError.
            _log.warning("discovery of engines failed, the known ones stay: %s", error)
        else:
            if found != known:
                _log.info("engines: %s", ", ".join(found) or "none")
                await apply(found)
                known = found
        await asyncio.sleep(interval_s)


class Route(msgspec.Struct, frozen=True):
    """The engine for a submission, why, and how much of its prompt is expected in the prefix cache."""

    attachment: Attachment
    reason: RouteReason
    prefix_tokens: int = 0


class Split(msgspec.Struct, frozen=True):
    """Where the prompt of a submission is computed for another engine."""

    route: Route
    # Until its first token, as expected; 0 where nothing was measured.
    first_s: float


class Fleet:
    """Attachments by target. `set_targets` may be called at any time: new engines join, others leave.

    Engines say which model they serve; `check` raises what keeps one from being used, and `fingerprint` is
    the vocabulary that they are told, "" where there are several. `on_change` hears of those that come or go,
    `on_unclaimed` what engines have computed for gateways that are gone, by entries of the ledger.
    `attachment` is what keeps one engine attached, `clock` (seconds) what `wanted_engines` goes by.
    """

    def __init__(
        self,
        *,
        gateway: str,
        fingerprint: Callable[[], str] = str,
        check: Callable[[str, EngineInfo], None] = lambda target, info: None,
        routing: RoutingConfig,
        silence_limit_s: float = math.inf,
        on_change: Callable[[], None] = lambda: None,
        on_unclaimed: Callable[[Mapping[str, int]], object] | None = None,
        attachment: type[Attachment] = Attachment,
        autoscaling: AutoscalingConfig | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._gateway = gateway
        self._attachment = attachment
        self._fingerprint = fingerprint
        self._check = check
        self._on_change = on_change
        self.routing = routing
        self._silence_limit_s = silence_limit_s
        self._on_unclaimed = on_unclaimed
        self._use_prefixes = routing.policy == "prefix"
        self._attachments: dict[str, Attachment] = {}
        # Those that left, until they have ended.
        self._retired: list[Attachment] = []
        self.adapters = AdapterNames(self.of)
        self._prefixes: dict[str, PrefixIndex] = {}
        self._choices = itertools.count(1)
        self._last_chosen: dict[str, int] = {}
        self._changed = asyncio.Event()
        self._chance = random.Random(gateway)
        self._takers: dict[tuple[Any, ...], list[Attachment]] = {}
        # What handing over a token of a prompt takes, as measured.
        self._hand_over_s_per_token = 0.0
        self._clock = clock
        self._demand = EngineDemand(autoscaling or AutoscalingConfig(), self._of_pool)

    @property
    def attachments(self) -> Collection[Attachment]:
        """Every engine that is wanted, attached or not."""
        return self._attachments.values()

    @property
    def ready(self) -> list[Attachment]:
        """Engines that take new requests."""
        return [each for each in self._attachments.values() if each.state is EngineState.READY]

    def of(self, model: str) -> list[Attachment]:
        """Engines of a version of a model that are attached; "" is any."""
        return [each for each in self.attachments if each.info and model in ("", each.info.model_key)]

    def serving(self, model: str) -> bool:
        """Whether an engine takes new requests for a version of a model."""
        return self.num_ready(model) > 0

    def num_ready(self, model: str) -> int:
        """How many engines take new requests for a version of a model."""
        return sum(each.state is EngineState.READY for each in self.of(model))

    def _of_pool(self, model: str, pool: str) -> list[Attachment]:
        return [each for each in self.of(model) if each.info and pool in ("", each.info.pool)]

    def note_asked(self, model: str, pool: str, prompt_tokens: int, tpot_target_s: float | None) -> None:
        """A request has come for a version of a model, whether or not an engine serves it now."""
        self._demand.of(model, pool).asked(prompt_tokens, tpot_target_s, self._clock())

    def note_ended(self, submission: Submission, answer_tokens: int) -> None:
        """An answer to it has ended, with so many tokens on all engines."""
        self._demand.of(submission.model, submission.pool).ended(answer_tokens)

    def wanted_engines(self) -> dict[tuple[str, str], float]:
        """Engines that this gateway's requests need, by version of a model and pool; see `engines.demand`."""
        now = self._clock()
        return {key: self._demand.engines(*key, now) for key in self._demand.asked}

    def takers(self, submission: Submission) -> list[Attachment]:
        """Engines that take this submission now; the same list until something changes."""
        needs = frozenset(_needs(submission))
        key = submission.model, submission.adapter, submission.adapter_version, submission.pool, needs
        found = self._takers.get(key)
        if found is None:
            if len(self._takers) >= _MOST_KINDS:
                self._takers.clear()
            found = self._takers[key] = [each for each in self.ready if _fits(each, submission, needs)]
        return found

    def max_model_len(self, model: str) -> int:
        """Longest prompt plus completion that all of a model's engines take; 0 when none is attached."""
        return min((each.info.max_model_len for each in self.of(model) if each.info), default=0)

    async def set_targets(self, targets: Sequence[str]) -> None:
        """Attaches engines that are new in `targets`; those that are missing finish what they have."""
        self._takers.clear()
        for target in targets:
            if target not in self._attachments:
                attachment = self._attachment(
                    target,
                    gateway=self._gateway,
                    fingerprint=self._fingerprint,
                    check=self._check,
                    silence_limit_s=self._silence_limit_s,
                    prefix_sample=self.routing.prefix_sample,
                    on_change=self._note_change,
                    on_kv_events=self._note_kv_events if self._use_prefixes else None,
                    on_unclaimed=self._on_unclaimed,
                )
                self._attachments[target] = attachment
                self._prefixes[target] = PrefixIndex(self.routing.prefix_sample)
                attachment.start()
        for target in [each for each in self._attachments if each not in targets]:
            attachment = self._attachments.pop(target)
            self._prefixes.pop(target, None)
            self._last_chosen.pop(target, None)
            attachment.retire()
            self._retired = [each for each in (*self._retired, attachment) if not each.has_ended]

    async def stop(self) -> None:
        """Closes every stream."""
        self.adapters.stop()
        await self.set_targets([])
        for attachment in self._retired:
            await attachment.stop()

    async def wait_change(self, timeout_s: float) -> bool:
        """Waits until some engine's state changes; False when none did in time."""
        self._changed.clear()
        try:
            # Not `wait_for`: it forgets that it was cancelled when the change comes in the same moment.
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()
        except TimeoutError:
            return False
        return True

    def pick(self, submission: Submission, *, avoid: Collection[str] = ()) -> Route:
        """The engine for `submission`, one outside `avoid` where there is one; raises ENGINE_UNAVAILABLE."""
        ready = self.takers(submission)
        if not ready:
            adapter = self.adapters.refusal(submission)
            raise adapter or self._lacking(submission) or self.unavailable(submission)
        if avoid:
            ready = [each for each in ready if each.target not in avoid] or ready
        # These have others' prompts to compute, as long as anybody else is there.
        ready = [each for each in ready if each.role != PREFILL] or ready
        if len(ready) == 1 and len(self.of(submission.model)) == 1:
            return self._noted(submission, Route(ready[0], RouteReason.ONLY))
        hashes = self._hashes(submission, ready[0]) if self._use_prefixes else None
        return self._taken(submission, self._best(ready, submission, hashes)[0], hashes)

    def split(self, submission: Submission) -> Split | None:
        """The engine that had better compute the prompt for another one; None where one engine does all."""
        least = self.routing.split_tokens
        if not least or len(submission.prompt_token_ids) < least or not can_be_split(submission):
            return None
        takers = self.takers(submission)
        by_role = {role: [each for each in takers if each.role == role] for role in (PREFILL, DECODE)}
        if not all(by_role.values()):
            return None
        hashes = self._hashes(submission, takers[0]) if self._use_prefixes else None
        tokens = len(submission.prompt_token_ids)
        first, ahead = self._best(by_role[PREFILL], submission, hashes)
        alone, behind = self._best(by_role[DECODE], submission, hashes)
        if tokens - behind.cached_tokens < least:
            return None
        first_s = seconds_to_first(ahead, first.attachment.load, tokens)
        moves_s = self._hand_over_s_per_token * (tokens - behind.cached_tokens)
        load = alone.attachment.load
        if not pays(first_s, moves_s, seconds_to_first(behind, load, tokens), num_running=load.num_running):
            # What is not tried is not measured: after a while it is tried again.
            self._hand_over_s_per_token *= _FORGOTTEN
            return None
        return Split(self._taken(submission, first, hashes), first_s)

    def note_hand_over(self, num_tokens: int, seconds: float) -> None:
        """An answer went on so long after its first token, where so much of its prompt was pulled."""
        self._hand_over_s_per_token += _HAND_OVER * (seconds / num_tokens - self._hand_over_s_per_token)

    def _best(
        self, ready: list[Attachment], submission: Submission, hashes: PromptHashes | None
    ) -> tuple[Route, RouteCandidate]:
        home = home_of(submission, ready)
        ready = self._shortlist(ready, submission, hashes, home)
        candidates = [self._candidate(each, hashes, submission, is_home=each is home) for each in ready]
        tokens = len(submission.prompt_token_ids) + len(submission.output_token_ids)
        choice = choose(candidates, tokens, self.routing)
        candidate = candidates[choice.index]
        return Route(ready[choice.index], choice.reason, candidate.cached_tokens), candidate

    def _taken(self, submission: Submission, route: Route, hashes: PromptHashes | None) -> Route:
        target = route.attachment.target
        self._last_chosen[target] = next(self._choices)
        if hashes is not None:
            self._prefixes[target].expect(hashes)
        return self._noted(submission, route)

    def _shortlist(
        self,
        ready: list[Attachment],
        submission: Submission,
        hashes: PromptHashes | None,
        home: Attachment | None,
    ) -> list[Attachment]:
        """Whom it is worth to compare: all, or in a large fleet those that have the prompt's beginning or its
        adapter in memory, up to half of the list, and some by chance. The best of a few is nearly as good as
        the best of all, and a gateway with a thousand engines has no milliseconds for each request
        (Mitzenmacher, "The power of two choices in randomized load balancing", 2001).
        """
        most = self.routing.max_candidates
        # A lane of few engines is not to be missed.
        if len(ready) <= most or self.routing.long_prompt_tokens:
            return ready
        chosen = {} if home is None else {home.target: home}
        prefixes, version = self._prefixes, submission.adapter_version
        first = None if hashes is None else hashes.first_sampled(self.routing.prefix_sample)
        promising = [
            each
            for each in ready
            if (first is not None and prefixes[each.target].holds(first))
            or (version and each.has_adapter(version, loaded=True))
        ]
        if len(promising) > most // 2:
            promising = self._chance.sample(promising, most // 2)
        chosen |= {each.target: each for each in promising}
        for each in self._chance.sample(ready, most):
            if len(chosen) >= most:
                break
            chosen.setdefault(each.target, each)
        return list(chosen.values())

    def _noted(self, submission: Submission, route: Route) -> Route:
        """The route, of which those who count engines have heard."""
        attachment = route.attachment
        # Of what is handed over they heard when its prompt was routed.
        if attachment.info is not None and submission.source is None:
            demand = self._demand.of(submission.model, submission.pool)
            demand.routed(attachment.load, attachment.info, route.prefix_tokens)
        return route

    def _lacking(self, submission: Submission) -> MillraceError | None:
        """What no engine has that would take the submission otherwise; None where that is not the reason."""
        needs = _needs(submission)
        if not any(_fits(each, submission, needs=set()) for each in self.ready):
            return None
        names = sorted(name for name in needs if all(name in _lacks(each) for each in self.ready))
        field = (names or sorted(needs))[0]
        return unsupported(field, "leave it out", "engines of this make have no such option")

    def _hashes(self, submission: Submission, attachment: Attachment) -> PromptHashes | None:
        info = attachment.info
        if info is None or not info.block_size:
            return None
        return PromptHashes(
            submission.prompt_token_ids,
            model=submission.checkpoint,
            adapter=submission.adapter_version,
            salt=submission.cache_salt,
            block_size=info.block_size,
        )

    def _candidate(
        self,
        attachment: Attachment,
        hashes: PromptHashes | None,
        submission: Submission,
        *,
        is_home: bool,
    ) -> RouteCandidate:
        load, info = attachment.load, attachment.info
        used = load.num_total_blocks - load.num_free_blocks
        cached_blocks = 0
        if hashes is not None:
            cached_blocks = self._prefixes[attachment.target].num_cached_blocks(hashes)
        return RouteCandidate(
            # The report is a step old and own submissions may be newer; other gateways' are only in it.
            pending_tokens=max(load.pending_prefill_tokens, attachment.unstarted_tokens),
            num_requests=max(load.num_running + load.num_waiting, attachment.num_open),
            cached_tokens=cached_blocks * (info.block_size if info else 0),
            kv_usage=used / load.num_total_blocks if load.num_total_blocks else 0.0,
            is_home=is_home,
            is_cold=bool(submission.adapter)
            and not attachment.has_adapter(submission.adapter_version, loaded=True),
            long_lane=attachment.target in self.routing.long_lane
            or (info is not None and info.pool in self.routing.long_lane),
            last_chosen=self._last_chosen.get(attachment.target, 0),
        )

    def _note_change(self, attachment: Attachment) -> None:
        self._takers.clear()
        if attachment.info is None and attachment.target in self._prefixes:
            self._prefixes[attachment.target].clear()
        self.adapters.note(attachment)
        self._on_change()
        self._changed.set()

    def reconsider(self) -> None:
        """Asks engines again that could not be used."""
        for each in self.attachments:
            each.reconsider()

    def note_change(self) -> None:
        """Something changed that `wait_change` is about."""
        self._changed.set()

    def _note_kv_events(self, attachment: Attachment, events: list[KvEvent]) -> None:
        index = self._prefixes.get(attachment.target)
        if index is not None:
            index.apply(events)

    def unavailable(self, submission: Submission | None = None, *, model: str = "") -> MillraceError:
        """ENGINE_UNAVAILABLE with the state of every engine that may have the model."""
        model = submission.model if submission is not None else model
        wanted = f" for model {model!r}" if model else ""
        if submission is not None and submission.adapter:
            wanted += f" for adapter {submission.adapter!r}"
        if submission is not None and submission.pool:
            wanted += f" in pool {submission.pool!r}"
        states = ", ".join(
            f"{each.target} {each.state}"
            + (f" in pool {each.info.pool!r}" if each.info and each.info.pool else "")
            + (f" ({each.last_failure})" if each.last_failure else "")
            for each in self.attachments
            if not model or each.info is None or each.info.model_key == model
        )
        return MillraceError(
            Reason.ENGINE_UNAVAILABLE,
            f"no engine takes requests{wanted} now: {states or 'none is configured'}; try again",
            retry_after_s=1.0,
        )


def home_of(submission: Submission, attachments: Sequence[Attachment]) -> Attachment | None:
    """The engine that a prompt cache key leads to, the same for every gateway: the one with the highest hash;
    without a key, an adapter's name does, which is then loaded where it has been before.

    When an engine comes or goes, the keys of the others stay where they are. Tenants do not share keys.
    """
    if not submission.affinity and not submission.adapter:
        return None
    key, salt = (submission.affinity or submission.adapter).encode(), b""
    if submission.affinity:
        salt = submission.cache_salt[:64]

    seed = int.from_bytes(blake2b(key, digest_size=8, key=salt).digest())

    def height(attachment: Attachment) -> int:
        mixed = ((attachment.number ^ seed) * _MIXES[0]) & _WORD
        return ((mixed ^ mixed >> 29) * _MIXES[1]) & _WORD

    return max(attachments, key=height)


def _needs(submission: Submission) -> set[str]:
    """What engines of another make may lack."""
    asked = submission.retention
    needs = special_needs(submission.sampling)
    return needs | {"retention"} if asked is not None and asked.forgets and not asked.if_possible else needs


def _lacks(attachment: Attachment) -> tuple[str, ...]:
    return attachment.info.unsupported if attachment.info is not None else ()


def _fits(attachment: Attachment, submission: Submission, needs: Set[str]) -> bool:
    info = attachment.info
    if info is None:
        return False
    if info.unsupported and not needs.isdisjoint(info.unsupported):
        return False
    version = submission.adapter_version
    has_adapter = not submission.adapter or (bool(version) and attachment.has_adapter(version))
    is_of_model = submission.model in ("", info.model_key)
    return is_of_model and has_adapter and submission.pool in ("", info.pool)
