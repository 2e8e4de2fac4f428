"""Instructor: pydantic models out of OpenAI's SDK."""

from __future__ import annotations

import instructor
import openai
import pydantic
from instructor.core import InstructorRetryException
from person import Person
from report import API_KEY, BASE_URL, LIMITED_KEY, MODEL, PERSON, TOO_LONG, refused, works

MODES = {
    "structured output by tools": instructor.Mode.TOOLS,
    "structured output by json_schema": instructor.Mode.JSON_SCHEMA,
    "structured output by json_mode": instructor.Mode.JSON,
}


class Anything(pydantic.BaseModel):
    """What a small model makes of a schema that it is only told about."""

    name: str = ""
    age: int = 0


def client(mode: instructor.Mode, key: str = API_KEY) -> instructor.Instructor:
    """A client that asks in one way."""
    return instructor.from_openai(openai.OpenAI(base_url=BASE_URL, api_key=key, max_retries=0), mode=mode)


def asked(text: str, kind: type = Person) -> dict:
    """A request."""
    return {
        "model": MODEL,
        "messages": [{"role": "user", "content": text}],
        "response_model": kind,
        "max_retries": 1,
        "temperature": 0,
        "max_tokens": 120,
    }


for feature, mode in MODES.items():
    with works(feature):
        kind = Anything if mode is instructor.Mode.JSON else Person
        assert isinstance(client(mode).create(**asked(PERSON, kind)), kind)
with works("stream"):
    *_, last = client(instructor.Mode.TOOLS).create_partial(**asked(PERSON))
    assert last.name, last
with works("several objects"):
    listed = client(instructor.Mode.TOOLS).create_iterable(**asked(PERSON, Anything))
    assert all(isinstance(each, Anything) for each in listed)
with refused("context too long", InstructorRetryException, "maximum context length"):
    client(instructor.Mode.TOOLS).create(**asked(TOO_LONG))
with refused("wrong key", InstructorRetryException, "invalid_api_key"):
    client(instructor.Mode.TOOLS, "mr-wrong").create(**asked(PERSON))
with refused("too many requests", InstructorRetryException, "rate_limit_exceeded"):
    for _ in range(2):
        client(instructor.Mode.TOOLS, LIMITED_KEY).create(**asked(PERSON))
