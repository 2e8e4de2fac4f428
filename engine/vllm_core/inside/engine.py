"""vLLM's V1 engine behind the bridge: the only file that calls it. Tried with the versions in TRIED."""

from __future__ import annotations

import asyncio
import ctypes
import itertools
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .bridge import EngineDied, SubmissionRefused
from .calls import CoreCall
from .pooling import CannotPool, numbers_of, params_of
from .pooling import arguments as pooling_arguments
from .prefixes import CorePrefixes

# Releases whose interfaces this file was written for and tested with.
TRIED = ("0.32.",)
_MAX_LOGPROBS = 20
# Libraries that vLLM's kernels for CPUs load, and the packages of Debian and Ubuntu that have them.
_CPU_LIBRARIES = {"libnuma.so.1": "libnuma1"}


class CannotStart(Exception):
    """The operator can mend it."""


def check_version(config: dict[str, Any]) -> str:
    """vLLM's version; raises CannotStart where it was not tried and the operator does not insist."""
    import vllm
    from vllm.platforms import current_platform

    version = str(vllm.__version__)
    if not version.startswith(TRIED) and not config["vllm"]["any_version"]:
        tried = ", ".join(f"{each}x" for each in TRIED)
        raise CannotStart(
            f"engine.vllm.python: it has vLLM {version}; versions that work: {tried}; install one with "
            "`millrace engine install vllm`, or set engine.vllm.any_version = true"
        )
    if current_platform.is_cpu():
        check_libraries()
    return version


def check_libraries(packages: Mapping[str, str] = _CPU_LIBRARIES) -> None:
    """Raises CannotStart where one is missing: vLLM warns of it, and fails later in other words."""
    for library, package in packages.items():
        try:
            ctypes.CDLL(library)
        except OSError as error:
            raise CannotStart(
                f"vLLM's kernels for CPUs cannot be loaded: {error}; on Debian and Ubuntu `apt-get install "
                f"{package}` brings it"
            ) from error


def arguments(config: dict[str, Any], model: dict[str, Any], kv_endpoint: str) -> dict[str, Any]:
    """Keyword arguments of vLLM's AsyncEngineArgs."""
    vllm, scheduler, cache = config["vllm"], config["scheduler"], config["cache"]
    chosen: dict[str, Any] = {
        "model": model["path"],
        "dtype": config["dtype"],
        "max_num_seqs": scheduler["max_num_seqs"],
        "max_num_batched_tokens": scheduler["max_num_batched_tokens"],
        "scheduling_policy": "priority",
        "enable_prefix_caching": cache["prefix_caching"],
        "gpu_memory_utilization": cache["memory_fraction"],
        "structured_outputs_config": {"backend": "guidance"},
        # The gateway has applied the checkpoint's own settings.
        "generation_config": "vllm",
        "max_logprobs": _MAX_LOGPROBS,
        "disable_log_stats": False,
        "enforce_eager": vllm["eager"],
    }
    for name in ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"):
        chosen[name] = vllm[name]
    if vllm["expert_parallel"]:
        chosen["enable_expert_parallel"] = True
    if vllm["launcher"]:
        chosen["distributed_executor_backend"] = vllm["launcher"]
    if config["max_model_len"]:
        chosen["max_model_len"] = config["max_model_len"]
    if cache["kv_cache_bytes"]:
        chosen["kv_cache_memory_bytes"] = cache["kv_cache_bytes"]
    if vllm["block_size"]:
        chosen["block_size"] = vllm["block_size"]
    chosen |= _adapter_arguments(config.get("adapters") or {})
    if cache["prefix_caching"]:
        chosen["kv_events_config"] = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": kv_endpoint,
        }
    if model["pooling"] is not None:
        try:
            chosen |= pooling_arguments(model["pooling"], caches=cache["prefix_caching"])
        except CannotPool as error:
            raise CannotStart(f"model.path: {error}") from error
    return {**chosen, **vllm["options"]}


def _adapter_arguments(adapters: dict[str, Any]) -> dict[str, Any]:
    slots = adapters.get("slots") or min(len(adapters.get("paths", {})), 8)
    if not slots:
        return {}
    return {"enable_lora": True, "max_loras": slots, "max_lora_rank": adapters["max_rank"]}


