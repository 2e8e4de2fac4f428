"""What is answered, whole and event by event, is of its declared type, and has every field of it."""

from __future__ import annotations

from typing import Any, get_args, get_type_hints

import msgspec
from millrace.common.v1 import grammar_pb2
from millrace.tokenizer.v1 import tokenizer_pb2

from gateway.faces.openai import answer_types as answers
from gateway.http.application import HealthPage
from tests.unit.gateway.rig.deployment import Deployment, deployed
from tests.unit.gateway.rig.engine import ScriptedEngine
from tests.unit.gateway.rig.tokenizer import ByteTokenizer
from tests.unit.gateway.rig.vocabulary import END_ID, written

TEXT = 'think\n</think>\n\nsure\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
MESSAGES = [{"role": "user", "content": "hi"}]
SCHEMA = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"uniqueItems": True}}}
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
COUNTED = {"stream_options": {"include_usage": True}, "include_timing": True}


class JudgingTokenizer(ByteTokenizer):
    """Enforces no schema wholly, and finds that every answer breaks its own."""

    async def Prepare(self, request: Any, context: Any) -> Any:
        response = await super().Prepare(request, context)
        if request.HasField("response_format"):
            keyword = grammar_pb2.KeywordStatus(keyword="uniqueItems", path="/uniqueItems", note="why")
            response.enforcement.approximated.append(keyword)
            response.enforcement.unenforced.append(keyword)
        return response

    async def ValidateOutput(self, request: Any, context: Any) -> Any:
        verdict = grammar_pb2.OutputVerdict(
            valid=False, keyword="a", schema_path="b", instance_path="c", message="d"
        )
        return tokenizer_pb2.ValidateOutputResponse(verdicts=[verdict] * len(request.texts))


class Seen:
    """The answers that came, read as their types, with the fields that they had."""

    def __init__(self, stack: Deployment) -> None:
        self._stack = stack
        self.fields: set[tuple[str, str]] = set()

    async def get(self, kind: type[msgspec.Struct], path: str, **options: Any) -> None:
        self.note(kind, (await self._stack.http.get(path, **options)).content)

    async def post(self, kind: type[msgspec.Struct], path: str, **body: Any) -> None:
        self.note(kind, (await self._stack.http.post(path, json=body)).content)

    async def stream(self, kind: type[msgspec.Struct], path: str, **body: Any) -> None:
        for event in await self._stack.events(path, **body):
            self.note(kind, msgspec.json.encode(event))

    def note(self, kind: type[msgspec.Struct], written: bytes) -> None:
        """Raises where a field is missing, is of another type, or is not declared."""
        answer = msgspec.json.decode(written, type=kind)
        self._walk(answer)
        assert msgspec.json.decode(msgspec.json.encode(answer)) == msgspec.json.decode(written)

    def _walk(self, value: Any) -> None:
        if isinstance(value, msgspec.Struct):
            for name in value.__struct_fields__:
                if (inner := getattr(value, name)) is not msgspec.UNSET:
                    self.fields.add((type(value).__name__, name))
                    self._walk(inner)
        elif isinstance(value, dict):
            self._walk(list(value.values()))
        elif isinstance(value, list | tuple):
            for each in value:
                self._walk(each)


def declared(kind: Any) -> set[tuple[str, str]]:
    """All fields of a type, and of the types inside of it."""
    if not (isinstance(kind, type) and issubclass(kind, msgspec.Struct)):
        return {field for each in get_args(kind) for field in declared(each)}
    fields = {(kind.__name__, name) for name in kind.__struct_fields__}
    return fields.union(*(declared(each) for each in get_type_hints(kind).values()))


async def test_every_answer_is_of_its_type_and_every_field_comes() -> None:
    engine = ScriptedEngine(reply=lambda submit, choice: [*written(TEXT), END_ID])
    tokenizer = JudgingTokenizer()
    tokenizer.generation_config = '{"temperature": 0.8}'
    tables = {"gateway": {"admin_tenants": ["acme"], "max_body_bytes": 8192}, "tier": {"test_time": {}}}
    tables["tier"]["kv"] = {"max_lost": 0.5}
    async with deployed(engine, tokenizer=tokenizer, tables=tables) as stack:
        stack.tokenizer.assistant_prefix = "<think>\n"
        seen = Seen(stack)
        asked = {"model": "tiny", "include_timing": True}
        continued = {"prompt": "ab", "max_tokens": 200}
        logprobs = {"logprobs": True, "top_logprobs": 2}
        for extra in ({"tools": TOOLS, **logprobs}, {"response_format": SCHEMA}, {"stop": "sure"}):
            await seen.post(answers.ChatCompletion, CHAT, messages=MESSAGES, **asked, **extra)
            await seen.stream(answers.ChatCompletionChunk, CHAT, messages=MESSAGES, **COUNTED, **extra)
        for strategy in ("self_consistency", "critique_revise"):
            test_time = {"strategy": strategy, "samples": 2}
            await seen.post(answers.ChatCompletion, CHAT, messages=MESSAGES, **asked, test_time=test_time)
        kv = {"policy": "window+sinks", "keep": 0.5, "max_lost": 0.5}
        await seen.post(answers.ChatCompletion, CHAT, messages=MESSAGES, **asked, kv=kv)
        for extra in ({"logprobs": 2, "echo": True}, {"response_format": SCHEMA}, {"stop": "sure"}):
            await seen.post(answers.Completion, COMPLETIONS, **continued, **asked, **extra)
            await seen.stream(answers.CompletionChunk, COMPLETIONS, **continued, **COUNTED, **extra)
        cut = {"prompt": "abc", "max_tokens": 2, "truncate_prompt_tokens": 2}
        await seen.post(answers.Completion, COMPLETIONS, **cut, **asked)
        await seen.stream(answers.CompletionChunk, COMPLETIONS, **cut)
        turns = {"messages": [{"role": "user", "content": "ab" * 20}, *MESSAGES]}
        await seen.post(answers.ChatCompletion, CHAT, **turns, truncate_prompt_tokens=20, **asked)
        await seen.stream(answers.ChatCompletionChunk, CHAT, **turns, truncate_prompt_tokens=20)
        await seen.post(answers.Tokens, "/tokenize", prompt="ab", return_token_strs=True)
        await seen.post(answers.DetokenizedText, "/detokenize", tokens=[97])
        await seen.get(answers.ModelList, "/v1/models")
        await seen.get(answers.ModelCard, "/v1/models/tiny")
        await seen.post(answers.Done, "/v1/load_lora_adapter", lora_name="poet", lora_path="/adapters/poet")
        await seen.get(answers.AdapterList, "/v1/lora_adapters")
        await seen.post(answers.Error, "/tokenize", prompt="a" * 9000)
        await seen.get(HealthPage, "/health")
    # A gateway that serves, with limits of its own, has neither; the model is loaded at the start.
    left = {("ModelCard", "state"), ("HealthPage", "missing"), ("HealthPage", "limit_store")}
    # Nothing is in the way of requests that come one after the other; test_sharers.py has some that share.
    left |= {("SharedRequest", name) for name in ("request_id", "cause", "overlap_ms")}
    kinds = [*answers.ANSWERS, HealthPage]
    assert set[tuple[str, str]]().union(*map(declared, kinds)) - seen.fields == left
