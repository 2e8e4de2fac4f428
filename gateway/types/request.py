"""What a client asks for, in plain data. Unset options are None: the checkpoint's defaults are applied
later.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from contract.chat import Prompt, ResponseFormat
from contract.errors import MillraceError, Reason
from contract.grammar import EnforcementReport, GrammarSpec
from contract.sampling import SamplingOptions

# A prompt made ready by the tokenizer service.


class Prepared(msgspec.Struct, frozen=True, kw_only=True):
    """Everything an engine needs of a prompt."""

    token_ids: tuple[int, ...]
    grammar: GrammarSpec | None = None
    enforcement: EnforcementReport | None = None
    vocabulary_fingerprint: str = ""
    # Text that the template placed at the start of the assistant turn, for the output parsers.
    assistant_prefix: str = ""


class GenerationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One request of either face."""

    model: str
    prompt: Prompt
    sampling: SamplingOptions = SamplingOptions()
    response_format: ResponseFormat | None = None
    service_tier: str = ""
    # Requests with the same one had better meet on one engine.
    prompt_cache_key: str = ""
    metadata: Mapping[str, str] = {}
    # Whether a cheaper model may answer before the request is refused for load.
    allow_fallback: bool = True
    # Return the prompt before the completion.
    echo: bool = False
    streaming: bool = True
    # Prompts that came together with this one, itself included, where it is the first; 0 where it is another:
    # the first one takes the streams of all.
    num_prompts: int = 1
    # For metrics: http or grpc.
    face: str = "http"
    # Our field name to the face's own, for error messages; and parts of names such as ".function.name".
    field_names: Mapping[str, str] = {}
    field_parts: Mapping[str, str] = {}

    @property
    def num_streams(self) -> int:
        """Sequences that it has under way at a time, those that came together with it included."""
        return self.num_prompts * self.sampling.branches[1]

    def field(self, name: str) -> str:
        """The name under which the caller knows a field, or a part of one as in "messages[0].role"."""
        head, rest = _split(name)
        known = self.field_names.get(head, head)
        if head == "response_format" and known != head:
            # The face has several names for a constraint, and has put down the one that was used.
            return name if name.startswith(f"{known}.") else known
        for part, own in self.field_parts.items():
            rest = rest.replace(part, own)
        return known + rest

    def tell(self, error: MillraceError) -> MillraceError:
        """A refusal of a service behind, in the caller's terms: services name their own protocols' fields, or
        leave the name out of the message.
        """
        if not error.field:
            return error
        head, rest = _split(error.field.removeprefix("sampling.").removeprefix("conversation."))
        known = self.field(_PROTOCOL_FIELDS.get(head, head) + rest)
        message = error.message
        if message.startswith(error.field):
            message = known + message.removeprefix(error.field)
        elif known not in message and error.reason is not Reason.CONTEXT_LENGTH_EXCEEDED:
            # That one begins as OpenAI's does.
            message = f"{known}: {message}"
        return MillraceError(
            error.reason,
            message,
            field=known,
            metadata=error.metadata,
            retry_after_s=error.retry_after_s,
        )


# Fields of the protocols behind the gateway that have another name in GenerationRequest.
_PROTOCOL_FIELDS: Mapping[str, str] = {
    "prompt_token_ids": "prompt",
    "output_token_ids": "prompt",
    "grammar": "response_format",
    "adapter": "model",
}


def _split(field: str) -> tuple[str, str]:
    """ "messages" and "[0].role" of "messages[0].role"."""
    for index, character in enumerate(field):
        if character in ".[":
            return field[:index], field[index:]
    return field, ""
