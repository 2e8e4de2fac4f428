"""A client of `/v1` of any server: what the gate asks, and what it reads of the answers."""

from __future__ import annotations

import asyncio
import hashlib
from typing import Any
from urllib.parse import urlsplit

import httpx
import msgspec

from runtime.errors import ConfigError
from services.gate.cases import (
    CHAT,
    COMPLETIONS,
    USUAL_CHARS_PER_TOKEN,
    USUAL_WINDOW,
    Case,
    ServerAnswer,
    ToolInvocation,
)

# How often, and how long in seconds, a server that is away or busy is asked again.
_TRIES = 6
_PAUSE_S = 1.0
_BUSY = (408, 429, 500, 502, 503, 504, 529)
_REQUEST_LIMIT_S = 600.0
# A text in which tokenizers differ: scripts, digits, spaces, code.
TOKENIZER_PROBE = (
    "Tokenizers differ in 1234567 digits,  spaces\tand\n\nlines; in naïve façades, Größe, Привет, 你好, "
    "def f(x): return x**2 and unbelievableness."
)


class Endpoint(msgspec.Struct, frozen=True, kw_only=True):
    """One server and one of its models."""

    url: str
    model: str = ""
    api_key: str = ""
    # What its answers may forget of their keys and values (`kv` of every case); None: nothing is said of it.
    kv: dict[str, Any] | None = None

    @property
    def named(self) -> str:
        """As a person names it; without the key."""
        return f"{self.url}#{self.model}"


class ServerIdentity(msgspec.Struct, frozen=True, kw_only=True):
    """What a server says of itself and its model; of equal identities kept answers may be used again."""

    model: str
    window: int
    # How it splits TOKENIZER_PROBE, as ids and as texts; empty where it does not tell.
    token_ids: tuple[int, ...]
    token_texts: tuple[str, ...]
    chars_per_token: float
    # Of all of it, and of what it answers to a few fixed prompts.
    digest: str
    has_logprobs: bool
    # Whether it answers an equal seed equally.
    seeds_hold: bool
    has_echo: bool


class GateClient:
    """Asks one endpoint. A server that is away is asked again for a while; what it refuses is an answer."""

    def __init__(self, endpoint: Endpoint, *, concurrency: int = 8) -> None:
        if urlsplit(endpoint.url).scheme not in ("http", "https"):
            raise ConfigError(f"{endpoint.url!r}: expected http://host:port or https://host:port")
        headers = {"authorization": f"Bearer {endpoint.api_key}"} if endpoint.api_key else {}
        limits = httpx.Limits(max_connections=concurrency, max_keepalive_connections=concurrency)
        self.endpoint = endpoint
        self._http = httpx.AsyncClient(
            base_url=endpoint.url.rstrip("/").removesuffix("/v1"),
            headers=headers,
            timeout=httpx.Timeout(_REQUEST_LIMIT_S, connect=10.0),
            limits=limits,
        )
        self._turns = asyncio.Semaphore(concurrency)

    async def __aenter__(self) -> GateClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def answer(self, case: Case) -> ServerAnswer:
        """What the server says; raises ConfigError when it does not answer at all."""
        asked = case.body if self.endpoint.kv is None else case.body | {"kv": self.endpoint.kv}
        status, body = await self._ask(case.path, asked)
        if status != 200:
            return ServerAnswer(refusal=_problem(status, body))
        try:
            if case.path == CHAT:
                return _read_chat(body)
            read = _read_continued if case.check == "continued" else _read_echo
            return read(body, case.body["prompt"])
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            return ServerAnswer(refusal=f"its answer is not of OpenAI's form: {error!r}")

    async def says_yes(self, question: str) -> bool:
        """Of a judge: whether its answer begins with yes."""
        body = {"messages": [{"role": "user", "content": question}], "max_tokens": 8, "temperature": 0}
        status, found = await self._ask(CHAT, body)
        if status != 200:
            raise ConfigError(f"judge {self.endpoint.named}: {_problem(status, found)}")
        return _read_chat(found).text.strip().lower().startswith("yes")

    async def identify(self) -> ServerIdentity:
        """Asks the server what it is and can; raises ConfigError where it cannot be asked at all."""
        card = await self._card()
        self.endpoint = msgspec.structs.replace(self.endpoint, model=str(card["id"]))
        echo = await self._ask(COMPLETIONS, _ECHO)
        echoed = _read_echo_or_none(*echo)
        first, second, counted = [await self._ask(CHAT, body) for body in (_SEEDED, _SEEDED, _COUNTED)]
        if first[0] != 200:
            raise ConfigError(f"{self.endpoint.named}: {_problem(*first)}")
        answers = [_read_chat(body) for status, body in (first, second) if status == 200]
        token_ids = await self._token_ids()
        token_texts = echoed.tokens if echoed else ()
        parts = {key: card.get(key) for key in ("id", "root", "created", "max_model_len", "fingerprint")}
        greedy = _read_chat(counted[1]).text if counted[0] == 200 else ""
        known: tuple[Any, ...] = (self.endpoint.url, parts, token_ids, token_texts, greedy)
        if self.endpoint.kv is not None:
            known = (*known, self.endpoint.kv)
        told = msgspec.json.encode(known, order="deterministic")
        num_tokens = (counted[1].get("usage") or {}).get("prompt_tokens") or len(_HAY) / USUAL_CHARS_PER_TOKEN
        return ServerIdentity(
            model=str(card["id"]),
            window=int(card.get("max_model_len") or USUAL_WINDOW),
            token_ids=token_ids,
            token_texts=token_texts,
            # A template takes some, too: texts come out a little short rather than too long.
            chars_per_token=len(_HAY) / num_tokens,
            digest=hashlib.sha256(told).hexdigest()[:16],
            has_logprobs=bool(answers[0].logprobs),
            seeds_hold=len({each.tokens or each.text for each in answers}) == 1,
            has_echo=echoed is not None,
        )

    async def cards(self) -> list[dict[str, Any]]:
        """What `/v1/models` says of each model; raises ConfigError."""
        status, body = await self._ask("/v1/models", None)
        if status != 200:
            raise ConfigError(f"{self.endpoint.url}: /v1/models: {_problem(status, body)}")
        try:
            return [dict(each) for each in body["data"] if each["id"]]
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"{self.endpoint.url}: /v1/models is not of OpenAI's form") from error

    async def _card(self) -> dict[str, Any]:
        cards = await self.cards()
        found = [each for each in cards if self.endpoint.model in ("", each["id"])]
        if not found:
            names = ", ".join(str(each["id"]) for each in cards) or "none"
            raise ConfigError(f"{self.endpoint.url} has no model {self.endpoint.model!r}; it has {names}")
        return found[0]

    async def _token_ids(self) -> tuple[int, ...]:
        """From `/tokenize`, which ours and vLLM have beside `/v1`."""
        status, body = await self._ask("/tokenize", {"prompt": TOKENIZER_PROBE})
        ids = body.get("tokens") if status == 200 else None
        return tuple(map(int, ids)) if isinstance(ids, list) else ()

    async def _ask(self, path: str, body: dict[str, Any] | None) -> tuple[int, dict[str, Any]]:
        """Status and body; no body asks by GET."""
        problem = ""
        for attempt in range(_TRIES):
            if attempt:
                await asyncio.sleep(_PAUSE_S * 2 ** (attempt - 1))
            try:
                async with self._turns:
                    if body is None:
                        response = await self._http.get(path)
                    else:
                        response = await self._http.post(path, json={"model": self.endpoint.model, **body})
            except httpx.TransportError as error:
                problem = str(error) or type(error).__name__
                continue
            if response.status_code in _BUSY and attempt < _TRIES - 1:
                continue
            try:
                found = response.json()
            except ValueError:
                found = {}
            return response.status_code, found if isinstance(found, dict) else {}
        raise ConfigError(f"{self.endpoint.url} does not answer: {problem}")


