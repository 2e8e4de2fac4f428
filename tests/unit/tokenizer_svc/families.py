"""One checkpoint per family of chat templates, and conversations that each must render."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.unit.tokenizer_svc.checkpoints import byte_level, metaspace, sentencepiece, write

_TEMPLATES = Path(__file__).parent / "templates"

CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
LLAMA3 = (
    "<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>",
    "<|python_tag|>",
)  # fmt: skip
MISTRAL = (
    "<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]",
    "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[CALL_ID]", "[ARGS]",
)  # fmt: skip
GEMMA = ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>")
DEEPSEEK = (
    "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>",
    "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁sep｜>",
    "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>",
    "<｜tool▁outputs▁begin｜>", "<｜tool▁outputs▁end｜>", "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>",
)  # fmt: skip
MARKUP = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")


def _text(name: str) -> str:
    return (_TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")


def make(name: str, folder: Path) -> Path:  # noqa: PLR0911 one return per family
    """The checkpoint of one family."""
    match name:
        case "chatml":
            return write(folder, byte_level(CHATML), _text(name), config={"eos_token": "<|im_end|>"})
        case "llama3":
            config = {"bos_token": LLAMA3[0], "eos_token": "<|eot_id|>"}
            return write(folder, byte_level(LLAMA3), _text(name), config=config)
        case "mistral_v11" | "mistral_v13":
            return write(
                folder, byte_level(MISTRAL), _text(name), config={"bos_token": "<s>", "eos_token": "</s>"}
            )
        case "mistral":
            config = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
            return write(folder, sentencepiece(MISTRAL), _text(name), config=config)
        case "qwen_tools":
            return write(folder, byte_level(CHATML, MARKUP), _text(name), config={"eos_token": "<|im_end|>"})
        case "gemma":
            config = {"bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>"}
            return write(folder, metaspace(GEMMA), _text(name), config=config)
        case "deepseek" | "deepseek_v31":
            config = {"bos_token": DEEPSEEK[0], "eos_token": DEEPSEEK[1]}
            return write(folder, byte_level(DEEPSEEK, ("<think>", "</think>")), _text(name), config=config)
    raise ValueError(name)


FAMILIES = (
    "chatml", "llama3", "mistral", "mistral_v11", "mistral_v13", "qwen_tools", "gemma", "deepseek",
    "deepseek_v31",
)  # fmt: skip
WITH_TOOLS = ("llama3", "mistral", "mistral_v11", "mistral_v13", "qwen_tools", "deepseek", "deepseek_v31")

PLAIN: tuple[list[dict[str, Any]], ...] = (
    [{"role": "user", "content": "Hello world"}],
    [{"role": "system", "content": "  Be brief.\n"}, {"role": "user", "content": " Grüße, 東京? \n"}],
    [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "first"},
        {"role": "assistant", "content": "an answer\nof two lines"},
        {"role": "user", "content": "def f(x):\n\treturn x  # 🙂"},
    ],
)
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Weather of a <city>",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
                "required": ["city"],
            },
        },
    }
]
CALLED: list[dict[str, Any]] = [
    {"role": "user", "content": "Weather?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {
                "id": "abcdefghi",
                "type": "function",
                "function": {"name": "get_weather", "arguments": {"city": "Zürich", "days": 3}},
            }
        ],
    },
    {"role": "tool", "content": "sunny", "tool_call_id": "abcdefghi", "name": "get_weather"},
    {"role": "assistant", "content": "It is sunny."},
    {"role": "user", "content": "Thanks"},
]
