"""Says whether running gateways were started with another configuration file than this one.

`python -m gateway.applied FILE HOST:PORT...`, the addresses of their metrics. Whoever does not answer
does not run.
"""

from __future__ import annotations

import http.client
import socket
import sys
import urllib.request
from collections.abc import Iterable, Iterator
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from observability.emit.names import CONFIGURATION_INFO
from runtime.models import sha256_of

_TIMEOUT_S = 2.0
# Nothing between services is to be asked through a proxy.
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def metrics_pages(address: str) -> Iterator[tuple[str, str]]:
    """Address and metrics of every gateway that a name resolves to; whoever does not answer is left out."""
    host, _, port = address.rpartition(":")
    try:
        found = socket.getaddrinfo(host, int(port), socket.AF_INET, socket.SOCK_STREAM)
    except OSError:
        return
    for ip in sorted({str(each[4][0]) for each in found}):
        try:
            with _OPENER.open(f"http://{ip}:{port}/metrics", timeout=_TIMEOUT_S) as answer:
                text = answer.read().decode()
        except (OSError, http.client.HTTPException):
            continue
        yield f"{ip}:{port}", text


def running_with(address: str) -> Iterator[str]:
    """Sums of the files that the gateways were started with that a name resolves to."""
    for _, text in metrics_pages(address):
        for family in text_string_to_metric_families(text):
            if family.name == CONFIGURATION_INFO.name:
                yield from (sample.labels["sha256"] for sample in family.samples)


def is_other(config: Path, addresses: Iterable[str]) -> bool:
    """Whether a gateway at one of the addresses was started with another file than `config`."""
    own = sha256_of(config)
    return any(sha256 != own for address in addresses for sha256 in running_with(address))


def main(arguments: list[str]) -> int:
    """1, and the remedy on stderr, where a gateway was."""
    config, *addresses = arguments
    if not is_other(Path(config), addresses):
        return 0
    print(
        f"{config} was edited, and gateways run that were started before: apply it by `docker compose up "
        "--detach --build --force-recreate`, with the same files (-f) as now",
        file=sys.stderr,
    )
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
