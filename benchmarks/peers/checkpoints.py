"""Checkpoints that are compared: random weights in two shapes, for speed alone, and SmolLM2 as it is.

Random ones: rows of the vocabulary beyond the tokenizer's are zero, so that a greedy answer never leaves the
tokens that have text; they are read and multiplied all the same. Needs transformers, which is a dependency
of the checks.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sysconfig
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from benchmarks.peers.environments import environment, made_whole
from checkpoint.known import fetched

TOKENIZER_SIZE = 32_000
SEED = 0
WEIGHT_STD = 0.02

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": {
        "model_type": "qwen3",
        "hidden_size": 1024,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 3072,
        "vocab_size": 151_936,
        "tie_word_embeddings": True,
        "rope_theta": 1e6,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 4096,
    },
    "llama-40m": {
        "model_type": "llama",
        "hidden_size": 512,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "intermediate_size": 1536,
        "vocab_size": 32_000,
        "tie_word_embeddings": False,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 4096,
    },
    # The known model: real weights in 4 bits, as a GGUF file beside the same numbers in Hugging Face format.
    "smollm2-135m": {
        "model_type": "llama",
        "hidden_size": 576,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "intermediate_size": 1536,
        "vocab_size": 49_152,
    },
}
KNOWN = "smollm2-135m"
# The file of `KNOWN`, in its folder.
GGUF_FILE = "model.gguf"
_READ_GGUF = """
import sys
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
folder, file = sys.argv[1:]
AutoTokenizer.from_pretrained(folder, gguf_file=file).save_pretrained(folder)
model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=torch.bfloat16)
model.hf_quantizer = None
if hasattr(model.config, "quantization_config"):
    del model.config.quantization_config
model.save_pretrained(folder)
"""


def make_checkpoint(name: str, folder: Path, shapes: Mapping[str, Mapping[str, Any]] = SHAPES) -> Path:
    """The checkpoint's directory in Hugging Face format, made unless it is there already."""
    directory = folder / name
    if not (directory / "model.safetensors").exists():
        shutil.rmtree(directory, ignore_errors=True)
        with made_whole(directory) as partial:
            if name == KNOWN:
                _write_known(name, partial)
            else:
                _write_checkpoint(dict(shapes[name]), partial)
    return directory


def _write_known(name: str, directory: Path) -> None:
    """The fetched file, and what transformers reads in it: for servers that read no GGUF."""
    directory.mkdir(parents=True)
    shutil.copyfile(fetched(name, "--checkpoint"), directory / GGUF_FILE)
    # In an environment of its own: transformers wants accelerate for such files, which no test needs.
    packages = ("transformers==5.23.0", "gguf", "accelerate", "sentencepiece")
    home = environment(directory.parent, "gguf", packages)
    subprocess.run([str(home / "bin/python"), "-c", _READ_GGUF, str(directory), GGUF_FILE], check=True)


def _write_checkpoint(shape: dict[str, Any], directory: Path) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    vocabulary = _write_tokenizer(directory)
    config = AutoConfig.for_model(shape.pop("model_type"), **shape, bos_token_id=None, eos_token_id=0)
    torch.manual_seed(SEED)
    models: Any = AutoModelForCausalLM
    model = models.from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        for weights in model.parameters():
            if weights.dim() > 1:
                weights.normal_(0.0, WEIGHT_STD)
        model.lm_head.weight[vocabulary:] = 0
        # The end of a sequence never wins, so that servers that cannot ignore it answer in full.
        model.lm_head.weight[0] = 0
    model.save_pretrained(directory)


def matrix_parameters(name: str) -> int:
    """Parameters that one token is multiplied with, the head's included."""
    shape = SHAPES[name]
    hidden, head_dim = shape["hidden_size"], shape["head_dim"]
    heads = shape["num_attention_heads"] + 2 * shape["num_key_value_heads"]
    layer = hidden * head_dim * (heads + shape["num_attention_heads"])
    layer += 3 * hidden * int(shape["intermediate_size"])
    return int(shape["num_hidden_layers"] * layer + shape["vocab_size"] * hidden)


def kv_values_per_token(name: str) -> int:
    """Numbers that the cache keeps for a token."""
    shape = SHAPES[name]
    return int(2 * shape["num_hidden_layers"] * shape["num_key_value_heads"] * shape["head_dim"])


def attention_operations(name: str, num_tokens: int, before: int = 0) -> int:
    """Operations of causal attention over a prompt of so many tokens after `before` that are cached."""
    shape = SHAPES[name]
    width = shape["num_hidden_layers"] * shape["num_attention_heads"] * shape["head_dim"]
    # Two for each element of a key and of a value; a token sees half of its own prompt.
    return int(4 * width * (num_tokens * before + num_tokens**2 / 2))


def _write_tokenizer(directory: Path) -> int:
    """Trains a byte-level BPE on Python's own library; returns the size of its vocabulary."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    directory.mkdir(parents=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=TOKENIZER_SIZE,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(), trainer)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|endoftext|>",
        "pad_token": "<|endoftext|>",
        "chat_template": CHATML,
        "model_max_length": 4096,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2))
    return int(tokenizer.get_vocab_size())


def _texts(count: int = 1500) -> Iterator[str]:
    library = Path(sysconfig.get_paths()["stdlib"])
    for path in islice(sorted(library.rglob("*.py")), count):
        yield path.read_text(errors="ignore")
