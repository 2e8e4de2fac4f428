"""Quantizes one checkpoint layer by layer, under llm-compressor's interpreter: `compress.py JOB.json FD`.

It writes one JSON object a line to the descriptor FD: what is loaded, each layer, the end, or an error.
Layers that are done lie as files in the job's folder, so that the next run begins after them.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.offload import load_offloaded_model, set_onload_device, update_offload_parameter
from compressed_tensors.utils import match_named_modules
from llmcompressor import oneshot
from llmcompressor.core import LifecycleCallbacks, active_session
from llmcompressor.modifiers.gptq import GPTQModifier
from llmcompressor.modifiers.quantization import QuantizationModifier
from llmcompressor.modifiers.transform.awq import AWQModifier
from llmcompressor.modifiers.transform.smoothquant import SmoothQuantModifier
from llmcompressor.modifiers.utils.hooks import HooksMixin
from llmcompressor.pipelines.cache import IntermediatesCache
from llmcompressor.pipelines.registry import CalibrationPipeline
from llmcompressor.pipelines.sequential.helpers import trace_subgraphs
from llmcompressor.utils.dev import get_main_device
from llmcompressor.utils.helpers import DisableQuantization, calibration_forward_context
from llmcompressor.utils.pytorch.module import infer_sequential_targets
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

PIPELINE = "layers_one_by_one"
# Routers decide which experts see a token, so their precision counts more than their size.
KEPT_DENSE = ["lm_head", "re:.*mlp.gate$", "re:.*router.*", "re:.*shared_expert_gate$"]
VERSIONS = ("llmcompressor", "compressed-tensors", "transformers", "torch")

_EVENTS = os.fdopen(int(sys.argv[2]), "w", buffering=1)


def tell(event: str, **values: Any) -> None:
    """One line for whoever started this."""
    _EVENTS.write(json.dumps({"event": event, **values}) + "\n")


class DoneLayers:
    """Layers that are finished, as files by their numbers."""

    def __init__(self, folder: Path, total: int) -> None:
        self._folder, self._total = folder, total
        self._begin = time.monotonic()
        self._done, self._made = 0, 0

    def restore(self, index: int, layer: torch.nn.Module) -> bool:
        """Puts a layer's tensors where they were when it was finished; False if it was not."""
        path = self._path(index)
        if not path.is_file():
            return False
        tensors = load_file(path)
        for module_name, module in layer.named_modules():
            for name in (*module._parameters, *module._buffers):
                key = f"{module_name}.{name}"
                if key in tensors:
                    update_offload_parameter(module, name, tensors[key])
        self._done += 1
        tell("layer", done=self._done, total=self._total, kept=True, seconds_left=None)
        return True

    def keep(self, index: int, layer: torch.nn.Module) -> None:
        """Writes a layer's tensors; the file appears when it is whole."""
        tensors = {}
        for module_name, module in layer.named_modules():
            for name in (*module._parameters, *module._buffers):
                tensor = getattr(module, name)
                if tensor is not None:
                    tensors[f"{module_name}.{name}"] = tensor.detach().cpu().contiguous().clone()
        partial = self._path(index).with_suffix(".part")
        save_file(tensors, partial)
        partial.rename(self._path(index))
        self._done += 1
        self._made += 1
        each = (time.monotonic() - self._begin) / self._made
        left = each * (self._total - self._done)
        tell("layer", done=self._done, total=self._total, kept=False, seconds_left=round(left, 1))

    def _path(self, index: int) -> Path:
        return self._folder / f"layer-{index:05}.safetensors"


@CalibrationPipeline.register(PIPELINE)  # type: ignore[untyped-decorator]
class LayersOneByOne(CalibrationPipeline):  # type: ignore[misc]
    """The events of llm-compressor's sequential pipeline in their order; told, and kept, by layers."""

    folder = Path()

    @staticmethod
    def __call__(model: Any, dataloader: Any, dataset_args: Any) -> None:
        targets = infer_sequential_targets(model, dataset_args.sequential_targets)
        layers = [layer for _, layer in match_named_modules(model, targets)]
        set_onload_device(model, get_main_device())
        done = DoneLayers(LayersOneByOne.folder, len(layers))
        tell("loaded", layers=len(layers))
        if dataloader is None:
            _round_layers(model, layers, done)
        else:
            _calibrate_layers(model, layers, targets, dataloader, dataset_args, done)


def _round_layers(model: Any, layers: list[torch.nn.Module], done: DoneLayers) -> None:
    LifecycleCallbacks.calibration_start()
    inside = {module for layer in layers for module in layer.modules()}
    for index, layer in enumerate(layers):
        if not done.restore(index, layer):
            LifecycleCallbacks.sequential_epoch_end(list(layer.modules()))
            done.keep(index, layer)
    LifecycleCallbacks.sequential_epoch_end([each for each in model.modules() if each not in inside])
    LifecycleCallbacks.calibration_end()


