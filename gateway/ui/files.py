"""The page's files as the gateway serves them: read once, each under the digest of all, with its policy.

They say nothing of a deployment, so they need no key. `gateway.ui.routes` serves them.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import msgspec

from gateway.http.exchange import Exchange, Handler

PREFIX = "/ui"
_FOLDER = Path(__file__).parent / "static"
_PAGE = "index.html"
# Stands in the page for the folder that its other files are in.
_PLACE = b"{{files}}"
_TYPES = {
    ".html": b"text/html; charset=utf-8",
    ".js": b"text/javascript; charset=utf-8",
    ".svg": b"image/svg+xml",
}
# Stands in the page for its style sheet, which comes with it, because the first paint waits for both.
_STYLE_PLACE = b"{{style}}"
_STYLE = (_FOLDER / "style.css").read_bytes()
_STYLE_DIGEST = base64.b64encode(hashlib.sha256(_STYLE).digest()).decode()
# Nothing of other hosts, nothing inline but the one style sheet, and no text that becomes HTML or code.
POLICY = (
    f"default-src 'none'; script-src 'self'; style-src 'sha256-{_STYLE_DIGEST}'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
# No cross-origin-opener-policy: a browser starts another process for such a page when the answer comes, which
# doubles the time to its first paint, and protects nothing here, where no window is opened or framed and the
# key is in the tab's own storage.
_COMMON = (
    (b"content-security-policy", POLICY.encode()),
    (b"permissions-policy", b"camera=(), geolocation=(), microphone=()"),
    (b"referrer-policy", b"no-referrer"),
    (b"vary", b"accept-encoding"),
    (b"x-content-type-options", b"nosniff"),
)
_ONCE = b"public, max-age=31536000, immutable"
# The page itself names the files of this version, so it is asked for each time.
_EACH_TIME = b"no-cache"


class StaticFile(msgspec.Struct, frozen=True, kw_only=True):
    """One file, plain and compressed."""

    body: bytes
    compressed: bytes
    content_type: bytes
    cache_control: bytes

    async def respond(self, exchange: Exchange) -> None:
        """Answers with it, or says that the client's copy is still true."""
        is_compressed = "gzip" in exchange.header(b"accept-encoding")
        body = self.compressed if is_compressed else self.body
        etag = b'"%b"' % hashlib.sha256(body).hexdigest()[:32].encode()
        headers = [*_COMMON, (b"cache-control", self.cache_control), (b"etag", etag)]
        known = [each.strip().removeprefix("W/") for each in exchange.header(b"if-none-match").split(",")]
        if etag.decode() in known:
            await exchange.respond(304, b"", headers)
            return
        headers.append((b"content-type", self.content_type))
        if is_compressed:
            headers.append((b"content-encoding", b"gzip"))
        await exchange.respond(200, body, headers)


@cache
def file_handlers() -> Mapping[tuple[str, str], Handler]:
    """A handler for each path, so that no path is ever looked up in a file system."""
    bodies = {path.name: path.read_bytes() for path in sorted(_FOLDER.iterdir()) if path.suffix in _TYPES}
    digest = hashlib.sha256(b"".join(name.encode() + body for name, body in bodies.items())).hexdigest()[:16]
    page = bodies.pop(_PAGE).replace(_PLACE, digest.encode()).replace(_STYLE_PLACE, _STYLE)

    async def redirect(exchange: Exchange) -> None:
        # Relative, because a proxy in front may have put all of it below another path.
        await exchange.respond(308, b"", [(b"location", b"ui/"), *_COMMON])

    return {
        ("GET", PREFIX): redirect,
        ("GET", f"{PREFIX}/"): _static(_PAGE, page, _EACH_TIME).respond,
        **{
            ("GET", f"{PREFIX}/{digest}/{name}"): _static(name, body, _ONCE).respond
            for name, body in bodies.items()
        },
    }


def _static(name: str, body: bytes, cache_control: bytes) -> StaticFile:
    return StaticFile(
        body=body,
        compressed=gzip.compress(body, 9, mtime=0),
        content_type=_TYPES[Path(name).suffix],
        cache_control=cache_control,
    )