class VllmEngine:
    """An engine core that runs. See bridge.Engine for what each method means."""

    def __init__(self, core: Any, inputs: Any, settings: Any, model: dict[str, Any]) -> None:
        self._core = core
        self._inputs = inputs
        self._settings = settings
        self._model = model
        # vLLM's own requests for them, with what their files are known by, by version. It knows them by
        # number; none is given twice.
        self._adapters: dict[str, tuple[Any, Any]] = {}
        self._numbers = itertools.count(1)
        self._tasks: Any = ()
        self._prefixes = CorePrefixes(model["path"])
        self._events: list[dict[str, Any]] = []
        self._subscribers: list[asyncio.Task[None]] = []
        self._pooling = model["pooling"]
        self.facts = _facts(settings, model["token_ids"]) | _pooled_facts(settings, self._pooling)
        # Rows of the head that no token has, inside the vocabulary or behind it, are never drawn.
        padding = range(self.facts["vocab_size"], settings.model_config.get_vocab_size())
        self._padding = dict.fromkeys((*model["token_ids"]["holes"], *padding), -math.inf)
        self.memory = _memory(settings, Path(model["path"]))
        if self._pooling is not None:
            self.memory |= _room_without_blocks(settings, self.memory)

    @classmethod
    async def start(cls, settings: Any, model: dict[str, Any], adapters: dict[str, str]) -> VllmEngine:
        """Starts the engine core and its workers; returns when they can compute. Raises CannotStart where an
        adapter cannot be served.
        """
        from vllm.renderers import renderer_from_config
        from vllm.v1.engine.core_client import EngineCoreClient
        from vllm.v1.engine.input_processor import InputProcessor
        from vllm.v1.executor import Executor

        renderer = renderer_from_config(settings)
        core = EngineCoreClient.make_async_mp_client(
            vllm_config=settings,
            executor_class=Executor.get_class(settings),
            log_stats=True,
            renderer=renderer,
        )
        engine = cls(core, InputProcessor(settings, renderer), settings, model)
        engine._tasks = await core.get_supported_tasks_async()
        for name, folder in adapters.items():
            problem = await engine.add_adapter(name, folder)
            if problem:
                engine.close()
                raise CannotStart(f"engine.adapters.paths: {problem}")
        for source in core.get_kv_event_sources().values():
            engine._subscribers.append(asyncio.ensure_future(engine._listen(source.endpoint)))
        return engine

    async def add(self, call: CoreCall) -> None:
        """See bridge.Engine."""
        from vllm.exceptions import VLLMClientError

        prompt: dict[str, Any] = {"type": "token", "prompt_token_ids": call.prompt_token_ids}
        if call.cache_salt:
            prompt["cache_salt"] = call.cache_salt
        try:
            request = self._inputs.process_inputs(
                call.key,
                prompt,
                self._params(call),
                self._tasks,
                arrival_time=call.start_tag,
                lora_request=self._adapter(call.adapter),
                priority=call.priority,
            )
        except (TypeError, ValueError, VLLMClientError) as error:
            raise SubmissionRefused(str(error)) from error
        await self._core.add_request_async(request)

    def _params(self, call: CoreCall) -> Any:
        """vLLM's SamplingParams or PoolingParams."""
        from vllm.sampling_params import SamplingParams, StructuredOutputsParams

        if call.pooling is not None:
            from vllm.pooling_params import PoolingParams

            return PoolingParams(**params_of(call.pooling))
        sampling = dict(call.sampling)
        if self._padding:
            # Last: nobody's bias brings one back.
            sampling["logit_bias"] = {**sampling.get("logit_bias", {}), **self._padding}
        grammar = StructuredOutputsParams(grammar=call.grammar) if call.grammar else None
        return SamplingParams(**sampling, structured_outputs=grammar, skip_clone=True)

    async def add_adapter(self, name: str, folder: str) -> str:
        """See bridge.Engine. vLLM would read its files in the step that first asks for it, and die of what it
        finds there.
        """
        from vllm.lora.request import LoRARequest
        from vllm.v1.engine.exceptions import EngineDeadError

        if self._settings.lora_config is None:
            return "vLLM was started without slots for adapters; set engine.adapters.slots"
        stamp, (known, former) = _stamp(folder), self._adapters.get(name, (None, None))
        if known is not None and _stamp(known.lora_path) == former:
            return ""
        asked = LoRARequest(name, next(self._numbers), folder)
        try:
            await self._core.add_lora_async(asked)
        except EngineDeadError as error:
            raise EngineDied(str(error) or "the engine core ended") from error
        # A failed call comes back as this, with nothing but its words.
        except Exception as error:
            return f"vLLM does not take the adapter in {folder}: {error}"
        self._adapters[name] = asked, stamp
        return ""

    def drop_adapter(self, name: str) -> None:
        """See bridge.Engine. vLLM puts others in its place when it needs the room."""
        self._adapters.pop(name, None)

    def _adapter(self, name: str) -> Any:
        if not name:
            return None
        if name not in self._adapters:
            raise SubmissionRefused("its adapter was removed")
        asked, stamp = self._adapters[name]
        # vLLM reads the files again whenever it has put others in their place.
        if _stamp(asked.lora_path) != stamp:
            raise SubmissionRefused(
                f"{asked.lora_path} has changed since the adapter was added; add it again, from files that "
                "stay"
            )
        return asked

    async def abort(self, keys: list[str]) -> None:
        """See bridge.Engine."""
        if keys:
            await self._core.abort_requests_async(keys)

    async def outputs(self) -> Any:
        """See bridge.Engine."""
        from vllm.v1.engine.exceptions import EngineDeadError

        try:
            return await self._core.get_output_async()
        except EngineDeadError as error:
            raise EngineDied(str(error) or "the engine core ended") from error

    async def books(self) -> dict[str, Any]:
        """See bridge.Engine. Data-parallel ranks are added up."""
        from vllm.v1.engine.exceptions import EngineDeadError

        try:
            ranks = await self._core.call_utility_all_async("millrace_books")
        except EngineDeadError as error:
            raise EngineDied(str(error) or "the engine core ended") from error
        return {
            "free": sum(each["free"] for each in ranks),
            "total": sum(each["total"] for each in ranks),
            "keys": [key for each in ranks for key in each["keys"]],
            "ranks": ranks,
        }

    def kv_events(self) -> list[dict[str, Any]]:
        """See bridge.Engine."""
        events, self._events = self._events, []
        return events

    async def _listen(self, endpoint: str) -> None:
        import msgspec
        import zmq
        import zmq.asyncio
        from vllm.distributed.kv_events import KVEventBatch

        decoder = msgspec.msgpack.Decoder(KVEventBatch)
        socket = zmq.asyncio.Context.instance().socket(zmq.SUB)
        socket.connect(endpoint.replace("*", "127.0.0.1"))
        socket.setsockopt(zmq.SUBSCRIBE, b"")
        while True:
            *_, payload = await socket.recv_multipart()
            self._events += self._prefixes.take(decoder.decode(payload).events)

    def logprobs(self, output: Any) -> list[list[Any]]:
        """See bridge.Engine."""
        lists = output.new_logprobs
        rows = zip(lists.logprob_token_ids.tolist(), lists.logprobs.tolist(), strict=True)
        return [self._reported(ids, values) for ids, values in rows]

    def prompt_logprobs(self, output: Any, num_prompt: int) -> list[list[Any]]:
        """See bridge.Engine."""
        tensors = output.new_prompt_logprobs_tensors
        if tensors is None:
            return []
        rows = zip(tensors.logprob_token_ids.tolist(), tensors.logprobs.tolist(), strict=True)
        return [self._reported(ids, values) for ids, values in rows][: num_prompt - 1]

    def pooled(self, output: Any, call: CoreCall) -> bytes | None:
        """See bridge.Engine."""
        assert call.pooling is not None, "it pools"
        return numbers_of(output.pooling_output, self._pooling, call.pooling["dimensions"])

    def _reported(self, ids: list[int], values: list[float]) -> list[Any]:
        """Column 0 is the token itself; padding is no alternative."""
        others = [pair for pair in zip(ids[1:], values[1:], strict=True) if pair[0] not in self._padding]
        return [ids[0], values[0], [token for token, _ in others], [value for _, value in others]]

    def close(self) -> None:
        """Ends the core and its workers."""
        for each in self._subscribers:
            each.cancel()
        self._core.shutdown(timeout=1.0)


