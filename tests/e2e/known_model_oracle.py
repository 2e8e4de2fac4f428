"""What transformers answers from the same GGUF file, its weights dequantized into float32."""

from __future__ import annotations

from pathlib import Path

import msgspec
import torch
import transformers
from transformers.convert_slow_tokenizer import bytes_to_unicode
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint


class Difference(msgspec.Struct, frozen=True):
    """A token of an answer that is not the likeliest behind those before it: its place, and by how much the
    likeliest token's logit is above its own.
    """

    prompt: str
    position: int
    likeliest: str
    found: str
    margin: float


class KnownModelOracle:
    """transformers' model and tokenizer of one GGUF file."""

    def __init__(self, path: Path) -> None:
        self._tokenizer = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
        letters = {letter: byte for byte, letter in bytes_to_unicode().items()}
        # Each token but the special ones stands for bytes.
        self._ids = {
            bytes(letters[letter] for letter in token): number
            for token, number in self._tokenizer.get_vocab().items()
            if number not in self._tokenizer.all_special_ids and set(token) <= set(letters)
        }
        values = load_gguf_checkpoint(str(path))["config"]
        rotation = {"rope_type": "default", "rope_theta": values.pop("rope_theta")}
        config = transformers.AutoConfig.for_model(
            values.pop("model_type"),
            rope_parameters=rotation,
            **{name: value for name, value in values.items() if not name.startswith("_")},
        )
        # By its own reader of such files, without accelerate, which `from_pretrained` asks for.
        self._model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        read = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=self._model)["tensors"]
        found = self._model.load_state_dict(read, strict=False)
        # The head is the embedding.
        assert (found.missing_keys, found.unexpected_keys) == (["lm_head.weight"], [])
        self._model.tie_weights()
        assert {value.dtype for value in self._model.state_dict().values()} == {torch.float32}

    def differences(self, prompt: str, tokens: list[bytes], *, is_whole: bool) -> list[Difference]:
        """Nothing where every token of the answer is the likeliest behind those before it: the answer is the
        greedy one then. `is_whole`: it ended by itself, so the end is a token of it. Texts would not do,
        since the same one can be told by other tokens.
        """
        begin = self._tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], add_generation_prompt=True, return_dict=False
        )
        answer = [self._ids[token] for token in tokens]
        if is_whole:
            answer.append(self._tokenizer.eos_token_id)
        with torch.inference_mode():
            logits = self._model(torch.tensor([begin + answer])).logits[0, len(begin) - 1 : -1]
        found = []
        for position, (row, given) in enumerate(zip(logits, answer, strict=True)):
            best = int(row.argmax())
            if best != given:
                likeliest, instead = self._tokenizer.decode(best), self._tokenizer.decode(given)
                margin = float(row[best] - row[given])
                found.append(Difference(prompt, position, likeliest, instead, margin))
        return found
