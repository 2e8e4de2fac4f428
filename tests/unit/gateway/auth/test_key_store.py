"""Keys made by people reach a running gateway, and leave it, within the promised time."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path

import pytest
from sqlalchemy import Engine, text

from contract.errors import MillraceError
from gateway.auth import keys
from gateway.auth.directory import KeyDirectory
from gateway.auth.key_store import KeyStore, KeyStoreError
from gateway.auth.key_watch import KeyWatch
from gateway.config import KeyEntry
from gateway.database import open_database
from gateway.settings import load_settings


class Rig:
    """A store, and a gateway's directory that watches it; both on a clock of their own."""

    def __init__(self, path: Path, *, interval_s: float = 120.0) -> None:
        self.path = path
        self.now_s = 1000.0
        self.store = KeyStore(str(path), clock=lambda: self.now_s)
        settings = load_settings(
            {"security": {"context_secret": "a secret for unit tests"}, "tenants": {"acme": {}}}
        )
        self.directory = KeyDirectory(settings, clock=lambda: self.now_s)
        self.watch = KeyWatch(
            KeyStore(str(path), clock=lambda: self.now_s),
            self.directory,
            # A look waits this long for the database, in real time: a busy machine is no silent one.
            interval_s=interval_s,
            max_staleness_s=300,
            clock=lambda: self.now_s,
        )

    def create(self, key_id: str, **fields: int) -> str:
        return self.store.create(KeyEntry(id=key_id, tenant="acme", hash="", **fields))

    def accepts(self, secret: str) -> bool:
        try:
            self.directory.authenticate(secret)
        except MillraceError:
            return False
        return True


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path / "keys.sqlite")


async def test_created_key_works_after_the_next_look(rig: Rig) -> None:
    await rig.watch.refresh()
    secret = rig.create("one", requests_per_minute=5)
    assert not rig.accepts(secret)
    await rig.watch.refresh()
    assert rig.accepts(secret)
    assert rig.directory.key_limits("one").requests_per_minute == 5


async def test_watching_goes_on_by_itself(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "keys.sqlite", interval_s=0.01)
    await rig.watch.start()
    secret = rig.create("one")
    while not rig.accepts(secret):
        await asyncio.sleep(0.005)
    rig.store.revoke("one")
    while rig.accepts(secret):
        await asyncio.sleep(0.005)
    await rig.watch.close()


async def test_rotation_keeps_the_old_secret_for_its_grace(rig: Rig) -> None:
    old = rig.create("one", tokens_per_minute=9)
    new = rig.store.rotate("one", grace_s=60)
    await rig.watch.refresh()
    assert rig.accepts(old)
    assert rig.accepts(new)
    assert rig.directory.authenticate(old).key_id == rig.directory.authenticate(new).key_id == "one"
    rig.now_s += 61
    assert not rig.accepts(old)
    assert rig.accepts(new)
    assert rig.directory.key_limits("one").tokens_per_minute == 9
    assert [key.num_secrets for key in rig.store.stored()] == [1]


async def test_rotation_never_lengthens_a_life(rig: Rig) -> None:
    first = rig.create("one")
    rig.store.rotate("one", grace_s=10)
    rig.store.rotate("one", grace_s=1000)
    await rig.watch.refresh()
    rig.now_s += 11
    assert not rig.accepts(first)


async def test_expiry_of_the_key_counts_for_every_secret(rig: Rig) -> None:
    rig.create("one", expires_unix_s=1050)
    secret = rig.store.rotate("one", grace_s=0)
    await rig.watch.refresh()
    assert rig.accepts(secret)
    rig.now_s = 1050
    assert not rig.accepts(secret)


async def test_keys_of_an_unreadable_store_are_dropped_after_the_promised_time(rig: Rig) -> None:
    secret = rig.create("one")
    await rig.watch.refresh()
    with open_database(str(rig.path), _nothing, key="").begin() as connection:
        connection.execute(text("ALTER TABLE key_changes RENAME TO away"))
    rig.now_s += 299
    await rig.watch.refresh()
    assert rig.accepts(secret)
    rig.now_s += 2
    await rig.watch.refresh()
    assert not rig.accepts(secret)
    with open_database(str(rig.path), _nothing, key="").begin() as connection:
        connection.execute(text("ALTER TABLE away RENAME TO key_changes"))
    await rig.watch.refresh()
    assert rig.accepts(secret)