_HAY = "Anna the teacher went to the forest with a fox. In Paris there is a village where an owl lives. " * 8
_COUNTED = {"messages": [{"role": "user", "content": _HAY}], "max_tokens": 16, "temperature": 0}
_SEEDED = {
    "messages": [{"role": "user", "content": "Tell me a story about a red fox."}],
    "max_tokens": 24,
    "temperature": 1.0,
    "seed": 1,
    "logprobs": True,
}
_ECHO = {"prompt": TOKENIZER_PROBE, "max_tokens": 1, "temperature": 0, "echo": True, "logprobs": 1}


def _problem(status: int, body: dict[str, Any]) -> str:
    error = body.get("error")
    told = error.get("message") if isinstance(error, dict) else error or body.get("message")
    return f"{status}: {told}" if told else f"it answered with status {status}"


def _read_chat(body: dict[str, Any]) -> ServerAnswer:
    choice = body["choices"][0]
    message = choice["message"]
    content = (choice.get("logprobs") or {}).get("content") or ()
    calls = [each["function"] for each in message.get("tool_calls") or ()]
    return ServerAnswer(
        text=message.get("content") or "",
        calls=tuple(ToolInvocation(each["name"], each.get("arguments") or "") for each in calls),
        tokens=tuple(each["token"] for each in content),
        logprobs=tuple(float(each["logprob"]) for each in content),
    )


def _read_echo(body: dict[str, Any], prompt: str) -> ServerAnswer:
    """Tokens of the prompt but its first, which has no log-probability."""
    found = body["choices"][0]["logprobs"]
    offsets = found.get("text_offset") or ()
    # What was generated is at the end: one token, unless offsets tell.
    count = sum(each < len(prompt) for each in offsets) if offsets else len(found["tokens"]) - 1
    values = found["token_logprobs"][:count]
    known = [
        (token, value)
        for token, value in zip(found["tokens"][:count], values, strict=True)
        if value is not None
    ]
    if not known or len(known) < count - 1:
        raise ValueError("its echo has no log-probabilities")
    return ServerAnswer(
        tokens=tuple(token for token, _ in known), logprobs=tuple(float(value) for _, value in known)
    )


def _read_continued(body: dict[str, Any], prompt: str) -> ServerAnswer:
    """Tokens of what came after the prompt, which was given."""
    choice = body["choices"][0]
    found = choice["logprobs"]
    values = tuple(float(each) for each in found["token_logprobs"])
    return ServerAnswer(
        text=choice["text"].removeprefix(prompt), tokens=tuple(found["tokens"]), logprobs=values
    )


def _read_echo_or_none(status: int, body: dict[str, Any]) -> ServerAnswer | None:
    try:
        return _read_echo(body, TOKENIZER_PROBE) if status == 200 else None
    except (KeyError, IndexError, TypeError, ValueError, AttributeError):
        return None
