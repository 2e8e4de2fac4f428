"""`python -m services.bill_of_materials DEPLOYABLE`: what an image holds, as CycloneDX 1.6 JSON.

Versions and licences of Python's packages are those of this environment, installed from the same constraints
as the images. Packages of the operating system are read from the image's own list. The same input gives the
same bytes. It is a tool of those who build images, with libraries of the `dev` group.
"""

from __future__ import annotations

import argparse
import os
import sys
import uuid
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

from cyclonedx.contrib.license.factories import LicenseFactory
from cyclonedx.model.bom import Bom, BomMetaData
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.output.json import JsonV1Dot6
from debian.deb822 import Deb822
from packageurl import PackageURL
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


def bill(
    deployable: str, *, dpkg_status: Path | None = None, distribution: str | None = None, made_unix_s: int = 0
) -> str:
    """The document. `dpkg_status` is the image's /var/lib/dpkg/status, `distribution` such as debian-12."""
    components = list(_python_packages(deployable))
    if dpkg_status is not None:
        components += _debian_packages(dpkg_status, distribution)
    image = Component(
        type=ComponentType.CONTAINER,
        name=f"millrace/{deployable}",
        version=metadata.version("millrace"),
        bom_ref=f"millrace/{deployable}",
    )
    contents = "\n".join(sorted(str(component.purl) for component in components))
    bom = Bom(
        components=components,
        metadata=BomMetaData(component=image, timestamp=datetime.fromtimestamp(made_unix_s, UTC)),
        serial_number=uuid.uuid5(uuid.NAMESPACE_URL, f"{image.name}@{image.version}\n{contents}"),
    )
    bom.register_dependency(image, components)
    return JsonV1Dot6(bom).output_as_string(indent=1)


def _python_packages(deployable: str) -> Iterator[Component]:
    licences = LicenseFactory()
    for name, distribution in closure(requirements(deployable)).items():
        purl = PackageURL("pypi", None, name, distribution.version)
        fields = distribution.metadata.json
        text = str(fields.get("license_expression") or fields.get("license") or "").strip()
        yield Component(
            type=ComponentType.LIBRARY,
            name=name,
            version=distribution.version,
            purl=purl,
            bom_ref=str(purl),
            # Some projects put the whole text of the licence here.
            licenses=[licences.make_from_string(line) for line in text.splitlines()[:1]],
        )


def _debian_packages(dpkg_status: Path, distribution: str | None) -> Iterator[Component]:
    with dpkg_status.open("rb") as status:
        for package in Deb822.iter_paragraphs(status):
            # Removed packages whose settings are left are listed as well.
            if not package["Status"].endswith(" installed"):
                continue
            qualifiers = {"arch": package["Architecture"]}
            if distribution is not None:
                qualifiers["distro"] = distribution
            purl = PackageURL("deb", "debian", package["Package"], package["Version"], qualifiers)
            yield Component(
                type=ComponentType.LIBRARY,
                name=package["Package"],
                version=package["Version"],
                purl=purl,
                bom_ref=str(purl),
            )


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes the document to stdout; exits with 2 for what is not known."""
    parser = argparse.ArgumentParser(prog="python -m services.bill_of_materials", description=__doc__)
    known = sorted(path.parent.name for path in _FOLDER.glob("*/requirements.txt"))
    parser.add_argument("deployable", choices=known)
    parser.add_argument("--dpkg-status", type=Path, help="the image's /var/lib/dpkg/status")
    parser.add_argument("--distribution", help="of the image's operating system, for example debian-12")
    options = parser.parse_args(arguments)
    made_unix_s = int(os.environ.get("SOURCE_DATE_EPOCH", "0"))
    print(
        bill(
            options.deployable,
            dpkg_status=options.dpkg_status,
            distribution=options.distribution,
            made_unix_s=made_unix_s,
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