class SilentStore(KeyStore):
    """A database that neither answers nor refuses until `answers` is set."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.answers = threading.Event()
        self.num_asked = 0

    def revision(self) -> int:
        self.num_asked += 1
        self.answers.wait()
        return super().revision()


async def test_keys_of_a_store_that_does_not_answer_are_dropped_too(rig: Rig) -> None:
    secret = rig.create("one")
    store = SilentStore(str(rig.path))
    store.answers.set()
    watch = KeyWatch(store, rig.directory, interval_s=0.01, max_staleness_s=300, clock=lambda: rig.now_s)
    await watch.refresh()
    store.answers.clear()
    num_before = store.num_asked
    rig.now_s += 300
    await watch.refresh()
    assert rig.accepts(secret)
    rig.now_s += 1
    await watch.refresh()
    assert not rig.accepts(secret)
    # It was asked once; the answer comes late and is about what was known before.
    while store.num_asked == num_before:
        await asyncio.sleep(0.001)
    assert store.num_asked == num_before + 1
    store.answers.set()
    while not rig.accepts(secret):
        await watch.refresh()
    await watch.close()


async def test_key_that_cannot_be_read_keeps_no_revocation_from_taking_effect(rig: Rig) -> None:
    good, bad = rig.create("good"), rig.create("bad")
    await rig.watch.refresh()
    with open_database(str(rig.path), _nothing, key="").begin() as connection:
        connection.execute(
            text("UPDATE keys SET agreement = :agreement WHERE id = 'bad'"),
            {"agreement": '{"id": "bad", "tenant": "acme", "of_a_later_version": 1}'},
        )
    rig.store.revoke("good")
    await rig.watch.refresh()
    assert not rig.accepts(good)
    assert not rig.accepts(bad)


def _nothing(database: Engine) -> None:
    """The tables are there."""


def test_secrets_are_not_in_the_file(rig: Rig) -> None:
    secret = rig.create("one")
    rig.store.close()
    files = [path.read_bytes() for path in rig.path.parent.iterdir()]
    assert not any(secret.encode() in content or secret[3:].encode() in content for content in files)


def test_changes_to_what_is_not_there_are_refused(rig: Rig) -> None:
    rig.create("one")
    with pytest.raises(KeyStoreError, match="already"):
        rig.create("one")
    with pytest.raises(KeyStoreError, match="no key two"):
        rig.store.revoke("two")
    rig.store.revoke("one")
    with pytest.raises(KeyStoreError, match="revoked already"):
        rig.store.rotate("one", 0)


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "millrace.toml"
    path.write_text(
        f'[tenants.acme]\nallowed_tiers = ["batch"]\n[tiers.standard]\n[tiers.batch]\n'
        f'[keys]\nstore = "{tmp_path}/keys.sqlite"\n'
    )
    return str(path)


def test_command_line(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    base = ["--config", config]
    assert keys.main([*base, "list"]) == 0
    assert "no key is stored" in capsys.readouterr().err
    create = [*base, "create", "--tenant", "acme", "--tokens-per-minute", "100"]
    assert keys.main([*create, "--tier", "batch", "--models", "a,b", "--expires", "30d"]) == 0
    secret = capsys.readouterr().out.strip()
    assert secret.startswith("mr-")
    assert keys.main(create) == 0
    capsys.readouterr()
    assert keys.main([*base, "rotate", "acme-1", "--grace", "1h"]) == 0
    assert capsys.readouterr().out.strip() != secret
    assert keys.main([*base, "revoke", "acme-2"]) == 0
    capsys.readouterr()
    assert keys.main([*base, "list", "--json"]) == 0
    first, second = json.loads(capsys.readouterr().out)
    assert (first["id"], first["tier"], first["allowed_models"]) == ("acme-1", "batch", ["a", "b"])
    assert (first["state"], second["state"], first["secrets"]) == ("active", "revoked", 2)
    assert keys.main([*base, "list"]) == 0
    assert "tokens_per_minute=100" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["create", "--tenant", "nobody"], "[tenants.nobody]"),
        (["create", "--tenant", "acme", "--tier", "gold"], "may not use tier 'gold'"),
        (["create", "--tenant", "acme", "--id", "a/b"], "--id"),
        (["create", "--tenant", "acme", "--tokens-per-minute", "0"], "tokens_per_minute"),
        (["create", "--tenant", "acme", "--monthly-budget", "5"], "--monthly-budget: a budget needs prices"),
        (["revoke", "nothing"], "no key nothing"),
    ],
)
def test_command_line_says_what_is_wrong(
    config: str, arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert keys.main(["--config", config, *arguments]) == 2
    said = capsys.readouterr()
    assert named in said.err
    assert said.out == ""


def test_entry_for_the_configuration_file(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert keys.main(["--config", config, "create", "--tenant", "acme", "--print-entry"]) == 0
    said = capsys.readouterr()
    path = Path(config)
    path.write_text(f"{path.read_text()}entries = [{said.err.strip()}]\n")
    from gateway.auth.directory import hash_key
    from runtime.config import read_tables

    (entry,) = load_settings(read_tables(path)).keys.entries
    assert entry.hash == hash_key(said.out.strip())
