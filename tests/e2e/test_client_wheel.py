"""The wheel millrace-client in an environment with grpcio and protobuf alone, against the running stack."""

from __future__ import annotations

import shutil
import subprocess
import sys
import venv
from importlib import metadata
from pathlib import Path

import pytest

from tests.architecture.sources import ROOT
from tests.e2e.stack import LIMIT_S, Stack

# grpcio's own requirement is the last one.
_NEEDED = ("grpcio", "protobuf", "typing_extensions")
_PROGRAM = """
import asyncio, sys
from millrace_client import *
address, key, model = sys.argv[1:]

async def main():
    async with MillraceClient(address, key, timeout_s=60) as client:
        (served,) = [each.id for each in await client.models() if each.id == model]
        ids = (await client.tokenize("hello", model=model)).token_ids
        assert await client.detokenize(ids, model=model) == "hello"
        answer = client.chat("Hello!", model=model, temperature=0, max_tokens=16)
        text = await answer.text()
        assert answer.usage.completion_tokens > 0 and answer.request_id
        messages = [{"role": "user", "content": "Hello!"}]
        assert await client.count_tokens(messages, model=model) == answer.usage.prompt_tokens
        by_ids = client.generate([300, 301], model=model, max_tokens=8, temperature=0)
        assert await by_ids.text()
        long = dict(model=model, max_tokens=2000, ignore_eos=True)
        async with client.chat("Tell me a long story.", **long) as story:
            await anext(story)
        assert [part async for part in story] == []
        try:
            await client.embed("hello", model=model)
        except MillraceApiError as error:
            print("embed:", error)
        try:
            await client.chat("Hello!", model=model, temperature=-1).text()
        except InvalidRequestError as error:
            assert "temperature" in error.field and error.reason == "INVALID_ARGUMENT", error
        try:
            await client.chat("word " * 60_000, model=model).text()
        except InvalidRequestError as error:
            assert error.reason in ("CONTEXT_LENGTH_EXCEEDED", "NEVER_FITS") and error.limit, vars(error)
        else:
            raise AssertionError("not refused")
        try:
            await client.chat("Hello!", model="nobody").text()
        except NotFoundError as error:
            assert error.reason == "MODEL_NOT_FOUND"
        else:
            raise AssertionError("not refused")
    async with MillraceClient(address, "mr-wrong") as client:
        try:
            await client.models()
        except UnauthenticatedError as error:
            assert error.reason == "INVALID_CREDENTIALS"
        else:
            raise AssertionError("not refused")
    async with MillraceClient("127.0.0.1:1", key, retry=RetryPolicy(first_pause_s=0)) as client:
        try:
            await client.models()
        except UnavailableError as error:
            assert error.reason == "UNAVAILABLE"
        else:
            raise AssertionError("not refused")
    print(text)

asyncio.run(main())
"""


def _copy_distribution(name: str, site: Path) -> None:
    """As installed here, so that no registry is asked."""
    for file in metadata.files(name) or ():
        source = Path(str(file.locate()))
        if ".." not in file.parts and source.is_file():
            target = site / file
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment that has the wheel, and what it says that it needs."""
    folder = tmp_path_factory.mktemp("client")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder / "wheels")]
    subprocess.run(build, cwd=ROOT / "client", check=True, capture_output=True)
    (wheel,) = (folder / "wheels").glob("millrace_client-*.whl")
    venv.create(folder / "env", symlinks=True)
    interpreter = folder / "env" / "bin" / "python"
    (site,) = (folder / "env" / "lib").glob("python*/site-packages")
    for name in _NEEDED:
        _copy_distribution(name, site)
    pip = [sys.executable, "-m", "pip", "--python", str(interpreter), "--disable-pip-version-check"]
    # Fails where the wheel needs anything else, or another version.
    subprocess.run([*pip, "install", "--quiet", "--no-index", str(wheel)], check=True, timeout=LIMIT_S)
    return interpreter


def _run(python: Path, stack: Stack, *program: str) -> str:
    command = [str(python), "-I", *program, stack.address, stack.state.api_key, stack.model]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_wheel_asks_the_stack_in_all_ways(python: Path, stack: Stack) -> None:
    assert _run(python, stack, "-c", _PROGRAM).strip()


def test_the_example_for_backend_services_runs(python: Path, stack: Stack) -> None:
    told = _run(python, stack, str(ROOT / "client/examples/python/backend.py"))
    assert "tokens, request " in told
    assert "stopped after:" in told
    assert "refused: INVALID_ARGUMENT at sampling.temperature" in told
