"""What images of ours may write to, and commands that no deployment starts by itself."""

from __future__ import annotations

import errno
from contextlib import closing
from pathlib import Path

import pytest

from tests.deployment.deployed import Deployment
from tests.deployment.runtime import can_confine, give_to_user

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]


@pytest.mark.skipif(not can_confine(), reason="needs the right to mount")
def test_nothing_but_declared_paths_can_be_written_to(root: Path) -> None:
    with closing(Deployment(root)) as deployment:
        state = deployment.mount("/var/lib/millrace/state", "state")
        deployment.mount("/var/lib/millrace/secrets", "secrets")
        image = deployment.image("services/tokenizer/Dockerfile")
        # Writable by its owner, so that only the file system can refuse.
        for folder in (image.root / "app", image.root / "etc/millrace"):
            give_to_user(folder, as_user=True)
        tries = ["/tmp", "/var/lib/millrace/state", "/var/lib/millrace/secrets", "/app", "/etc/millrace"]
        script = "import pathlib, sys\n" + "\n".join(
            [
                "for folder in sys.argv[1:]:",
                "    try:",
                "        (pathlib.Path(folder) / 'written').write_text('')",
                "    except OSError as error:",
                "        print(folder, error.errno)",
            ]
        )
        argv = ["python", "-c", script, *tries, "/var/tmp", "/usr"]
        container = deployment.start(
            "probe", "services/tokenizer/Dockerfile", argv, {}, ["/tmp", "/var/lib/millrace/state"]
        )
        assert container.wait() == 0, container.log.read_text()
        refused = [line.split() for line in container.log.read_text().splitlines()]
        expected = [deployment.mounts["/var/lib/millrace/secrets"], image.root / "app"]
        expected += [image.root / "etc/millrace", Path("/var/tmp"), Path("/usr")]
        assert refused == [[str(path), str(errno.EROFS)] for path in expected]
        assert (state / "written").exists()
        assert (root / "scratch/probe/written").exists()
        assert not Path("/tmp/written").exists()


def test_the_span_store_writes_where_it_is_told(root: Path) -> None:
    """No image of its own starts it, yet its files are in every image of ours."""
    with closing(Deployment(root)) as deployment:
        state = deployment.mount("/var/lib/millrace/state", "state")
        variables = {
            "MILLRACE_OBSERVABILITY__STORE": "/var/lib/millrace/state/spans.sqlite",
            "MILLRACE_OBSERVABILITY__LISTEN": "127.0.0.1:0",
            "MILLRACE_OBSERVABILITY__METRICS_LISTEN": "127.0.0.1:0",
        }
        container = deployment.start(
            "collector",
            "services/tokenizer/Dockerfile",
            ["python", "-m", "observability"],
            variables,
            ["/tmp", "/var/lib/millrace/state"],
        )
        container.wait_for_line("ready observability")
        assert container.terminate() == 0, container.log.read_text()
        assert (state / "spans.sqlite").stat().st_size > 0
