"""Answers as Prometheus does to instant queries (`GET /api/v1/query`), from readings of processes."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

from observability.analysis.scrape import Reading

# What each instance said at a moment, in Unix seconds.
Said = Callable[[float], Mapping[str, Reading]]


def _result(said: Said, unix_s: float) -> list[dict[str, object]]:
    return [
        {
            "metric": {"__name__": name, "job": "pods", "instance": instance, **dict(labels)},
            "value": [unix_s, str(value)],
        }
        for instance, reading in said(unix_s).items()
        for (name, labels), value in reading.samples.items()
    ]


@contextmanager
def prometheus(said: Said) -> Iterator[str]:
    """The address of one whose targets said this."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            url = urlsplit(self.path)
            assert url.path == "/api/v1/query"
            asked = parse_qs(url.query)
            assert asked["query"] == ['{__name__=~"millrace_.+"}']
            found = _result(said, float(asked["time"][0]))
            body = {"status": "success", "data": {"resultType": "vector", "result": found}}
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(body).encode())

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
