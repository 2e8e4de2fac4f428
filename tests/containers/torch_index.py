"""A package index of PyTorch's CPU builds in a folder, for a machine that cannot reach the real one.

usage: torch_index.py PORT FOLDER
"""

from __future__ import annotations

import sys
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import quote


class Index(SimpleHTTPRequestHandler):
    """Every page lists the wheels of torch; a wheel's address is its file."""

    def do_GET(self) -> None:
        if self.path.endswith(".whl"):
            self.path = "/" + self.path.rpartition("/")[2]
            super().do_GET()
            return
        wheels = sorted(Path(self.directory).glob("torch-*+cpu-*.whl"))
        page = "".join(f'<a href="/{quote(wheel.name)}">{wheel.name}</a>' for wheel in wheels).encode()
        self.send_response(200)
        self.send_header("content-type", "text/html")
        self.send_header("content-length", str(len(page)))
        self.end_headers()
        self.wfile.write(page)


if __name__ == "__main__":
    ThreadingHTTPServer(
        ("127.0.0.1", int(sys.argv[1])), partial(Index, directory=sys.argv[2])
    ).serve_forever()
