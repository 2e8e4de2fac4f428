"""The Dockerfiles in a real engine: what they make of a checkout that is closed to others, and make anew."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.containers.engine import copy_checkout, run

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def closed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the checkout as a user makes it whose umask is 077."""
    folder = tmp_path_factory.mktemp("checkout")
    copy_checkout(folder)
    assert (folder / "gateway/app.py").stat().st_mode & 0o077 == 0
    return folder


def test_a_closed_checkout_makes_an_image_whose_user_reads_it(closed: Path) -> None:
    image = "millrace-test/gateway"
    run(
        "docker",
        "build",
        "--network",
        "host",
        "-t",
        image,
        "-f",
        f"{closed}/services/gateway/Dockerfile",
        str(closed),
    )
    told = run("docker", "run", "--rm", "--network", "none", image, "--help")
    assert "--config" in told
    found = run(
        "docker", "run", "--rm", "--entrypoint", "find", image, "/app", "/etc/millrace", "!", "-readable"
    )
    assert found == ""
    run("docker", "rmi", image)


def test_a_changed_line_of_python_compiles_no_kernel_anew(closed: Path) -> None:
    arguments = ("--target", "kernels", "--build-arg", "KERNELS=", "--network", "host")
    with (closed / "engine/config.py").open("a") as file:
        file.write("# Another line.\n")
    told = run("docker", "build", *arguments, "-f", f"{closed}/services/engine/Dockerfile", str(closed))
    (compiling,) = [step for step in told.split("Step ") if "kernels.native.build" in step]
    assert "Using cache" in compiling


def test_a_release_brings_images_that_load_and_say_what_they_hold(closed: Path) -> None:
    """Of one service, under a version that nobody runs; and none whose base stands in for the real one, which
    the label says here whatever the base is.
    """
    project = closed / "pyproject.toml"
    project.write_text(project.read_text().replace('version = "0.1.0"', 'version = "9.9.9"'))
    (closed / "one.yml").write_text(
        "services:\n  gateway:\n    image: millrace/gateway:${MILLRACE_TAG}\n"
        "    build: {context: ., dockerfile: services/gateway/Dockerfile, network: host,\n"
        '      labels: {millrace.stand-in: "${STANDS_IN}"}}\n'
    )
    who = "-c user.name=Somebody -c user.email=somebody@example.com"
    kept = f"cd '{closed}' && git init -q && git add -A && git {who} commit -qm 'All of it'"
    run("sh", "-c", kept)
    environment = {"COMPOSE_FILE": "one.yml", "PYTHON": sys.executable}
    releasing = ("services/release.sh", "build/release")
    with pytest.raises(AssertionError, match=r"millrace/gateway:9\.9\.9 .* stands in"):
        run(*releasing, folder=closed, environment=environment | {"STANDS_IN": "true"})
    made = closed / "build/release"
    assert not list(made.glob("millrace-images-*"))
    run(*releasing, folder=closed, environment=environment | {"STANDS_IN": "false"})
    run("docker", "rmi", "millrace/gateway:9.9.9")
    run("docker", "load", "--input", str(made / "millrace-images-9.9.9.tar.gz"))
    command = ("python", "-c", "from importlib.metadata import version; print(version('millrace'))")
    entry = ("--entrypoint", command[0], "millrace/gateway:9.9.9", *command[1:])
    assert run("docker", "run", "--rm", "--network", "none", *entry).strip() == "9.9.9"
    run("docker", "rmi", "millrace/gateway:9.9.9")
    bill = json.loads((made / "bills/gateway.json").read_text())
    assert any(each["purl"].startswith("pkg:deb/debian/libc6@") for each in bill["components"])
    assert "millrace-images-9.9.9.tar.gz" in (made / "SHA256SUMS").read_text()