def _stamp(folder: str) -> list[tuple[int, int, int]]:
    """What changes with an adapter's files; empty where one is missing."""
    try:
        found = [Path(folder, f"adapter_{name}").stat() for name in ("config.json", "model.safetensors")]
    except OSError:
        return []
    return [(each.st_ino, each.st_size, each.st_mtime_ns) for each in found]


def settings_of(chosen: dict[str, Any]) -> Any:
    """vLLM's checked configuration; raises CannotStart with its words."""
    from vllm.config import KVEventsConfig
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.exceptions import VLLMError

    events, pooler = chosen.pop("kv_events_config", None), chosen.pop("pooler_config", None)
    if isinstance(pooler, dict):
        from vllm.config import PoolerConfig

        chosen["pooler_config"] = PoolerConfig(**pooler)
    try:
        made = AsyncEngineArgs(**chosen, kv_events_config=KVEventsConfig(**events) if events else None)
        return made.create_engine_config()
    except (TypeError, ValueError, OSError, VLLMError) as error:
        raise CannotStart(f"engine.vllm: {error}") from error


def _facts(settings: Any, token_ids: dict[str, Any]) -> dict[str, Any]:
    """`token_ids` are those that the suite's other services know; see checkpoint.vocabulary.TokenIds."""
    model = settings.model_config
    rows = model.get_vocab_size()
    if token_ids["num_of_text"] > rows:
        raise CannotStart(
            f"model.path: the tokenizer has {token_ids['num_of_text']} ids, but the model has only {rows} "
            "rows for them (vocab_size); take the tokenizer that the model was trained with"
        )
    return {
        "max_model_len": model.max_model_len,
        "vocab_size": min(token_ids["count"], rows) or rows,
        "eos_token_ids": token_ids["end"],
        "dtype": str(model.dtype).removeprefix("torch."),
        "attention_backend": "vllm",
        "device": str(settings.device_config.device_type),
        "num_layers": model.get_total_num_hidden_layers(),
        "remembers_because": "vLLM forgets nothing of one answer alone",
    }


