"""Which stack a command talks to, and with which key."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from runtime.addresses import is_this_machine, join
from runtime.errors import ConfigError
from services.supervisor.config import development_key, state_directory
from services.supervisor.state import RunState, read_state

URL_VARIABLE = "MILLRACE_URL"
KEY_VARIABLE = "MILLRACE_API_KEY"


@dataclass(frozen=True)
class ServerTarget:
    """One server, and its url as it was named. `model` is empty where only the server itself knows it."""

    address: str
    api_key: str
    model: str = ""
    url: str = ""

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Credentials as gRPC metadata; none without a key."""
        return (("authorization", f"Bearer {self.api_key}"),) if self.api_key else ()


def find_target(url: str = "", environ: Mapping[str, str] = os.environ) -> ServerTarget:
    """The server at `url`, else at MILLRACE_URL, else the stack that was started in this directory.

    Without MILLRACE_API_KEY the development key is sent, to this machine only. Raises ConfigError when there
    is no server, with the remedy.
    """
    url = url or environ.get(URL_VARIABLE, "")
    state = running_stack(environ)
    if url:
        try:
            parts = urlsplit(url if "//" in url else f"//{url}")
            port = parts.port or (443 if parts.scheme == "https" else 8080)
        except ValueError as error:
            raise ConfigError(
                f"url {url!r}: {error}; expected http://host:port or https://host:port"
            ) from error
        host = parts.hostname or ""
        # The development key of this machine's stacks is not sent to other machines.
        own_key = development_key(environ) if is_this_machine(host) else ""
        address = join(host, port)
        url = url if "//" in url else f"http://{address}"
        return ServerTarget(address, environ.get(KEY_VARIABLE) or own_key, url=url)
    if state is None:
        raise ConfigError(
            f"no running stack found (state directory {state_directory(environ)}); start one with "
            f"`make serve` or `millrace up --model ...`, or name one with --url or {URL_VARIABLE}"
        )
    key = environ.get(KEY_VARIABLE) or state.api_key
    return ServerTarget(state.address, key, state.model, f"{state.scheme}://{state.address}")


def running_stack(environ: Mapping[str, str] = os.environ) -> RunState | None:
    """The stack that was started with this state directory, if it runs."""
    return read_state(state_directory(environ))
