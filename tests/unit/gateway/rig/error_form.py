"""A second face's form of errors, as another API might have it, for all paths that begin in one way."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from contract.errors import MillraceError
from gateway.faces.error_forms import ERROR_FORMS
from gateway.types.error_form import ErrorForm

PREFIX = "/v1/other"


class OtherErrors(ErrorForm):
    """Nothing in it is as in OpenAI's form."""

    elapsed_header = "x-other-elapsed"

    def body(self, error: MillraceError, request_id: str = "") -> bytes:
        return msgspec.json.encode({"kind": "error", "what": {"kind": error.reason.value}})

    def headers(self, error: MillraceError) -> dict[str, str]:
        return {"content-type": "application/other+json", "x-other-error": str(error.mapping.http_status)}


FORMS = replace(ERROR_FORMS, by_prefix={**ERROR_FORMS.by_prefix, PREFIX: OtherErrors()})


def reason_in_other_form(body: bytes) -> str:
    """The reason that an error's body in this form tells; raises where it is in another."""
    told = msgspec.json.decode(body)
    assert told == {"kind": "error", "what": {"kind": told["what"]["kind"]}}
    return str(told["what"]["kind"])