def _pooled_facts(settings: Any, pooling: dict[str, Any] | None) -> dict[str, Any]:
    if pooling is None:
        return {}
    return {
        "tasks": pooling["asked"]["tasks"],
        "num_pooled": pooling["asked"]["num_dimensions"],
        "whole_prompts": not settings.scheduler_config.enable_chunked_prefill,
        "shares_prefixes": False,
    }


def _room_without_blocks(settings: Any, memory: dict[str, Any]) -> dict[str, Any]:
    """Of an encoder nothing is kept in blocks: there are as many as full batch slots would take, so that no
    text is refused for want of them.
    """
    if memory["num_blocks"] > 0:
        return {}
    slots = settings.scheduler_config.max_num_seqs * settings.parallel_config.data_parallel_size
    num_blocks = slots * -(-memory["max_model_len"] // memory["block_size"])
    return {
        "num_blocks": num_blocks,
        "kv_cache_bytes": 0,
        "kv_bytes_per_token": 0,
        "total_bytes": memory["weights_bytes"],
    }


def _memory(settings: Any, checkpoint: Path) -> dict[str, Any]:
    cache, model, parallel = settings.cache_config, settings.model_config, settings.parallel_config
    ranks = parallel.data_parallel_size
    num_blocks = cache.num_gpu_blocks - ranks
    heads = model.get_total_num_kv_heads()
    size = 1 if "fp8" in str(cache.cache_dtype) else _bytes_of(model.dtype)
    # Latent attention keeps one vector for all heads, keys and values; vLLM calls its size the head size.
    num_vectors = 1 if getattr(model, "use_mla", False) else 2 * heads
    per_token = num_vectors * model.get_total_num_hidden_layers() * model.get_head_size() * size
    weights = sum(each.stat().st_size for each in checkpoint.glob("*.safetensors")) * ranks
    kv_bytes = num_blocks * cache.block_size * per_token
    return {
        "total_bytes": weights + kv_bytes,
        "weights_bytes": weights,
        "workspace_bytes": 0,
        "headroom_bytes": 0,
        "kv_cache_bytes": kv_bytes,
        "kv_bytes_per_token": per_token,
        "block_size": cache.block_size,
        "num_blocks": num_blocks,
        "max_model_len": model.max_model_len,
    }


def _bytes_of(dtype: Any) -> int:
    return int(getattr(dtype, "itemsize", 2))
