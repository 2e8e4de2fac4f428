"""What a tokenizer puts around a plain text is left out where a client says so; `/tokenize` counts alike."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.faces.unserved import WARNING_HEADER
from tests.unit.gateway.rig.deployment import deployed
from tests.unit.gateway.rig.tokenizer import ByteTokenizer


@pytest.mark.parametrize("adds", [None, True, False])
@pytest.mark.parametrize("prompt", ["a b", ["a b", "tea"], [97, 98], [[97, 98], "tea"]])
@pytest.mark.parametrize("echo", [False, True])
async def test_completions_count_as_tokenize_does(adds: bool | None, prompt: Any, echo: bool) -> None:
    tokenizer = ByteTokenizer()
    tokenizer.start_ids = [1]
    more = {} if adds is None else {"add_special_tokens": adds}
    async with deployed(tokenizer=tokenizer) as stack:
        expected = 0
        for each in prompt if isinstance(prompt, list) and not isinstance(prompt[0], int) else [prompt]:
            if isinstance(each, str):
                counted = await stack.http.post("/tokenize", json={"model": "tiny", "prompt": each, **more})
                assert counted.json()["count"] == len(each) + (adds is not False)
                expected += counted.json()["count"]
            else:
                expected += len(each)
        body = {"model": "tiny", "prompt": prompt, "echo": echo, **more}
        answer = await stack.http.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["prompt_tokens"] == expected
        events = await stack.events("/v1/completions", **body, stream_options={"include_usage": True})
        assert events[-1]["usage"]["prompt_tokens"] == expected
        assert WARNING_HEADER not in answer.headers


async def test_templates_write_their_own() -> None:
    async with deployed() as stack:
        plain, said = [await stack.chat(add_special_tokens=adds) for adds in (False, True)]
        assert (plain.status_code, said.status_code) == (200, 200)
        assert WARNING_HEADER not in plain.headers
        assert said.headers[WARNING_HEADER] == "add_special_tokens has no effect: the template decides"
