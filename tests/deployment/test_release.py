"""`make release`: what is handed out serves, can be checked, and is the same whenever it is made again."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.deployment.containerfile import REPOSITORY

WHEEL = "millrace-0.1.0-py3-none-any.whl"
CLIENT = "millrace_client-0.1.0-py3-none-any.whl"


class Checkout:
    """A repository of its own, with what is tracked here as its first commit."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.folder = folder
        self.key = folder.parent / "key"
        tracked = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=REPOSITORY,
            check=True,
            capture_output=True,
        ).stdout
        present = [name for name in tracked.split(b"\0") if (REPOSITORY / os.fsdecode(name)).is_file()]
        names = b"\0".join(present)
        subprocess.run(
            f"tar -cf - --null --files-from=- | tar -C '{folder}' -xf -",
            shell=True,
            cwd=REPOSITORY,
            input=names,
            check=True,
        )
        self.run("git", "init", "--quiet")
        self.commit()
        self.run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.key))

    def commit(self) -> None:
        """All that is there."""
        self.run("git", "add", "--all")
        who = ("-c", "user.name=Somebody", "-c", "user.email=somebody@example.com")
        self.run("git", *who, "commit", "--quiet", "--message", "All of it")

    def run(self, *words: str, **options: object) -> subprocess.CompletedProcess[str]:
        """A command here, with a Docker engine that does not answer."""
        # The tags of commits are made at one time, whichever it is.
        environment = {**os.environ, "DOCKER_HOST": "unix:///nowhere", "PYTHON": sys.executable}
        environment |= {"GIT_COMMITTER_DATE": "1700000000 +0000", "RELEASE_KEY": str(self.key)}
        told = {"cwd": self.folder, "env": environment, "text": True, "capture_output": True, **options}
        return subprocess.run(words, check=False, **told)  # type: ignore[call-overload, no-any-return]

    def release(self) -> subprocess.CompletedProcess[str]:
        """As `make release` does it."""
        return self.run("services/release.sh", "build/release")

    @property
    def sums(self) -> str:
        """The list of sums."""
        return (self.folder / "build/release/SHA256SUMS").read_text()


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Checkout:
    made = Checkout(tmp_path_factory.mktemp("release") / "checkout")
    done = made.release()
    assert done.returncode == 0, done.stderr
    assert "the images are left out" in done.stderr
    return made


def test_sums_and_their_signature_hold(checkout: Checkout) -> None:
    folder = checkout.folder / "build/release"
    assert {line.split()[1] for line in checkout.sums.splitlines()} == {
        WHEEL,
        CLIENT,
        *(f"bills/{name}.json" for name in ("engine", "gateway", "tokenizer")),
    }
    assert checkout.run("sha256sum", "--check", "SHA256SUMS", cwd=folder).returncode == 0
    public = checkout.key.with_suffix(".pub").read_text()
    signers = checkout.folder.parent / "signers"
    signers.write_text(f"releases@example.com {public}")
    words = ["ssh-keygen", "-Y", "verify", "-f", str(signers), "-I", "releases@example.com", "-n", "file"]
    words += ["-s", "SHA256SUMS.sig"]
    assert checkout.run(*words, cwd=folder, input=checkout.sums).returncode == 0
    assert checkout.run(*words, cwd=folder, input=checkout.sums + "\n").returncode != 0


def test_the_wheel_brings_model_and_configuration(checkout: Checkout, tmp_path: Path) -> None:
    site, elsewhere = tmp_path / "site", tmp_path / "elsewhere"
    with zipfile.ZipFile(checkout.folder / "build/release" / WHEEL) as wheel:
        wheel.extractall(site)
    assert (site / "millrace-0.1.0.dist-info/licenses/NOTICE").is_file()
    elsewhere.mkdir()
    environment = {**os.environ, "PYTHONPATH": str(site), "MILLRACE_STATE_DIR": str(tmp_path / "state")}
    told = checkout.run(sys.executable, "-P", "-m", "services.cli", "plan", cwd=elsewhere, env=environment)
    assert told.returncode == 0, told.stderr
    assert "millrace-nano" in told.stdout
    assert (site / "services/bundled/config/millrace.toml").read_text() == (
        REPOSITORY / "config/millrace.toml"
    ).read_text()


def test_a_version_is_one_commit_and_its_sums_are_the_same_again(checkout: Checkout) -> None:
    before = checkout.sums
    checkout.run("git", "tag", "v0.1.0")
    assert checkout.release().returncode == 0
    assert checkout.sums == before
    with (checkout.folder / "README.md").open("a") as file:
        file.write("\n")
    refused = checkout.release()
    assert refused.returncode == 1
    assert "commit them" in refused.stderr
    checkout.commit()
    refused = checkout.release()
    assert refused.returncode == 1
    assert "raise `version` in pyproject.toml" in refused.stderr
    assert checkout.sums == before, "what was made is left"
