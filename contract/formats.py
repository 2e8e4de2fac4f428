"""Names of the formats in which models write tool calls and reasoning, and the tags around reasoning: the
tokenizer service finds them, gateways read them, engines write their ends.
"""

from __future__ import annotations

from typing import Literal

# From version 11 of its tokenizers on, Mistral writes the name before the arguments, at first with the id
# between them; DeepSeek from V3.1 on writes it before the separator, and arguments without a fence.
ToolCallFormat = Literal[
    "hermes", "llama3", "mistral", "mistral_v11", "mistral_v13", "deepseek", "deepseek_v31"
]
ReasoningFormat = Literal["think"]
THINK_OPEN, THINK_CLOSE = "<think>", "</think>"