def _calibrate_layers(
    model: Any,
    layers: list[torch.nn.Module],
    targets: Any,
    dataloader: Any,
    settings: Any,
    done: DoneLayers,
) -> None:
    sample = next(iter(dataloader))
    parts = trace_subgraphs(model, sample, targets, settings.tracing_ignore)
    state = active_session().state
    state.loss_masks, state.sequential_prefetch = None, False
    LifecycleCallbacks.calibration_start()
    with calibration_forward_context(model), DisableQuantization(model):
        offload = torch.device(settings.sequential_offload_device)
        values = IntermediatesCache.from_dataloader(dataloader, get_main_device(), offload)
        batches = range(len(dataloader))
        for part in parts:
            modules = part.submodules(model)
            own = [(index, layer) for index, layer in enumerate(layers) if layer in modules]
            is_kept = bool(own) and all(done.restore(index, layer) for index, layer in own)
            if not is_kept:
                for batch in batches:
                    state.current_batch_idx = batch
                    part.forward(model, **values.fetch(batch, part.input_names))
                LifecycleCallbacks.sequential_epoch_end(modules)
                for index, layer in own:
                    done.keep(index, layer)
            if part is parts[-1]:
                break
            # What the next layer reads is what this one says now that it is rounded.
            with HooksMixin.disable_hooks():
                for batch in batches:
                    outputs = part.forward(model, **values.fetch(batch, part.input_names))
                    values.update(batch, outputs)
                    values.delete(batch, part.consumed_names)
    LifecycleCallbacks.calibration_end()


def _recipe(job: dict[str, Any]) -> list[Any]:
    group = job["group"]
    chosen: dict[str, Any] = {"ignore": KEPT_DENSE}
    if isinstance(group, str):
        chosen |= {"scheme": group, "targets": ["Linear"]}
    else:
        chosen["config_groups"] = {"group_0": group}
    match job["method"]:
        case "gptq":
            return [GPTQModifier(**chosen)]
        case "awq":
            return [AWQModifier(), QuantizationModifier(**chosen)]
        case "smoothquant":
            return [SmoothQuantModifier(smoothing_strength=0.5), QuantizationModifier(**chosen)]
    return [QuantizationModifier(**chosen)]


def _batches(job: dict[str, Any]) -> Any:
    """A batch for each text, cut to the job's number of tokens; None where no text is read."""
    if not job["calibration"]:
        return None
    tokenizer = AutoTokenizer.from_pretrained(job["model"])
    found = []
    for line in Path(job["calibration"]).read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        text = row.get("text")
        if text is None:
            text = _rendered(tokenizer, row, job)
        ids = tokenizer(text, add_special_tokens="messages" not in row)["input_ids"][: job["max_tokens"]]
        if len(ids) > 1:
            found.append({"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, len(ids)).long()})
    if not found:
        raise ValueError("no text has two tokens; give longer ones")
    tell("texts", texts=len(found), tokens=sum(each["input_ids"].numel() for each in found))
    return torch.utils.data.DataLoader(found, batch_size=None)  # type: ignore[arg-type]


def _rendered(tokenizer: Any, row: dict[str, Any], job: dict[str, Any]) -> str:
    where = f"{job['calibration_name']}:{row['line']}"
    if not tokenizer.chat_template:
        raise ValueError(f"{where}: the model has no chat template, so messages have no form; give text")
    try:
        text: str = tokenizer.apply_chat_template(row["messages"], tokenize=False)
    except Exception as error:
        raise ValueError(f"{where}: the model's chat template refuses the messages: {error}") from error
    return text


def _load(job: dict[str, Any]) -> Any:
    if not job["memory_bytes"]:
        return AutoModelForCausalLM.from_pretrained(job["model"], dtype="auto")
    folder = Path(job["offload"])
    shutil.rmtree(folder, ignore_errors=True)
    with load_offloaded_model():
        model = AutoModelForCausalLM.from_pretrained(
            job["model"],
            dtype="auto",
            device_map="auto_offload",
            max_memory={"cpu": job["memory_bytes"]},
            offload_folder=str(folder),
        )
    tell("offloaded", num_bytes=sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()))
    return model


def _nf4(job: dict[str, Any]) -> None:
    settings = BitsAndBytesConfig(  # type: ignore[no-untyped-call]
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        # What products compute in: the model's own type.
        bnb_4bit_compute_dtype=AutoConfig.from_pretrained(job["model"]).dtype or torch.bfloat16,
        bnb_4bit_quant_storage=torch.uint8,
    )
    device = {"": get_main_device()}
    model = AutoModelForCausalLM.from_pretrained(
        job["model"], dtype="auto", quantization_config=settings, device_map=device
    )
    tell("loaded", layers=1)
    model.save_pretrained(job["out"])
    tell("layer", done=1, total=1, kept=False, seconds_left=0.0)


def _compress(job: dict[str, Any]) -> None:
    LayersOneByOne.folder = Path(job["layers"])
    if not torch.accelerator.is_available():
        # AWQ pins inputs for copies to a device, which fails where there is none.
        IntermediatesCache.pin_memory = lambda *_: None
    model = _load(job)
    batches = _batches(job)
    oneshot(model=model, dataset=batches, recipe=_recipe(job), pipeline=PIPELINE)
    tell("saving")
    model.save_pretrained(job["out"], save_compressed=True)


def main() -> int:
    """Runs the job; the exit code."""
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    begin = time.monotonic()
    if job["threads"]:
        torch.set_num_threads(job["threads"])
    torch.manual_seed(0)
    try:
        (_nf4 if job["scheme"] == "nf4" else _compress)(job)
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        tell("error", message=f"{type(error).__name__}: {error}")
        raise
    names = (*VERSIONS, "bitsandbytes") if job["scheme"] == "nf4" else VERSIONS
    tell(
        "done",
        peak_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        seconds=round(time.monotonic() - begin, 1),
        versions={name: metadata.version(name) for name in names},
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
