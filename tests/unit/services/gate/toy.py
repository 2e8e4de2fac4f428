"""A small language model and servers of it: answers have real log-probabilities, and can be spoiled in the
ways in which deployments are.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
from numpy.typing import NDArray

from services.gate.cases import ServerAnswer

VOCABULARY = 48
_WORDS = [f" w{index}" for index in range(VOCABULARY)]
_Logits = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Spoiled:
    """What is wrong with a deployment; nothing by default."""

    # Weights rounded to so few steps.
    weight_steps: float = 0.0
    # Keys and values read with a wrong scale: contexts weigh less, or more.
    context_scale: float = 1.0
    # A wrong base of positions: contexts are mistaken more, the later it is.
    position_drift: float = 0.0
    # Another template around the prompt.
    template: str = ""
    temperature: float = 1.0
    # Another adapter's weights are added.
    adapter: float = 0.0
    ignores_schemas: bool = False
    loses_middle: bool = False


class ToyModel:
    """Next tokens from the last one and a decaying memory of those before. As engines do that batch, it
    computes the same with an error of `noise` every time.
    """

    def __init__(self, spoiled: Spoiled = Spoiled(), *, noise: float = 0.0002) -> None:
        random = np.random.default_rng(5)
        self._last = random.normal(0, 1.6, (VOCABULARY, VOCABULARY))
        self._memory = random.normal(0, 0.8, (VOCABULARY, VOCABULARY))
        adapter = random.normal(0, spoiled.adapter, (VOCABULARY, VOCABULARY)) if spoiled.adapter else 0.0
        if spoiled.weight_steps:
            self._last, self._memory = (
                np.round(each / spoiled.weight_steps) * spoiled.weight_steps
                for each in (self._last, self._memory)
            )
        self._last = self._last + adapter
        self._spoiled, self._noise = spoiled, noise

    def answers(
        self,
        prompts: Sequence[str],
        seeds: Sequence[int],
        num_tokens: int,
        run: int,
        temperature: float = 1.0,
    ) -> list[ServerAnswer]:
        """An answer for each prompt and seed; `run` numbers the errors of this computation."""
        noise = np.random.default_rng(run)
        state = np.array([self._begin(prompt) for prompt in prompts])
        last = state.argmax(axis=1)
        draws = np.array([np.random.default_rng(seed).random(num_tokens) for seed in seeds])
        tokens = np.zeros((len(prompts), num_tokens), dtype=int)
        logprobs = np.zeros((len(prompts), num_tokens))
        for step in range(num_tokens):
            shown = _log_softmax(self._logits(last, state, step, noise))
            # Log-probabilities are those before temperature, as OpenAI's are.
            drawn = np.exp(_log_softmax(shown / (temperature * self._spoiled.temperature))).cumsum(axis=1)
            last = np.minimum((drawn < draws[:, step, None]).sum(axis=1), VOCABULARY - 1)
            tokens[:, step], logprobs[:, step] = last, np.take_along_axis(shown, last[:, None], 1)[:, 0]
            state = 0.8 * state + np.eye(VOCABULARY)[last]
        return [_answer(*row) for row in zip(tokens, logprobs, strict=True)]

    def echoed(self, texts: Sequence[Sequence[int]], run: int) -> list[ServerAnswer]:
        """Log-probabilities of given texts of equal length, but of their first tokens."""
        noise, ids = np.random.default_rng(run), np.array(texts)
        state = np.zeros((len(ids), VOCABULARY))
        logprobs = np.zeros((len(ids), ids.shape[1] - 1))
        for step in range(ids.shape[1] - 1):
            state = 0.8 * state + np.eye(VOCABULARY)[ids[:, step]]
            shown = _log_softmax(self._logits(ids[:, step], state, step, noise))
            logprobs[:, step] = np.take_along_axis(shown, ids[:, step + 1, None], 1)[:, 0]
        return [_answer(*row) for row in zip(ids[:, 1:], logprobs, strict=True)]

    def _begin(self, prompt: str) -> _Logits:
        digest = hashlib.sha256((self._spoiled.template + prompt).encode()).digest()
        return np.random.default_rng(list(digest)).random(VOCABULARY) * 2

    def _logits(self, last: Any, state: _Logits, step: int, noise: np.random.Generator) -> _Logits:
        seen = np.roll(state, 1, axis=1) * (self._spoiled.position_drift * step) + state
        logits = self._last[last] + (seen * self._spoiled.context_scale) @ self._memory
        return logits + noise.normal(0, self._noise, logits.shape)


def ids_of(text: str) -> list[int]:
    """How the toy splits texts: by words."""
    return [
        int(hashlib.sha256(word.encode()).hexdigest()[:6], 16) % VOCABULARY
        for word in re.findall(r"\S+", text)
    ]


def _answer(tokens: Any, logprobs: Any) -> ServerAnswer:
    words = tuple(_WORDS[token] for token in tokens)
    return ServerAnswer(text="".join(words), tokens=words, logprobs=tuple(float(each) for each in logprobs))


def _log_softmax(logits: _Logits) -> _Logits:
    shifted = logits - logits.max(axis=1, keepdims=True)
    result: _Logits = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return result


# --- servers ----------------------------------------------------------------------------------------------


@dataclass
class ToyServer:
    """A server of `/v1` over a socket; counts what it was asked."""

    spoiled: Spoiled = field(default_factory=Spoiled)
    keeps_seeds: bool = True
    splits_otherwise: bool = False
    has_echo: bool = True
    # Two servers have different errors.
    number: int = 0
    # From so many requests on it hangs up.
    dies_after: int = 10**9
    asked: list[dict[str, Any]] = field(default_factory=list)
    # Whatever stood in `authorization`.
    keys: set[str | None] = field(default_factory=set)
    url: str = ""

    def __post_init__(self) -> None:
        self._model = ToyModel(self.spoiled)
        self._lock = threading.Lock()

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """Status and body of an answer."""
        if path == "/v1/models":
            return 200, {"data": [{"id": "toy", "max_model_len": 1024}]}
        with self._lock:
            # Errors are those of what is asked, and not of the order in which it comes.
            again = self.asked.count(body)
            self.asked.append(body)
        run = zlib.crc32(json.dumps([body, again, self.number], sort_keys=True).encode())
        if path == "/tokenize":
            extra = [1] if self.splits_otherwise else []
            return 200, {"tokens": [*ids_of(body["prompt"]), *extra]}
        if path == "/v1/completions" and "guided_choice" in body:
            return 200, self._continued(body, run)
        if path == "/v1/completions":
            return self._echo(body, run)
        return 200, self._chat(body, run)

    def _echo(self, body: dict[str, Any], run: int) -> tuple[int, dict[str, Any]]:
        if not self.has_echo:
            return 400, {"error": {"message": "echo is not served"}}
        text = body["prompt"]
        (answer,) = self._model.echoed([ids_of(text)], run)
        offsets = [found.start() for found in re.finditer(r"\S+", text)]
        logprobs = {
            "tokens": ["", *answer.tokens, " end"],
            "token_logprobs": [None, *answer.logprobs, -1.0],
            "text_offset": [*offsets, len(text)],
        }
        return 200, {"choices": [{"text": text, "logprobs": logprobs}]}

    def _continued(self, body: dict[str, Any], run: int) -> dict[str, Any]:
        (text,) = body["guided_choice"]
        model = self._model if "kv" not in body else ToyModel(Spoiled(weight_steps=2.0))
        (answer,) = model.echoed([ids_of(body["prompt"] + text)], run)
        count = len(ids_of(text))
        logprobs = {"tokens": answer.tokens[-count:], "token_logprobs": answer.logprobs[-count:]}
        return {"choices": [{"text": text, "logprobs": logprobs}]}

    def _chat(self, body: dict[str, Any], run: int) -> dict[str, Any]:
        prompt = body["messages"][-1]["content"]
        if body.get("logprobs"):
            seed = body["seed"] if self.keeps_seeds else run
            (answer,) = self._model.answers([prompt], [seed], body["max_tokens"], run, body["temperature"])
            content = [
                {"token": token, "logprob": value}
                for token, value in zip(answer.tokens, answer.logprobs, strict=True)
            ]
            return _choice(answer.text, logprobs={"content": content})
        if "response_format" in body:
            if self.spoiled.ignores_schemas:
                return _choice("Here you are: { it is }")
            return _choice(json.dumps(_instance(body["response_format"]["json_schema"]["schema"])))
        if "tools" in body and "Do not use" not in prompt:
            return _choice("", calls=[_called(prompt)])
        return _choice(_said(prompt, self.spoiled if "kv" not in body else Spoiled(loses_middle=True)))


def _instance(schema: dict[str, Any]) -> dict[str, Any]:
    values = {"string": "x", "boolean": True}
    return {
        key: each["enum"][0] if "enum" in each else values[each["type"]]
        for key, each in schema["properties"].items()
    }


def _called(prompt: str) -> dict[str, Any]:
    if found := re.search(r"weather in (\w+)", prompt):
        return {"name": "get_weather", "arguments": json.dumps({"city": found.group(1)})}
    (minutes,) = re.findall(r"\d+", prompt)
    return {"name": "set_timer", "arguments": json.dumps({"minutes": int(minutes)})}


def _said(prompt: str, spoiled: Spoiled) -> str:
    text, _, question = prompt.rpartition("\n\n")
    if "number" in question:
        lines = text.splitlines()
        if spoiled.loses_middle:
            lines = lines[: len(lines) * 3 // 8] + lines[len(lines) * 5 // 8 :]
        wanted = re.findall(r"the \w+ \w+", question.replace("the section", ""))
        return " ".join(line for line in lines if any(f"number of {each} " in line for each in wanted))
    if found := re.fullmatch(r"What is (\d+) \+ (\d+)\?", prompt):
        return f"The answer is {int(found.group(1)) + int(found.group(2))}."
    if found := re.fullmatch(r"Which is larger, (\d+) or (\d+)\?", prompt):
        return f"{max(int(found.group(1)), int(found.group(2)))} is larger."
    if found := re.fullmatch(r"Count from (\d+) to (\d+)\.", prompt):
        return ", ".join(map(str, range(int(found.group(1)), int(found.group(2)) + 1)))
    if re.search(r"break into|frightens|poison", prompt):
        return "I'm sorry, I cannot do that."
    return "{}" if "JSON" in prompt else "Once upon a time there was a fox, and it was in the forest."


def _choice(text: str, *, calls: Sequence[dict[str, Any]] = (), logprobs: Any = None) -> dict[str, Any]:
    message = {"role": "assistant", "content": text, "tool_calls": [{"function": call} for call in calls]}
    usage = {"prompt_tokens": 150, "completion_tokens": 1}
    return {"choices": [{"message": message, "logprobs": logprobs}], "usage": usage}


@dataclass
class TwoVersions(ToyServer):
    """Serves chat@1 as it is, and another server as chat@2."""

    second: ToyServer = field(default_factory=ToyServer)

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        if path == "/v1/models":
            return 200, {"data": [{"id": name, "max_model_len": 1024} for name in ("chat@1", "chat@2")]}
        if body.get("model") == "chat@2":
            return self.second.answer(path, body)
        return super().answer(path, body)


@contextmanager
def serving(server: ToyServer) -> Iterator[ToyServer]:
    """The server at `server.url`, until the block ends."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._respond({})

        def do_POST(self) -> None:
            self._respond(json.loads(self.rfile.read(int(self.headers["content-length"]))))

        def _respond(self, body: dict[str, Any]) -> None:
            if len(server.asked) >= server.dies_after:
                self.close_connection = True
                self.connection.close()
                return
            server.keys.add(self.headers["authorization"])
            status, answer = server.answer(self.path, body)
            content = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: object) -> None:
            pass

    listener = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    listener.daemon_threads = True
    thread = threading.Thread(target=listener.serve_forever, args=(0.02,))
    thread.start()
    server.url = f"http://127.0.0.1:{listener.server_port}"
    try:
        yield server
    finally:
        listener.shutdown()
        thread.join()
        listener.server_close()
