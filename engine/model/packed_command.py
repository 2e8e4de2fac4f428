"""`millrace models packed`: the models whose packed weights are kept on disk, their bytes and last use; with
--clear they are deleted. Engines that run have read theirs, and pack again when they are started anew.
"""

from __future__ import annotations

import argparse
import json
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from engine.config import load
from engine.model.kept_files import KeptFile, PackedFolder, PieceReader, WeightsDamagedError
from engine.model.kept_weights import kept_folder
from runtime.config import read_tables
from runtime.errors import ConfigError, described


def _told(kept: KeptFile) -> dict[str, Any]:
    used = datetime.fromtimestamp(kept.used_s, UTC).isoformat(timespec="seconds")
    told: dict[str, Any] = {"file": kept.path.name, "bytes": kept.num_bytes, "used": used}
    try:
        reader = PieceReader(kept.path)
        reader.close()
    except (OSError, WeightsDamagedError) as error:
        return {**told, "model": "", "damaged": str(error)}
    return {**told, "model": reader.index.model}


def main() -> int:
    """Prints the table, or what was deleted; the exit status."""
    parser = argparse.ArgumentParser(prog="millrace models packed", description=__doc__)
    parser.add_argument("--config", type=Path)
    parser.add_argument("--json", action="store_true", help="machine-readable output")
    parser.add_argument("--clear", action="store_true", help="delete them")
    arguments = parser.parse_args()
    try:
        config = load(read_tables(arguments.config)).packed_weights
        files = PackedFolder(kept_folder(config), config.max_bytes)
        found = [_told(kept) for kept in files.all()]
        if arguments.clear:
            files.clear()
    except ConfigError as error:
        print(f"millrace: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"millrace: {files.root} cannot be cleared: {described(error)}", file=sys.stderr)
        return 2
    total = sum(each["bytes"] for each in found)
    if arguments.json:
        told = {"folder": str(files.root), "max_bytes": config.max_bytes, "bytes": total, "models": found}
        print(json.dumps({**told, "cleared": arguments.clear}))
        return 0
    for each in reversed(found):
        state = f"  damaged: {each['damaged']}" if "damaged" in each else ""
        print(f"{each['bytes'] / 1e6:9.1f} MB  {each['used']}  {each['model'] or each['file']}{state}")
    verb = "deleted from" if arguments.clear else f"of at most {config.max_bytes / 1e6:.0f} MB in"
    print(f"{total / 1e6:9.1f} MB {verb} {files.root}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
