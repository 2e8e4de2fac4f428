"""A WordPiece tokenizer, as BERT has it."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

_WORDS = "hello there cold wind from the sea is and who sells fish red blue green"
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


def write_word_pieces(folder: Path, *, truncates_at: int = 0) -> Tokenizer:
    """Writes tokenizer.json and tokenizer_config.json; of fewer than 199 ids. `truncates_at` is what it cuts
    to.
    """
    letters = "abcdefghijklmnopqrstuvwxyz"
    pieces = [*SPECIAL, *_WORDS.split(), *letters, *(f"##{letter}" for letter in letters)]
    vocab = {text: index for index, text in enumerate(dict.fromkeys(pieces))}
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS]:0 $A:0 [SEP]:0",
        pair="[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1",
        special_tokens=[("[CLS]", vocab["[CLS]"]), ("[SEP]", vocab["[SEP]"])],
    )
    tokenizer.decoder = decoders.WordPiece()
    if truncates_at:
        tokenizer.enable_truncation(truncates_at)
    tokenizer.save(str(folder / "tokenizer.json"))
    tokenizer.no_truncation()
    special = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    (folder / "tokenizer_config.json").write_text(json.dumps(special))
    return tokenizer
