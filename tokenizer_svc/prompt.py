"""From a conversation to token ids and to what its answer's grammar depends on.

The same code serves short conversations in the service and large ones in a worker.
"""

from __future__ import annotations

from contract.chat import Conversation, ResponseFormat, ToolChoiceMode
from tokenizer_svc import formats
from tokenizer_svc.checkpoint import Checkpoint
from tokenizer_svc.config import LimitsConfig
from tokenizer_svc.control import ControlTokens
from tokenizer_svc.encoding import TextEncoder
from tokenizer_svc.grammar.request import GrammarRequest, ToolRules, ToolSpec
from tokenizer_svc.limits import RequestLimits, invalid, tool_parameters
from tokenizer_svc.template import ChatTemplates


class Prompts:
    """Templates, encoder and limits of one checkpoint."""

    def __init__(self, checkpoint: Checkpoint, limits: LimitsConfig, *, turn_cache_tokens: int) -> None:
        added = checkpoint.description.get("added_tokens", [])
        tokens = {token["content"]: token["id"] for token in added}
        self.tool_call_format = formats.tool_call_format(checkpoint.templates, tokens)
        self.reasoning_format = formats.reasoning_format(checkpoint.templates, tokens)
        self._control = ControlTokens(added, checkpoint.templates.values())
        self.templates = ChatTemplates(checkpoint.templates, checkpoint.special_tokens, self._control, limits)
        self.encoder = TextEncoder(checkpoint, self._control, turn_cache_tokens=turn_cache_tokens)
        self.limits = RequestLimits(limits, checkpoint, writes_user_turns=self.templates.writes_user_turns)

    def assistant_prefix(self, conversation: Conversation, rendered: str) -> str:
        """What the template wrote of the assistant's turn, for output parsers."""
        if not self.reasoning_format or conversation.continue_final_message:
            return ""
        return formats.assistant_prefix(rendered, self._control.control)

    def grammar_request(
        self, conversation: Conversation, form: ResponseFormat | None, prefix: str
    ) -> GrammarRequest | None:
        """What the answer has to follow; None when it is free. Raises INVALID_ARGUMENT for a tool choice that
        the tools do not allow.
        """
        tools = self._tool_rules(conversation)
        if form is None and tools is None:
            return None
        open_reasoning = formats.THINK_OPEN in prefix and formats.THINK_CLOSE not in prefix
        return GrammarRequest(response_format=form, tools=tools, reasoning_open=open_reasoning)

    def _tool_rules(self, conversation: Conversation) -> ToolRules | None:
        choice = conversation.tool_choice
        mode = choice.mode
        if mode is ToolChoiceMode.NONE or not conversation.tools:
            if choice.forces:
                raise invalid(f"tool_choice {mode.value} needs tools; there are none", "tool_choice")
            return None
        if mode is ToolChoiceMode.AUTO and not self.tool_call_format:
            # The template alone decides what the model makes of its tools.
            return None
        tools = tuple(
            ToolSpec(name=tool.name, parameters=tool_parameters(tool, index), strict=tool.strict)
            for index, tool in enumerate(conversation.tools)
            if mode is not ToolChoiceMode.NAMED or tool.name == choice.name
        )
        if not tools:
            known = ", ".join(tool.name for tool in conversation.tools)
            raise invalid(f"tool_choice names {choice.name!r}; tools: {known}", "tool_choice")
        return ToolRules(
            tools=tools,
            mode=mode,
            parallel=conversation.parallel_tool_calls and mode is not ToolChoiceMode.NAMED,
            format=self.tool_call_format,
        )
