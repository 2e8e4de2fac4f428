"""`python -m services.bill_of_materials DEPLOYABLE`: what an image holds, as CycloneDX 1.5 JSON.

Versions and licences are those of this environment, installed from the same constraints as the images.
"""

from __future__ import annotations

import json
import sys
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

_FOLDER = Path(__file__).parent


def requirements(deployable: str) -> list[str]:
    """Direct requirements of services/<deployable>/requirements.txt; torch besides for the engine."""
    lines = (_FOLDER / deployable / "requirements.txt").read_text(encoding="utf-8").splitlines()
    named = [line for line in lines if line and not line.startswith("#")]
    return [*named, "torch"] if deployable == "engine" else named


def closure(names: list[str]) -> dict[str, metadata.Distribution]:
    """Distributions that installing these brings, by canonical name."""
    found: dict[str, metadata.Distribution] = {}
    todo = [Requirement(name) for name in names]
    while todo:
        wanted = todo.pop()
        distribution = metadata.distribution(wanted.name)
        found[canonicalize_name(wanted.name)] = distribution
        for text in distribution.requires or []:
            needed = Requirement(text)
            extras = wanted.extras or {""}
            wants = needed.marker is None or any(needed.marker.evaluate({"extra": extra}) for extra in extras)
            if wants and canonicalize_name(needed.name) not in found:
                todo.append(needed)
    return found


def bill(deployable: str) -> dict[str, object]:
    """The CycloneDX document."""
    components = [
        {
            "type": "library",
            "name": name,
            "version": distribution.version,
            "purl": f"pkg:pypi/{name}@{distribution.version}",
            "licenses": [{"license": {"name": licence}} for licence in _licences(distribution)],
        }
        for name, distribution in sorted(closure(requirements(deployable)).items())
    ]
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {
            "component": {
                "type": "container",
                "name": f"millrace/{deployable}",
                "version": metadata.version("millrace"),
            }
        },
        "components": components,
    }


def _licences(distribution: metadata.Distribution) -> list[str]:
    fields = distribution.metadata.json
    text = str(fields.get("license_expression") or fields.get("license") or "").strip()
    # Some projects put the whole text of the licence here.
    return text.splitlines()[:1]


def main(arguments: list[str]) -> int:
    """0; 2 for an unknown deployable."""
    known = sorted(path.parent.name for path in _FOLDER.glob("*/requirements.txt"))
    if len(arguments) != 1 or arguments[0] not in known:
        print(f"usage: python -m services.bill_of_materials {{{','.join(known)}}}", file=sys.stderr)
        return 2
    print(json.dumps(bill(arguments[0]), indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
