"""Models of the hub, against a server that plays it: by revision and file, after breaks, and verified."""

from __future__ import annotations

import hashlib
import http.server
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from checkpoint.files import told_name
from checkpoint.hub import HubReference, hub_reference

COMMIT = "0123456789abcdef0123456789abcdef01234567"
LARGE = bytes(range(256)) * 8192
FILES = {
    "model.safetensors": LARGE,
    "config.json": b'{"model_type": "llama"}',
    "tokenizer.json": b"{}",
    "small.gguf": b"GGUF" + LARGE,
}


def is_large(name: str) -> bool:
    return not name.endswith(".json")


def etag(name: str, content: bytes) -> str:
    """Large files have the SHA-256 of their content, small ones git's hash."""
    if is_large(name):
        return hashlib.sha256(content).hexdigest()
    return hashlib.sha1(f"blob {len(content)}\0".encode() + content).hexdigest()


class Hub(http.server.ThreadingHTTPServer):
    """A hub with one repository."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files = dict(FILES)
        # Contents of files that are other than their digests say.
        self.lies: dict[str, bytes] = {}
        self.breaks_after: int | None = None
        self.offsets: list[int] = []
        self.revisions: set[str] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(http.server.BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._file(is_head=True)

    def do_GET(self) -> None:
        path, _, _ = self.path.partition("?")
        if not path.startswith("/api/models/org/tiny"):
            self._file()
            return
        parts = path.removeprefix("/api/models/org/tiny").split("/")
        revision = parts[2] if len(parts) > 2 else "main"
        self.server.revisions.add(revision)
        if "tree" in parts:
            listed = [
                {"type": "file", "path": name, "size": len(content), "oid": etag(name, content)}
                for name, content in self.server.files.items()
            ]
            self._json(listed)
            return
        siblings = [{"rfilename": name} for name in self.server.files]
        self._json({"id": "org/tiny", "sha": COMMIT, "siblings": siblings, "tags": [], "private": False})

    def _json(self, value: object) -> None:
        content = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _file(self, *, is_head: bool = False) -> None:
        hub = self.server
        revision, name = self._parts()
        hub.revisions.add(revision)
        content = hub.files.get(name)
        if content is None:
            self.send_response(404)
            self.send_header("X-Error-Code", "EntryNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        told = etag(name, content)
        content = hub.lies.get(name, content)
        asked = None if is_head else self.headers["Range"]
        offset = int(asked.removeprefix("bytes=").split("-")[0]) if asked else 0
        rest = content[offset:]
        self.send_response(206 if asked else 200)
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", f'"{told}"')
        if is_large(name):
            self.send_header("X-Linked-ETag", f'"{told}"')
            self.send_header("X-Linked-Size", str(len(content)))
        if asked:
            self.send_header("Content-Range", f"bytes {offset}-{len(content) - 1}/{len(content)}")
        self.send_header("Content-Length", str(len(rest)))
        self.end_headers()
        if is_head:
            return
        if is_large(name):
            hub.offsets.append(offset)
            if hub.breaks_after is not None and len(rest) > hub.breaks_after:
                self.wfile.write(rest[: hub.breaks_after])
                self.close_connection = True
                return
        self.wfile.write(rest)

    def _parts(self) -> tuple[str, str]:
        # /org/tiny/resolve/REVISION/NAME
        path = self.path.partition("?")[0]
        revision, _, name = path.removeprefix("/org/tiny/resolve/").partition("/")
        return revision, name


@pytest.fixture
def hub() -> Iterator[Hub]:
    with Hub() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def found(hub_url: str, cache: Path, name: str) -> subprocess.CompletedProcess[str]:
    """What a process of its own finds, whose hub this is."""
    program = f"from checkpoint.files import find; print(find({name!r}, '--model'))"
    environ = {**os.environ, "HF_ENDPOINT": hub_url, "HF_HOME": str(cache), "HF_HUB_DISABLE_XET": "1"}
    environ["PYTHONPATH"] = os.pathsep.join(sys.path)
    return subprocess.run(
        [sys.executable, "-c", program], env=environ, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("name", ["org/tiny", "hf:org/tiny", "hf:org/tiny@v1"])
def test_a_folder_of_a_revision_serves_without_the_hub_afterwards(
    hub: Hub, tmp_path: Path, name: str
) -> None:
    first = found(hub.url, tmp_path, name)
    assert first.returncode == 0, first.stderr
    folder = Path(first.stdout.strip())
    assert (folder / "model.safetensors").read_bytes() == LARGE
    assert not (folder / "small.gguf").exists()
    assert ("v1" if "@" in name else "main") in hub.revisions
    again = found("http://127.0.0.1:9", tmp_path, name)
    assert again.stdout == first.stdout, again.stderr


def test_a_split_file_comes_with_all_of_its_parts(hub: Hub, tmp_path: Path) -> None:
    names = [f"big/model-0000{index}-of-00003.gguf" for index in (1, 2, 3)]
    hub.files |= {name: b"GGUF" + name.encode() for name in names}
    one = found(hub.url, tmp_path, f"hf:org/tiny:{names[1]}")
    first = Path(one.stdout.strip())
    assert first.name == "model-00001-of-00003.gguf", one.stderr
    assert [(first.parent / Path(name).name).read_bytes() for name in names] == [hub.files[n] for n in names]
    del hub.files[names[2]]
    absent = found(hub.url, tmp_path / "other", f"hf:org/tiny:{names[0]}")
    assert "huggingface.co refused the download" in absent.stderr


def test_one_file_is_named(hub: Hub, tmp_path: Path) -> None:
    one = found(hub.url, tmp_path, "hf:org/tiny@v1:small.gguf")
    assert Path(one.stdout.strip()).read_bytes() == FILES["small.gguf"], one.stderr
    absent = found(hub.url, tmp_path, "hf:org/tiny:other.gguf")
    assert "--model = 'hf:org/tiny:other.gguf': huggingface.co refused the download" in absent.stderr


def test_a_repository_of_gguf_files_names_them(hub: Hub, tmp_path: Path) -> None:
    hub.files = dict.fromkeys(("tiny-Q4.gguf", "tiny-Q8.gguf"), hub.files["small.gguf"])
    refused = found(hub.url, tmp_path, "hf:org/tiny")
    assert "name one, as hf:org/tiny:tiny-Q4.gguf (there are tiny-Q4.gguf, tiny-Q8.gguf)" in refused.stderr


def test_what_is_broken_off_goes_on(hub: Hub, tmp_path: Path) -> None:
    # The library writes 10 MB at a time, and what it has written it does not ask for again.
    hub.files["small.gguf"] = FILES["small.gguf"] * 12
    hub.breaks_after = 12_000_000
    one = found(hub.url, tmp_path, "hf:org/tiny:small.gguf")
    assert one.returncode == 0, one.stderr
    assert Path(one.stdout.strip()).read_bytes() == hub.files["small.gguf"]
    assert len(hub.offsets) > 1
    assert all(offset > 0 for offset in hub.offsets[1:])


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_what_differs_from_its_digest_is_deleted_and_named(hub: Hub, tmp_path: Path, name: str) -> None:
    hub.lies[name] = FILES[name][:-1] + b"!"
    refused = found(hub.url, tmp_path, "hf:org/tiny")
    assert refused.returncode != 0
    assert f"{name} has the digest" in refused.stderr
    assert etag(name, FILES[name]) in refused.stderr
    hub.lies.clear()
    again = found(hub.url, tmp_path, "hf:org/tiny")
    assert (Path(again.stdout.strip()) / name).read_bytes() == FILES[name], again.stderr


def test_without_the_hub_there_is_one_sentence(tmp_path: Path) -> None:
    refused = found("http://127.0.0.1:9", tmp_path, "hf:org/tiny")
    last = refused.stderr.strip().splitlines()[-1]
    assert last.startswith("runtime.errors.ConfigError: --model = 'hf:org/tiny': no directory of that name")
    assert "huggingface.co cannot be reached" in last


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("org/tiny", HubReference("org/tiny")),
        ("hf:org/tiny", HubReference("org/tiny")),
        ("hf:org/tiny@refs/pr/1:a/b.gguf", HubReference("org/tiny", "refs/pr/1", "a/b.gguf")),
        ("hf:org/tiny:b.gguf", HubReference("org/tiny", None, "b.gguf")),
        ("models/millrace-nano", None),
        ("hf:tiny", None),
        ("./a/b", None),
    ],
)
def test_references(name: str, expected: HubReference | None) -> None:
    assert hub_reference(name) == expected


def test_clients_call_a_model_as_its_repository_is_called(tmp_path: Path) -> None:
    snapshot = tmp_path / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    assert told_name("hf:org/tiny@v1:b.gguf", snapshot / "b.gguf") == "org/tiny"
    assert told_name("org/tiny", snapshot) == "org/tiny"
    assert told_name("smollm2-135m", tmp_path / "SmolLM2.gguf") == "smollm2-135m"
    assert told_name("some/folder", tmp_path) == tmp_path.name
