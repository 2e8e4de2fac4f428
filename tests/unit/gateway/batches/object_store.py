"""A server of S3's protocol that verifies signatures (version 4), and fails when it is told to."""

from __future__ import annotations

import hashlib
import hmac
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, quote, urlsplit

BUCKET, KEY_ID, SECRET = "files-of-ours", "AKIDEXAMPLE", "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY"
_AUTHORIZATION = re.compile(
    r"AWS4-HMAC-SHA256 Credential=(?P<id>[^/]+)/(?P<scope>[^,]+), ?SignedHeaders=(?P<headers>[^,]+), ?"
    r"Signature=(?P<signature>[0-9a-f]{64})"
)


class ObjectServer:
    """`objects` are what is stored; `fails` gives the status of an answer, None for the true one."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.uploads: dict[str, dict[int, bytes]] = {}
        # Method, path and bytes of each request.
        self.seen: list[tuple[str, str, int]] = []
        self.fails: Callable[[str, str], int | None] = lambda method, path: None
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), type("_Bound", (_Handler,), {"store": self}))
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def settings(self, **more: str) -> dict[str, str]:
        """`[gateway.batches.s3]`."""
        return {
            "bucket": BUCKET,
            "endpoint": self.url,
            "region": "eu-west-9",
            "access_key_id": KEY_ID,
            "secret_access_key": SECRET,
            **more,
        }


@contextmanager
def object_server() -> Iterator[ObjectServer]:
    store = ObjectServer()
    thread = threading.Thread(target=store.server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield store
    finally:
        store.server.shutdown()
        thread.join()
        store.server.server_close()


def _tag(data: bytes) -> str:
    return f'"{hashlib.md5(data, usedforsecurity=False).hexdigest()}"'


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    store: ObjectServer

    def log_message(self, *_: object) -> None:
        """Nothing: requests are in `seen`."""

    def handle_one_request(self) -> None:
        """Every method."""
        self.raw_requestline = self.rfile.readline(65537)
        if not self.raw_requestline or not self.parse_request():
            self.close_connection = True
            return
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        parts = urlsplit(self.path)
        self.store.seen.append((self.command, self.path, len(body)))
        failing = self.store.fails(self.command, self.path)
        bucket, _, name = parts.path.lstrip("/").partition("/")
        if not self._is_signed(parts.path, parts.query, body):
            self._refuse(403, "SignatureDoesNotMatch")
        elif failing is not None:
            self._refuse(failing, "InternalError")
        elif bucket != BUCKET:
            self._refuse(404, "NoSuchBucket")
        else:
            query = dict(parse_qsl(parts.query, keep_blank_values=True))
            getattr(self, f"_{self.command.lower()}")(name, query, body)

    def _is_signed(self, path: str, query: str, body: bytes) -> bool:
        """By the specification's steps; the payload is part of what is signed."""
        found = _AUTHORIZATION.fullmatch(self.headers.get("authorization") or "")
        told = self.headers.get("x-amz-content-sha256")
        if found is None or found["id"] != KEY_ID or told != hashlib.sha256(body).hexdigest():
            return False
        pairs = sorted(
            (quote(k, "-_.~"), quote(v, "-_.~")) for k, v in parse_qsl(query, keep_blank_values=True)
        )
        names = found["headers"].split(";")
        headers = "".join(f"{name}:{' '.join((self.headers[name] or '').split())}\n" for name in names)
        lines = (self.command, path, "&".join(f"{k}={v}" for k, v in pairs), headers, found["headers"], told)
        request = hashlib.sha256("\n".join(lines).encode()).hexdigest()
        signed = f"AWS4-HMAC-SHA256\n{self.headers['x-amz-date']}\n{found['scope']}\n{request}"
        key = f"AWS4{SECRET}".encode()
        for part in (*found["scope"].split("/"), signed):
            key = hmac.digest(key, part.encode(), "sha256")
        return hmac.compare_digest(key.hex(), found["signature"])

    def _answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        headers.setdefault("Content_Length", str(len(body)))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _refuse(self, status: int, code: str) -> None:
        self._answer(status, f"<Error><Code>{code}</Code><Message>no</Message></Error>".encode())

    def _put(self, name: str, query: dict[str, str], body: bytes) -> None:
        if "uploadId" in query:
            self.store.uploads[query["uploadId"]][int(query["partNumber"])] = body
        else:
            self.store.objects[name] = body
        self._answer(200, ETag=_tag(body))

    def _post(self, name: str, query: dict[str, str], body: bytes) -> None:
        uploads = self.store.uploads
        if "uploads" in query:
            id_ = f"upload-{len(uploads)}"
            uploads[id_] = {}
            told = (
                f"<InitiateMultipartUploadResult><UploadId>{id_}</UploadId></InitiateMultipartUploadResult>"
            )
        elif "delete" in query:
            names = [each.decode() for each in re.findall(rb"<Key>(.*?)</Key>", body)]
            gone = "".join(f"<Deleted><Key>{each}</Key></Deleted>" for each in names)
            for each in names:
                self.store.objects.pop(each, None)
            told = f"<DeleteResult>{gone}</DeleteResult>"
        else:
            parts = uploads.pop(query["uploadId"])
            whole = b"".join(parts[number] for number in sorted(parts))
            self.store.objects[name] = whole
            tag = _tag(whole).strip('"')
            told = f"<CompleteMultipartUploadResult><ETag>{tag}</ETag></CompleteMultipartUploadResult>"
        self._answer(200, told.encode(), Content_Type="application/xml")

    def _head(self, name: str, query: dict[str, str], body: bytes) -> None:
        self._get(name, query, body)

    def _get(self, name: str, query: dict[str, str], body: bytes) -> None:
        data = self.store.objects.get(name)
        if data is None:
            self._refuse(404, "NoSuchKey")
            return
        headers: dict[str, Any] = {"ETag": _tag(data), "Last_Modified": "Fri, 27 Nov 2026 00:00:00 GMT"}
        if (self.headers.get("if-match") or headers["ETag"]) != headers["ETag"]:
            self._refuse(412, "PreconditionFailed")
            return
        status, asked = 200, re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("range") or "")
        if asked is not None:
            start, end = int(asked[1]), min(int(asked[2]) + 1, len(data))
            headers["Content_Range"] = f"bytes {start}-{end - 1}/{len(data)}"
            status, data = 206, data[start:end]
        self._answer(status, data, Content_Length=str(len(data)), **headers)

    def _delete(self, name: str, query: dict[str, str], body: bytes) -> None:
        if "uploadId" in query:
            self.store.uploads.pop(query["uploadId"], None)
        self.store.objects.pop(name, None)
        self._answer(204)
