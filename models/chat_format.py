"""The chat format, twice: the Jinja template shipped with the tokenizer, and the same layout as weighted
text for training.

A unit test holds the two together. The format is ChatML with Hermes-style tool calls. `tojson` is the
filter of
`transformers` (plain `json.dumps`, keys in their own order, nothing escaped for HTML).
"""

from __future__ import annotations

import json
from typing import Any

from models.corpus.document import CorpusDocument, Message

IM_START, IM_END, END_OF_TEXT = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
TOOL_PREAMBLE = "# Tools\nYou may call these functions:\n<tools>\n"
TOOL_EPILOGUE = (
    '</tools>\nTo call one, answer with <tool_call>\n{"name": ..., "arguments": ...}\n</tool_call>'
)

CHAT_TEMPLATE = (
    """\
{%- set has_system = messages and messages[0].role in ['system', 'developer'] %}
{%- if tools or has_system %}
    {{- '<|im_start|>system\\n' }}
    {%- if has_system %}
        {{- messages[0].content }}
    {%- endif %}
    {%- if tools %}
        {%- if has_system %}
            {{- '\\n\\n' }}
        {%- endif %}
        {{- '"""
    + TOOL_PREAMBLE.replace("\n", "\\n")
    + """' }}
        {%- for tool in tools %}
            {{- (tool.function if tool.function is defined else tool) | tojson }}
            {{- '\\n' }}
        {%- endfor %}
        {{- '"""
    + TOOL_EPILOGUE.replace("\n", "\\n")
    + """' }}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.content is string %}
        {%- set content = message.content %}
    {%- elif message.content %}
        {%- set parts = namespace(text='') %}
        {%- for part in message.content %}
            {%- set parts.text = parts.text + (part.text if part.text is defined else '') %}
        {%- endfor %}
        {%- set content = parts.text %}
    {%- else %}
        {%- set content = '' %}
    {%- endif %}
    {%- if loop.first and has_system %}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' + content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- elif message.role == 'assistant' %}
        {%- if '</think>' in content and not loop.last %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' + content }}
        {%- for call in message.tool_calls or [] %}
            {%- if content or not loop.first %}
                {{- '\\n' }}
            {%- endif %}
            {%- set function = call.function if call.function is defined else call %}
            {{- '<tool_call>\\n{"name": "' + function.name + '", "arguments": ' }}
            {{- function.arguments if function.arguments is string else function.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking %}
        {{- '<think>\\n' }}
    {%- endif %}
{%- endif %}
"""
)

Segment = tuple[str, bool]
"""Text, and whether the model is trained to produce it."""


def to_json(value: Any) -> str:
    """The `tojson` filter that the template is written for."""
    return json.dumps(value, ensure_ascii=False)


def _assistant_body(message: Message) -> str:
    parts = [message["content"]] if message["content"] else []
    for call in message.get("tool_calls", ()):
        function = call["function"]
        body = f'{{"name": "{function["name"]}", "arguments": {to_json(function["arguments"])}}}'
        parts.append(f"<tool_call>\n{body}\n</tool_call>")
    return "\n".join(parts)


def _system_text(document: CorpusDocument) -> str:
    first = document.messages[0]
    text: str = first["content"] if first["role"] == "system" else ""
    if not document.tools:
        return text
    listing = "".join(f"{to_json(tool['function'])}\n" for tool in document.tools)
    return (text + "\n\n" if text else "") + TOOL_PREAMBLE + listing + TOOL_EPILOGUE


def segments(document: CorpusDocument) -> list[Segment]:
    """The text of `document` in order; only what the assistant writes is trained, and all of a plain text."""
    if not document.messages:
        return [(document.text + END_OF_TEXT, True)]
    result: list[Segment] = []
    system_text = _system_text(document)
    if system_text:
        result.append((f"{IM_START}system\n{system_text}{IM_END}\n", False))
    for message in document.messages:
        role = message["role"]
        if role == "assistant":
            body = _assistant_body(message)
            header = f"{IM_START}assistant\n"
            if document.thinking and body.startswith("<think>\n"):
                header, body = header + "<think>\n", body.removeprefix("<think>\n")
            result += [(header, False), (body + IM_END, True), ("\n", False)]
        elif role == "tool":
            content = message["content"]
            result.append((f"{IM_START}user\n<tool_response>\n{content}\n</tool_response>{IM_END}\n", False))
        elif role == "user":
            result.append((f"{IM_START}user\n{message['content']}{IM_END}\n", False))
    return result
