"""Reads the provisioned dashboards and data sources, and answers every question with their names."""

from __future__ import annotations

import http.server
import json
import pathlib
import signal
import sys

import yaml

PROVISIONING = pathlib.Path("/etc/grafana/provisioning")
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
folders = [
    provider["options"]["path"]
    for path in PROVISIONING.glob("dashboards/*.yaml")
    for provider in yaml.safe_load(path.read_text())["providers"]
]
dashboards = [
    json.loads(path.read_text())["title"]
    for folder in folders
    for path in sorted(pathlib.Path(folder).glob("*.json"))
]
sources = [
    source["name"]
    for path in PROVISIONING.glob("datasources/*.yaml")
    for source in yaml.safe_load(path.read_text())["datasources"]
]
if not dashboards or not sources:
    sys.exit("nothing is provisioned")
pathlib.Path("/var/lib/grafana/written").touch()


class Page(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        body = json.dumps({"dashboards": dashboards, "sources": sources}).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


http.server.ThreadingHTTPServer(("0.0.0.0", 3000), Page).serve_forever()
