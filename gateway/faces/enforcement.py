"""What an API without a field for it says in warnings: what of schemas and grammars is not enforced."""

from __future__ import annotations

import re

from contract.grammar import EnforcementReport
from gateway.faces.unserved import in_header
from gateway.types.request import GenerationRequest

# Characters of a client's own words in a header.
_MAX_WARNING = 512
# How the tokenizer service begins the paths of a tool's schema.
_PARAMETERS = re.compile(r"/tools/(?P<index>\d+)/parameters(?P<path>/.*)?", re.DOTALL)


def unenforced(report: EnforcementReport | None, request: GenerationRequest) -> list[str]:
    """A warning for each field of the request with keywords that are not enforced exactly."""
    if report is None or report.exact:
        return []
    warnings: list[str] = []
    by_field: dict[str, list[str]] = {}
    for each in (*report.approximated, *report.unenforced):
        if each.keyword == "parameters":
            # Nothing of a tool's schema is: `AcceptedAnswer` tells it in every API.
            continue
        if each.keyword == "input_grammar":
            _, _, index, _ = each.path.split("/")
            field = request.field(f"tools[{index}].function.input_grammar")
            warnings.append(_told(f"{field} is not enforced: {each.note}; the model is told of it"))
            continue
        found = _PARAMETERS.fullmatch(each.path)
        if found is None:
            field, path = request.field("response_format"), each.path
        else:
            field, path = request.field(f"tools[{found['index']}].function.parameters"), found["path"] or "/"
        by_field.setdefault(field, []).append(f"{each.keyword} at {path}")
    return warnings + [
        f"{field} is not enforced exactly: {_told(', '.join(parts))}" for field, parts in by_field.items()
    ]


def _told(words: str) -> str:
    """Paths are a client's words, and this is for a header."""
    return in_header(words)[:_MAX_WARNING]
