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

GLM = ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", "<|endoftext|>")
ARGUMENTS = ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
DSML = ("<｜begin▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "<｜System｜>", "<｜end▁of▁sentence｜>")

# Control tokens, and others that are tokens, of further families; the last control token ends a turn.
MORE: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "qwen_xml": (CHATML, MARKUP),
    "glm": (GLM, (*MARKUP, *ARGUMENTS)),
    "glm47": (GLM, (*MARKUP, *ARGUMENTS)),
    "minimax": (
        ("]~!b[", "]~b]", "[e~["), ("<think>", "</think>", "<minimax:tool_call>", "</minimax:tool_call>"),
    ),
    **dict.fromkeys(
        ("deepseek_v32", "deepseek_v4", "deepseek_v41"), (DSML, ("<think>", "</think>", "｜DSML｜"))
    ),
    "kimi": (
        ("<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>", "<|tool_calls_section_begin|>",
         "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>",
         "<|tool_call_end|>", "<|im_end|>"),
        ("<think>", "</think>"),
    ),
    "harmony": (
        ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|constrain|>", "<|call|>", "<|return|>"), (),
    ),
    "granite": (("<|start_of_role|>", "<|end_of_role|>", "<|tool_call|>", "<|end_of_text|>"), ()),
    "phi4": (("<|tool_call|>", "<|/tool_call|>", "<|user|>", "<|assistant|>", "<|end|>"), ()),
    "functools": (("<|user|>", "<|assistant|>", "<|end|>"), ()),
    "gemma4": (
        ("<bos>", "<|turn>", "<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", '<|"|>', "<turn|>"),
        (),
    ),
    "functiongemma": (
        ("<bos>", "<start_of_turn>", "<start_function_call>", "<end_function_call>", "<escape>",
         "<end_of_turn>"),
        (),
    ),
    "command": (
        ("<BOS_TOKEN>", "<|START_OF_TURN_TOKEN|>", "<|CHATBOT_TOKEN|>", "<|USER_TOKEN|>", "<|SYSTEM_TOKEN|>",
         "<|START_THINKING|>", "<|END_THINKING|>", "<|START_ACTION|>", "<|END_ACTION|>",
         "<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|END_OF_TURN_TOKEN|>"),
        (),
    ),
    "llama4": (
        ("<|begin_of_text|>", "<|header_start|>", "<|header_end|>", "<|python_start|>", "<|python_end|>",
         "<|eot|>"),
        (),
    ),
}  # fmt: skip


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
    control, markup = MORE[name]
    return write(folder, byte_level(control, markup), _text(name), config={"eos_token": control[-1]})


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
