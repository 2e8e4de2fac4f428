"""Where package registries keep a file: those that pip asks on this machine, mirrors among them.

pip's own configuration is read, by pip: indexes, folders with files, a certificate authority and a proxy. pip
itself does not go on with a download that an earlier command began, so the bytes are fetched here.
"""

from __future__ import annotations

import ast
import base64
import json
import re
import ssl
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from html.parser import HTMLParser
from pathlib import Path
from types import TracebackType
from typing import IO, Any
from urllib.parse import unquote, urljoin, urlsplit, urlunsplit

from runtime.errors import ConfigError

# A registry that is asked instead of pip's.
_INDEX_VARIABLE = "MILLRACE_PACKAGE_INDEX"
_PYPI = "https://pypi.org/simple"
# Forms of a page (PEP 691, PEP 503).
_FORMS = "application/vnd.pypi.simple.v1+json, application/vnd.pypi.simple.v1+html;q=0.2, text/html;q=0.1"
_TIMEOUT_S = 30.0
_MAX_PAGE_BYTES = 32 * 1024 * 1024
_SETTING = re.compile(r"(:env:|global|download)\.([a-z-]+)=(.+)")
# The later is believed.
_SCOPES = ("global", "download", ":env:")


class PackageIndexes:
    """The registries, by one connection setting. Use as a context manager."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._settings = _pip_settings(environ)
        if named := environ.get(_INDEX_VARIABLE):
            self._indexes, self._folders = [named], []
        else:
            self._indexes = [
                *self._several("index-url", _PYPI),
                *self._several("extra-index-url"),
            ]
            if self._settings.get("no-index", "").lower() in ("1", "true", "yes", "on"):
                self._indexes = []
            self._folders = self._several("find-links")
        cert = self._settings.get("cert")
        try:
            context = ssl.create_default_context(cafile=cert or None)
        except OSError as error:
            raise ConfigError(f"the certificates of pip's configuration ({cert}): {error}") from error
        handlers: list[Any] = [urllib.request.HTTPSHandler(context=context)]
        if proxy := self._settings.get("proxy"):
            handlers.append(urllib.request.ProxyHandler({"http": proxy, "https": proxy}))
        self._opener = urllib.request.build_opener(*handlers)

    def __enter__(self) -> PackageIndexes:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._opener.close()

    def urls(self, package: str, file: str) -> Iterator[str]:
        """Where the file may be, one after the other; an index that cannot be asked is one as well, so that
        what it says when it is asked for the file is told.
        """
        for folder in self._folders:
            if (found := _local(folder) / file).is_file():
                yield found.as_uri()
        for index in self._indexes:
            if urlsplit(index).scheme not in ("http", "https"):
                if (found := _local(index) / package / file).is_file():
                    yield found.as_uri()
                continue
            page = f"{index.rstrip('/')}/{package}/"
            try:
                found_url = self._on_page(page, file)
            except (OSError, ValueError):
                yield page + file
            else:
                if found_url:
                    yield found_url

    def open(self, url: str, offset: int) -> tuple[IO[bytes], int]:
        """The body from `offset` on, where the server can; and the offset that it begins at."""
        request = _request(url)
        # Compressed on the way, bytes would have other places.
        request.add_header("Accept-Encoding", "identity")
        if offset:
            request.add_header("Range", f"bytes={offset}-")
        try:
            answer = self._opener.open(request, timeout=_TIMEOUT_S)
        except urllib.error.HTTPError as error:
            if error.code != 416 or not offset:
                raise
            # The file there is shorter than what is here.
            return self.open(url, 0)
        begins = re.match(r"bytes (\d+)-", answer.headers.get("Content-Range", ""))
        if answer.status == 206 and begins is not None and int(begins[1]) <= offset:
            return answer, int(begins[1])
        return answer, 0

    def _on_page(self, page: str, file: str) -> str | None:
        request = _request(page)
        request.add_header("Accept", _FORMS)
        with self._opener.open(request, timeout=_TIMEOUT_S) as answer:
            content, base = answer.read(_MAX_PAGE_BYTES), answer.url
            is_json = "json" in answer.headers.get("Content-Type", "")
        links = _json_links(content) if is_json else _html_links(content)
        for link in links:
            if unquote(urlsplit(link).path).rpartition("/")[2] == file:
                url = urljoin(base, link.partition("#")[0])
                return _with_login(url, page)
        return None

    def _several(self, name: str, otherwise: str = "") -> list[str]:
        return (self._settings.get(name) or otherwise).split()


def _pip_settings(environ: Mapping[str, str]) -> dict[str, str]:
    """What pip is configured with, from all of its files and variables; nothing where there is no pip."""
    command = [sys.executable, "-P", "-m", "pip", "--disable-pip-version-check", "config", "list"]
    try:
        listed = subprocess.run(
            command, env=dict(environ), capture_output=True, text=True, timeout=60, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        listed = ""
    by_scope: dict[str, dict[str, str]] = {scope: {} for scope in _SCOPES}
    for match in filter(None, map(_SETTING.fullmatch, listed.splitlines())):
        by_scope[match[1]][match[2]] = str(ast.literal_eval(match[3]))
    return {name: value for found in by_scope.values() for name, value in found.items()}


def _local(location: str) -> Path:
    parts = urlsplit(location)
    return Path(unquote(parts.path) if parts.scheme == "file" else location)


def _request(url: str) -> urllib.request.Request:
    """Without a name and a password in the URL, which are a header; servers that it redirects to do not get
    them.
    """
    parts = urlsplit(url)
    login, _, host = parts.netloc.rpartition("@")
    request = urllib.request.Request(urlunsplit(parts._replace(netloc=host)))
    if login:
        encoded = base64.b64encode(unquote(login).encode()).decode()
        request.add_unredirected_header("Authorization", f"Basic {encoded}")
    return request


def _with_login(url: str, page: str) -> str:
    """A registry's own files are asked for as its pages are."""
    file, of_page = urlsplit(url), urlsplit(page)
    if "@" not in of_page.netloc or file.netloc != of_page.netloc.rpartition("@")[2]:
        return url
    return urlunsplit(file._replace(netloc=of_page.netloc))


def _json_links(content: bytes) -> Sequence[str]:
    return [each["url"] for each in json.loads(content).get("files", ())]


class _Links(HTMLParser):
    """What the anchors of a page lead to."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """See HTMLParser."""
        if tag == "a" and (link := dict(attrs).get("href")):
            self.found.append(link)


def _html_links(content: bytes) -> Sequence[str]:
    links = _Links()
    links.feed(content.decode("utf-8", "replace"))
    return links.found
