"""Creates, lists, revokes and rotates API keys: `millrace keys ...`."""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from gateway.auth.directory import hash_key
from gateway.auth.key_store import KeyStore, KeyStoreError, StoredKey
from gateway.auth.secret import new_secret
from gateway.config import KeyEntry, LimitValues
from gateway.settings import Settings, check_budget, check_keys, check_name, load_settings
from runtime.config import read_tables
from runtime.errors import ConfigError

_DEFAULT_CONFIG = Path("config/millrace.toml")
_DURATION = re.compile(r"(\d+)([smhd])")
_UNIT_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_LIMITS = LimitValues.__struct_fields__


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0, or 2 with one line on stderr."""
    options = _parser().parse_args(arguments)
    try:
        config = options.config or (_DEFAULT_CONFIG if _DEFAULT_CONFIG.exists() else None)
        settings = load_settings(read_tables(config))
        if options.command == "create":
            _create(settings, options)
            return 0
        store = _open(settings)
        if options.command == "list":
            _list(store.stored(), as_json=options.json)
        elif options.command == "revoke":
            store.revoke(options.id)
            print(f"{options.id} is revoked; gateways refuse it {_within(settings)}", file=sys.stderr)
        else:
            print(store.rotate(options.id, options.grace))
            print(f"the old secret of {options.id} ends in {options.grace} s", file=sys.stderr)
    except (ConfigError, KeyStoreError) as error:
        print(f"millrace keys: {error}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="millrace keys", description=__doc__)
    parser.add_argument("--config", type=Path, help=f"configuration file (default: {_DEFAULT_CONFIG})")
    commands = parser.add_subparsers(dest="command", required=True)
    create = commands.add_parser("create", help="make a key; its secret is printed once, on stdout")
    create.add_argument("--tenant", required=True)
    create.add_argument("--id", help="name of the key in logs and the ledger (default: tenant and a number)")
    create.add_argument("--tier", default="", help="tier instead of the tenant's")
    create.add_argument("--models", default="", help="models that it may use, separated by commas")
    create.add_argument("--expires", type=_seconds, metavar="30d", help="end of its life from now")
    for name in _LIMITS:
        kind = float if name == "monthly_budget" else int
        create.add_argument(f"--{name.replace('_', '-')}", type=kind, metavar="N")
    create.add_argument(
        "--print-entry",
        action="store_true",
        help="store nothing; print the entry for [[keys.entries]] on stderr",
    )
    listing = commands.add_parser("list", help="show all keys, without secrets")
    listing.add_argument("--json", action="store_true")
    revoke = commands.add_parser("revoke", help="refuse a key from now on")
    revoke.add_argument("id")
    rotate = commands.add_parser("rotate", help="give a key a new secret")
    rotate.add_argument("id")
    rotate.add_argument("--grace", type=_seconds, default=0, metavar="1h", help="life of the old secret")
    return parser


def _create(settings: Settings, options: argparse.Namespace) -> None:
    given = {name: getattr(options, name) for name in _LIMITS}
    store = None if options.print_entry else _open(settings)
    taken = {key.entry.id for key in store.stored()} if store else set()
    taken |= {entry.id for entry in settings.keys.entries}
    key_id = options.id or _free_name(options.tenant, taken)
    if options.id in {entry.id for entry in settings.keys.entries}:
        raise KeyStoreError(f"the configuration file has a key {options.id} already; choose another --id")
    secret = new_secret()
    entry = KeyEntry(
        id=key_id,
        tenant=options.tenant,
        hash=hash_key(secret),
        tier=options.tier,
        allowed_models=tuple(filter(None, options.models.split(","))),
        expires_unix_s=None if options.expires is None else int(time.time()) + options.expires,
        **given,
    )
    _check(settings, entry)
    if store is None:
        print(_toml(entry), file=sys.stderr)
    else:
        secret = store.create(entry)
        print(f"{key_id} of tenant {options.tenant}; in force {_within(settings)}", file=sys.stderr)
    print(secret)


def _check(settings: Settings, entry: KeyEntry) -> None:
    check_name("--id", entry.id)
    check_keys((entry,), settings.tenants, settings.tiers, settings.gateway.default_tier)
    check_budget("--monthly-budget", entry.limits, settings.gateway)
    try:
        # The constraints of the numbers.
        msgspec.convert(msgspec.to_builtins(entry), KeyEntry)
    except msgspec.ValidationError as error:
        raise KeyStoreError(str(error)) from error


def _list(keys: Sequence[StoredKey], *, as_json: bool) -> None:
    rows = [
        {
            **{
                name: value
                for name, value in msgspec.to_builtins(key.entry).items()
                if value not in (None, "", (), False) and name != "disabled"
            },
            "state": _state(key),
            "created": datetime.fromtimestamp(key.created_unix_s, UTC).isoformat(),
            "secrets": key.num_secrets,
        }
        for key in keys
    ]
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    if not rows:
        print("no key is stored; `millrace keys create --tenant NAME` makes one", file=sys.stderr)
    for row in rows:
        head = f"{row.pop('id'):24} {row.pop('tenant'):20} {row.pop('state'):8}"
        print(head, " ".join(f"{name}={value}" for name, value in row.items()))


def _state(key: StoredKey) -> str:
    if key.revoked_unix_s is not None:
        return "revoked"
    expires = key.entry.expires_unix_s
    return "expired" if expires is not None and expires <= time.time() else "active"


def _open(settings: Settings) -> KeyStore:
    if not settings.keys.store:
        raise ConfigError("keys.store: set it to an SQLite file or a database URL, to which keys are written")
    return KeyStore(settings.keys.store)


def _within(settings: Settings) -> str:
    return f"within {settings.keys.refresh_interval_s:g} s"


def _free_name(tenant: str, taken: set[str]) -> str:
    number = 1
    while f"{tenant}-{number}" in taken:
        number += 1
    return f"{tenant}-{number}"


def _seconds(text: str) -> int:
    match = _DURATION.fullmatch(text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no duration; write 90s, 15m, 12h or 30d")
    return int(match[1]) * _UNIT_S[match[2]]


def _toml(entry: KeyEntry) -> str:
    fields = {name: value for name, value in msgspec.to_builtins(entry).items() if value}
    return "{" + ", ".join(f"{name} = {json.dumps(value)}" for name, value in fields.items()) + "}"


if __name__ == "__main__":
    sys.exit(main())
