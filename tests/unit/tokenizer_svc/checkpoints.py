"""Small checkpoints of the two families of tokenizers, made on the spot."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

TEXT = [
    'Hello world, this is a test. {"name": "get_weather", "arguments": {"city": "Zürich", "days": 3}}\n' * 3,
    "Die Zugspitze ist 2962 m hoch; 東京は日本の首都です。 🙂 def f(x):\n    return x ** 2\n" * 3,
    "system user assistant tool <think> reasoning </think> answer 0 1 2 3 4 5 6 7 8 9\n" * 3,
]


def byte_level(control: tuple[str, ...], markup: tuple[str, ...] = ()) -> Tokenizer:
    """Byte-level BPE in the style of GPT-2, Llama 3 and Qwen."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    tokenizer.add_special_tokens([AddedToken(each, special=True, normalized=False) for each in control])
    tokenizer.add_tokens([AddedToken(each, special=False, normalized=False) for each in markup])
    return tokenizer


def sentencepiece(control: tuple[str, ...]) -> Tokenizer:
    """BPE over pieces with byte fallback in the style of Llama 2 and Mistral; control pieces come first."""
    pieces = ["<unk>", *control, *(f"<0x{byte:02X}>" for byte in range(256)), "▁"]
    alphabet = sorted(
        {character for text in TEXT for character in text.replace(" ", "") if ord(character) < 0x250}
    )
    pieces += [character for character in alphabet if character not in pieces]
    merges = [
        ("▁", "t"),
        ("h", "e"),
        ("▁t", "he"),
        ("i", "s"),
        ("▁", "is"),
        ("l", "l"),
        ("e", "ll"),
        ("o", "r"),
    ]
    pieces += [left + right for left, right in merges]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={piece: index for index, piece in enumerate(pieces)},
            merges=merges,
            unk_token="<unk>",
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(
        [AddedToken(each, special=True, normalized=False) for each in ("<unk>", *control)]
    )
    return tokenizer


def metaspace(control: tuple[str, ...]) -> Tokenizer:
    """The same with a Metaspace pre-tokenizer that marks only the beginning of the text."""
    description = json.loads(sentencepiece(control).to_str())
    tokenizer = Tokenizer.from_str(json.dumps({**description, "normalizer": None}))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    return tokenizer


def write(
    folder: Path,
    tokenizer: Tokenizer,
    template: str | dict[str, str] = "",
    *,
    config: dict[str, Any] | None = None,
    generation: dict[str, Any] | None = None,
) -> Path:
    """A directory in Hugging Face format, without weights."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    named = (
        [{"name": name, "template": text} for name, text in template.items()]
        if isinstance(template, dict)
        else template
    )
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    (folder / "tokenizer_config.json").write_text(
        json.dumps({**settings, **({"chat_template": named} if named else {}), **(config or {})})
    )
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder
