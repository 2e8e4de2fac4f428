"""A package named vllm with the interfaces that `inside.engine` and `inside.plugin` call.

Its model is arithmetic: token i of an answer is (sum of the prompt + i) modulo 50, plus 100. It is written
into a folder, so that another interpreter process imports it as it would import vLLM. An adapter adds the
alpha of its configuration.
"""

from __future__ import annotations

from pathlib import Path

_INIT = '__version__ = "{version}"\n'

_PARAMS = """
import dataclasses
from typing import Any
from vllm.exceptions import VLLMValidationError

@dataclasses.dataclass
class StructuredOutputsParams:
    grammar: Any = None

class SamplingParams:
    def __init__(self, **chosen):
        self.__dict__.update({"structured_outputs": None, "seed": None, "prompt_logprobs": None, **chosen})
        if chosen.get("logit_bias", {}).get(7) == 77.0:
            raise VLLMValidationError("logit_bias: not this one")
"""

# None of them is a ValueError.
_EXCEPTIONS = """
class VLLMError(Exception):
    pass

class VLLMClientError(VLLMError):
    pass

class VLLMValidationError(VLLMClientError):
    pass
"""

_LORA = """
from types import SimpleNamespace

class LoRARequest(SimpleNamespace):
    def __init__(self, name, number, path):
        super().__init__(lora_name=name, lora_int_id=number, lora_path=path)
"""

_SETTINGS = """
from types import SimpleNamespace
import os

class KVEventsConfig(SimpleNamespace):
    pass

class PoolerConfig(SimpleNamespace):
    pass

class AsyncEngineArgs:
    def __init__(self, **chosen):
        self.chosen = chosen

    def create_engine_config(self, *_):
        if self.chosen.get("tensor_parallel_size", 1) > 8:
            raise ValueError("tensor_parallel_size: more than there are")
        model = SimpleNamespace(
            model=self.chosen["model"], max_model_len=self.chosen.get("max_model_len", 256), dtype="bfloat16",
            hf_text_config=SimpleNamespace(eos_token_id=2),
            get_vocab_size=lambda: 2048, get_total_num_hidden_layers=lambda: 2,
            get_total_num_kv_heads=lambda: 2, get_head_size=lambda: 32,
        )
        return SimpleNamespace(
            model_config=model, lora_config="lora" if self.chosen.get("enable_lora") else None,
            cache_config=SimpleNamespace(
                # An encoder keeps nothing; one block is vLLM's own.
                num_gpu_blocks=1 if self.chosen.get("runner") == "pooling" else 65,
                block_size=16, cache_dtype="auto",
            ),
            parallel_config=SimpleNamespace(data_parallel_size=1),
            device_config=SimpleNamespace(device_type="cpu"), chosen=self.chosen,
            scheduler_config=SimpleNamespace(enable_chunked_prefill=False, max_num_seqs=4),
        )
"""

_CORE = """
import asyncio, json, os, time
import torch
from types import SimpleNamespace
from vllm.v1.engine.exceptions import EngineDeadError

def _named(name):
    return SimpleNamespace(name=name)

class EngineCoreClient:
    @staticmethod
    def make_async_mp_client(**settings):
        return _Core()

class _Core:
    def __init__(self):
        self.requests, self.queue, self.hangs = {}, asyncio.Queue(), False
        self.adapters = {}
        self.task = asyncio.ensure_future(self.steps())

    async def get_supported_tasks_async(self):
        return ("generate",)

    def get_kv_event_sources(self):
        return {}

    async def add_request_async(self, request):
        request.count, request.began = 0, None
        self.requests[request.request_id] = request

    async def abort_requests_async(self, keys):
        for key in keys:
            self.requests.pop(key, None)

    async def add_lora_async(self, asked):
        # What it has read goes by number, and is not read again.
        if not os.path.isfile(os.path.join(asked.lora_path, "adapter_config.json")):
            raise Exception("Call to add_lora method failed: no adapter_config.json")
        assert asked.lora_int_id not in self.adapters
        config = json.load(open(asked.lora_path + "/adapter_config.json"))
        self.adapters[asked.lora_int_id] = config["lora_alpha"]

    async def call_utility_all_async(self, name):
        assert name == "millrace_books"
        while self.hangs:
            await asyncio.sleep(3600)
        used = len(self.requests)
        running = min(2, used)
        return [{"free": 64 - used, "total": 64, "keys": list(self.requests), "running": running}]

    async def get_output_async(self):
        found = await self.queue.get()
        if isinstance(found, Exception):
            raise found
        return found

    def shutdown(self, timeout=None):
        pass

    async def steps(self):
        while True:
            await asyncio.sleep(0.002)
            if any(200 in each.prompt for each in self.requests.values()):
                os._exit(9)
            if any(201 in each.prompt for each in self.requests.values()):
                self.hangs = True
                await asyncio.sleep(3600)
            if any(202 in each.prompt for each in self.requests.values()):
                self.queue.put_nowait(EngineDeadError("a worker died"))
            order = sorted(self.requests.values(), key=lambda each: (each.priority, each.arrival))
            outputs = [self.output(each) for each in order[:2]]
            if outputs:
                stats = SimpleNamespace(num_running_reqs=len(outputs), kv_cache_usage=len(outputs) / 64)
                self.queue.put_nowait(
                    SimpleNamespace(
                        engine_index=0, outputs=outputs, timestamp=time.monotonic(), scheduler_stats=stats
                    )
                )

    def output(self, request):
        params, now = request.params, time.monotonic()
        if hasattr(params, "task"):
            return self.pooled(request)
        first = request.count == 0
        changed = self.adapters[request.lora.lora_int_id] if request.lora else 0
        token = 100 + changed + (sum(request.prompt) + request.count) % 50
        request.count += 1
        reason = None
        if 203 in request.prompt and request.count == 3:
            reason = _named("ERROR")
        elif token in params.stop_token_ids and request.count > params.min_tokens:
            reason = _named("STOP")
        elif request.count >= params.max_tokens:
            reason = _named("LENGTH")
        if reason is not None:
            self.requests.pop(request.request_id, None)
        num = len(request.prompt)
        return SimpleNamespace(
            request_id=request.request_id, new_token_ids=[token], new_logprobs=None,
            new_prompt_logprobs_tensors=None, finish_reason=reason,
            stop_reason=token if reason is not None and reason.name == "STOP" else None,
            events=[SimpleNamespace(type=_named("SCHEDULED"), timestamp=now)] if first else None,
            prefill_stats=SimpleNamespace(
                num_prompt_tokens=num, num_computed_tokens=num, num_cached_tokens=0
            ) if first else None,
        )
"""

_POOLED = """

    def pooled(self, request):
        # As vLLM's does it: raw numbers, at the end of a text's one step.
        self.requests.pop(request.request_id)
        start = (request.params.extra_kwargs or {}).get("compressed_token_type_ids", 0)
        row = torch.tensor([float(sum(request.prompt)), float(start), 3.0])
        if 204 in request.prompt:
            row[0] = float("nan")
        num = len(request.prompt)
        return SimpleNamespace(
            request_id=request.request_id, new_token_ids=[], new_logprobs=None, pooling_output=row,
            new_prompt_logprobs_tensors=None, finish_reason=_named("STOP"), stop_reason=None,
            events=[SimpleNamespace(type=_named("SCHEDULED"), timestamp=time.monotonic())],
            prefill_stats=SimpleNamespace(
                num_prompt_tokens=num, num_computed_tokens=num, num_cached_tokens=0
            ),
        )
"""

_INPUTS = """
from types import SimpleNamespace

class InputProcessor:
    def __init__(self, settings, renderer):
        pass

    def process_inputs(self, key, prompt, params, tasks, *, arrival_time, lora_request, priority):
        return SimpleNamespace(
            request_id=key, prompt=prompt["prompt_token_ids"], params=params, priority=priority,
            arrival=arrival_time, lora=lora_request,
        )
"""

_POOLING_PARAMS = """
class PoolingParams:
    def __init__(self, task, use_activation, extra_kwargs=None):
        assert not use_activation
        self.task, self.extra_kwargs = task, extra_kwargs
"""

_OPS = """
def bgmv_expand(inputs, weights, output, indices, add_inputs=True):
    pass

def bgmv_expand_slice(inputs, weights, output, indices, offset, size, add_inputs=True):
    pass
"""

_FILES = {
    "sampling_params.py": _PARAMS,
    "config.py": _SETTINGS,
    "exceptions.py": _EXCEPTIONS,
    "platforms.py": (
        "class _Platform:\n    def is_cpu(self):\n        return False\n\ncurrent_platform = _Platform()\n"
    ),
    "lora/request.py": _LORA,
    "engine/arg_utils.py": "from vllm.config import AsyncEngineArgs\n",
    "renderers.py": "def renderer_from_config(settings):\n    return None\n",
    "v1/executor.py": "class Executor:\n    get_class = staticmethod(lambda settings: None)\n",
    "v1/engine/exceptions.py": "class EngineDeadError(Exception):\n    pass\n",
    "v1/engine/core_client.py": _CORE + _POOLED,
    "pooling_params.py": _POOLING_PARAMS,
    "v1/engine/input_processor.py": _INPUTS,
    "v1/engine/core.py": "class EngineCore:\n    pass\n",
    "lora/ops/torch_ops/lora_ops.py": _OPS,
    "lora/punica_wrapper/punica_cpu.py": "from vllm.lora.ops.torch_ops.lora_ops import *\n",
    "v1/structured_output/backend_guidance.py": (
        "class GuidanceBackend:\n    def compile_grammar(self, *_, **__):\n        pass\n\n"
        "def serialize_guidance_grammar(*_, **__):\n    return ''\n\n"
        "def validate_guidance_grammar(*_, **__):\n    pass\n"
    ),
}


def write(folder: Path, version: str = "0.32.0") -> Path:
    """Writes the package; returns the folder to put on the path."""
    root = folder / "vllm"
    for name, text in _FILES.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        for parent in file.relative_to(root).parents:
            (root / parent / "__init__.py").touch()
    (root / "__init__.py").write_text(_INIT.format(version=version))
    return folder
