"""What a checkpoint says of how it pools: the files of sentence-transformers, and the architecture.

Read the same way by the engine, which computes it, and by the tokenizer service, which tells the gateway.
Sources: modules.json with the modules' config.json, sentence_bert_config.json and
config_sentence_transformers.json as sentence-transformers 3 to 5 write them; config.json for classifiers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, TypeAlias, cast

import msgspec

from checkpoint.files import folder_of, is_gguf, read_json
from contract.pooling import PooledModel, Task
from runtime.errors import ConfigError

Kind: TypeAlias = Literal["cls", "last", "mean", "weighted", "max"]
# Keys of a Pooling module's config.json, and what they switch on.
_KINDS: dict[str, Kind] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_lasttoken": "last",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_weightedmean_tokens": "weighted",
    "pooling_mode_max_tokens": "max",
}
_OTHER_MODES = ("pooling_mode_mean_sqrt_len_tokens",)
# The newer form, one name.
_MODES: dict[str, Kind] = {
    "cls": "cls",
    "mean": "mean",
    "max": "max",
    "lasttoken": "last",
    "weightedmean": "weighted",
}
_CLASSIFIER = "ForSequenceClassification"
# Architectures that are read in one go and have no head that generates.
ENCODERS = ("Bert", "Roberta", "XLMRoberta", "Camembert", "ModernBert", "NomicBert", "New")
_ACTIVATIONS = {"Tanh": "tanh", "Identity": "none", "GELU": "gelu", "ReLU": "relu", "Sigmoid": "sigmoid"}


class DenseModule(msgspec.Struct, frozen=True, kw_only=True):
    """A linear layer behind the pooling, in a folder of its own."""

    folder: str
    inputs: int
    outputs: int
    bias: bool
    activation: str


class PoolingFiles(msgspec.Struct, frozen=True, kw_only=True):
    """How a model pools."""

    kind: Kind
    normalized: bool = False
    dense: tuple[DenseModule, ...] = ()
    # What a classifier's logits become: "sigmoid", "softmax" or "none".
    activation: str = "none"
    asked: PooledModel

    @property
    def classifies(self) -> bool:
        """Whether a head gives logits of labels."""
        return "classify" in self.asked.tasks


def read_pooling(checkpoint: Path) -> PoolingFiles | None:
    """How a checkpoint that `find` found pools; None where it generates. Raises ConfigError naming the
    file.
    """
    if is_gguf(checkpoint):
        return None
    folder = folder_of(checkpoint)
    config = read_json(folder / "config.json") or {}
    names = config.get("architectures")
    name = str(names[0]) if isinstance(names, list) and names else ""
    if name.endswith(_CLASSIFIER):
        return _classifier(folder, config, name)
    modules = folder / "modules.json"
    if modules.is_file():
        return _sentence_transformer(folder, config, modules)
    if name.endswith("Model") and not name.endswith("LMHeadModel"):
        is_encoder = name.removesuffix("Model") in ENCODERS
        # As sentence-transformers takes encoders without a word on it, and everybody takes decoders.
        asked = _asked(folder, config, ("embed",), config.get("hidden_size", config.get("n_embd")))
        return PoolingFiles(kind="mean" if is_encoder else "last", normalized=not is_encoder, asked=asked)
    return None


def _sentence_transformer(folder: Path, config: dict[str, Any], file: Path) -> PoolingFiles:
    listed = _read_list(file)
    kind: Kind | None = None
    size, normalized, dense = 0, False, []
    for index, module in enumerate(listed):
        module_type = str(module.get("type", "")).rpartition(".")[2]
        path = str(module.get("path", ""))
        if module_type == "Transformer" and index == 0:
            if path and (folder / path / "config.json").is_file():
                raise ConfigError(
                    f"{file}: the Transformer lies in {path!r}; only checkpoints with it at the top work"
                )
        elif module_type == "Pooling" and kind is None:
            kind, size = _pooling(folder / path / "config.json")
        elif module_type == "Normalize" and kind is not None:
            normalized = True
        elif module_type == "Dense" and kind is not None and not normalized:
            dense.append(_dense(folder, path))
            size = dense[-1].outputs
        else:
            raise ConfigError(
                f"{file}: module {index} of type {module.get('type')!r} is not supported there; "
                "Transformer, Pooling, Dense and Normalize are, in this order"
            )
    if kind is None:
        raise ConfigError(f"{file}: no Pooling module; embeddings of whole texts need one")
    asked = _asked(folder, config, ("embed",), size)
    return PoolingFiles(kind=kind, normalized=normalized, dense=tuple(dense), asked=asked)


def _read_list(file: Path) -> list[dict[str, Any]]:
    try:
        return msgspec.json.decode(file.read_bytes(), type=list[dict[str, Any]])
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file}: cannot be read as a list of modules: {error}") from error


def _pooling(file: Path) -> tuple[Kind, int]:
    found = read_json(file)
    if found is None:
        raise ConfigError(f"{file} is missing, though modules.json names it")
    if found.get("include_prompt") is False:
        raise ConfigError(f"{file}: include_prompt = false is not supported")
    mode = found.get("pooling_mode")
    kinds = [kind for key, kind in _KINDS.items() if found.get(key)]
    others = [key for key in _OTHER_MODES if found.get(key)]
    if isinstance(mode, str) and not kinds:
        kinds, others = ([_MODES[mode]], []) if mode in _MODES else ([], [mode])
    if others or len(kinds) != 1:
        told = ", ".join([*others, *kinds]) or "none"
        raise ConfigError(f"{file}: pooling modes {told}: exactly one of {', '.join(_KINDS)} is supported")
    return kinds[0], _count(found, "word_embedding_dimension", file, "embedding_dimension")


def _dense(folder: Path, path: str) -> DenseModule:
    file = folder / path / "config.json"
    found = read_json(file) or {}
    activation = str(found.get("activation_function", "torch.nn.modules.activation.Tanh")).rpartition(".")[2]
    if activation not in _ACTIVATIONS:
        raise ConfigError(
            f"{file}: activation_function {activation!r} is not supported, only {', '.join(_ACTIVATIONS)}"
        )
    return DenseModule(
        folder=path,
        inputs=_count(found, "in_features", file),
        outputs=_count(found, "out_features", file),
        bias=bool(found.get("bias", True)),
        activation=_ACTIVATIONS[activation],
    )


def _count(found: dict[str, Any], key: str, file: Path, other: str = "") -> int:
    value = found.get(key, found.get(other))
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{file}: {key} = {value!r} is not a number from 1 on")
    return value


def _classifier(folder: Path, config: dict[str, Any], name: str) -> PoolingFiles:
    labels = config.get("id2label")
    if isinstance(labels, dict) and labels:
        told = tuple(str(labels[key]) for key in sorted(labels, key=int))
    else:
        told = tuple(f"LABEL_{index}" for index in range(int(config.get("num_labels") or 2)))
    tasks: tuple[Task, ...] = ("score", "classify") if len(told) == 1 else ("classify",)
    kind: Kind = "cls" if name.removesuffix(_CLASSIFIER) in ENCODERS else "last"
    if name.startswith("ModernBert") and config.get("classifier_pooling", "cls") == "mean":
        kind = "mean"
    independent = len(told) == 1 or config.get("problem_type") == "multi_label_classification"
    asked = _asked(folder, config, tasks, None, labels=told)
    activation = _classifier_activation(config, "sigmoid" if independent else "softmax")
    return PoolingFiles(kind=kind, activation=activation, asked=asked)


def _classifier_activation(config: dict[str, Any], default: str) -> str:
    """What config.json says for a CrossEncoder of sentence-transformers, where it does."""
    inner = config.get("sentence_transformers")
    own = inner.get("activation_fn") if isinstance(inner, dict) else None
    named = own or config.get("sbert_ce_default_activation_function")
    if not isinstance(named, str):
        return default
    found = _ACTIVATIONS.get(named.rpartition(".")[2])
    if found not in ("none", "sigmoid"):
        raise ConfigError(
            f"config.json: activation {named!r} of the scores is not supported, only Sigmoid and Identity"
        )
    return found


def _asked(
    folder: Path, config: dict[str, Any], tasks: tuple[Task, ...], size: Any, labels: tuple[str, ...] = ()
) -> PooledModel:
    told = read_json(folder / "config_sentence_transformers.json") or {}
    window = read_json(folder / "sentence_bert_config.json") or {}
    own = read_json(folder / "tokenizer_config.json") or {}
    prompts = told.get("prompts") or {}
    if not isinstance(prompts, dict) or not all(isinstance(text, str) for text in prompts.values()):
        raise ConfigError(f"{folder / 'config_sentence_transformers.json'}: prompts is not a table of texts")
    default = told.get("default_prompt_name") or ""
    if default and default not in prompts:
        file = folder / "config_sentence_transformers.json"
        raise ConfigError(
            f"{file}: default_prompt_name = {default!r} is none of the prompts: {', '.join(prompts)}"
        )
    fewer = config.get("matryoshka_dimensions") or []
    longest = window.get("max_seq_length")
    if longest is None and labels:
        # What a cross-encoder of sentence-transformers cuts to.
        longest = own.get("model_max_length")
    is_sensible = isinstance(longest, int) and 0 < longest < 1 << 31
    return PooledModel(
        tasks=tasks,
        num_dimensions=size if isinstance(size, int) else 0,
        has_fewer_dimensions=bool(fewer or config.get("is_matryoshka")),
        dimensions=tuple(sorted(cast("list[int]", fewer))),
        max_tokens=cast("int", longest) if is_sensible else 0,
        truncates=_cuts(folder),
        prompts={name: text for name, text in prompts.items() if text},
        default_prompt=default if prompts.get(default) else "",
        labels=labels,
    )


class _Truncating(msgspec.Struct):
    """What of tokenizer.json says that long texts are cut."""

    truncation: dict[str, Any] | None = None


def _cuts(folder: Path) -> bool:
    file = folder / "tokenizer.json"
    if not file.is_file():
        return False
    try:
        return msgspec.json.decode(file.read_bytes(), type=_Truncating).truncation is not None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file}: not a tokenizer: {error}") from error
