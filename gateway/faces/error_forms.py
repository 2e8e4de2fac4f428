"""The table of the faces' forms of errors: a face whose errors look different is a row of `by_prefix`."""

from __future__ import annotations

from gateway.faces.anthropic.errors import ERRORS as ANTHROPIC
from gateway.faces.grpc.errors import GrpcErrors
from gateway.faces.openai.errors import ERRORS
from gateway.types.error_form import ErrorForms

ERROR_FORMS = ErrorForms(grpc=GrpcErrors(), by_prefix={"/v1/messages": ANTHROPIC}, default=ERRORS)
