"""From checkpoints and OpenAI-style dictionaries to the service's own objects."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from contract.chat import Conversation, Message, Role, Tool, ToolCall
from tokenizer_svc.config import PromptLimitsConfig
from tokenizer_svc.text.checkpoint import Checkpoint, load_checkpoint
from tokenizer_svc.text.encoding import ControlTokens, TextEncoder
from tokenizer_svc.text.template import ChatTemplates


class Text:
    """The text side of the service for one checkpoint."""

    def __init__(self, path: Path, limits: PromptLimitsConfig | None = None) -> None:
        self.checkpoint: Checkpoint = load_checkpoint(path)
        self.control = ControlTokens(
            self.checkpoint.description["added_tokens"], self.checkpoint.templates.values()
        )
        self.templates = ChatTemplates(
            self.checkpoint.templates,
            self.checkpoint.special_tokens,
            self.control,
            limits or PromptLimitsConfig(),
        )
        self.encoder = TextEncoder(self.checkpoint, self.control, turn_cache_tokens=1 << 20)

    def ids(self, conversation: Conversation, tenant: str = "t") -> list[int]:
        """Rendered and encoded."""
        return self.encoder.encode_rendered(self.templates.render(conversation), tenant=tenant)


def conversation(
    messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None, **options: Any
) -> Conversation:
    """From the form that `transformers` takes."""
    return Conversation(
        messages=tuple(
            Message(
                role=Role(message["role"]),
                content=message.get("content") or "",
                name=message.get("name", ""),
                tool_call_id=message.get("tool_call_id", ""),
                reasoning=message.get("reasoning_content", ""),
                tool_calls=tuple(
                    ToolCall(
                        id=call["id"],
                        name=call["function"]["name"],
                        arguments_json=json.dumps(call["function"]["arguments"], ensure_ascii=False),
                    )
                    for call in message.get("tool_calls", ())
                ),
            )
            for message in messages
        ),
        tools=tuple(
            Tool(
                name=tool["function"]["name"],
                description=tool["function"].get("description", ""),
                parameters_json=json.dumps(tool["function"]["parameters"])
                if "parameters" in tool["function"]
                else "",
            )
            for tool in tools or ()
        ),
        **options,
    )
