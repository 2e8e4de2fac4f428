"""What vLLM loads into each of its processes (a general plugin): five things that its interface lacks.

1. Its structured output takes the suite's serialized llguidance grammars as they are, and budgets of thoughts
   around them or alone; what another engine has begun goes on where it stopped.
2. The engine core reports its own books.
3. Processes end with their parent, however that ends.
4. On CPUs an adapter changes the answers of those alone who asked for it (vllm-project/vllm#48421).
5. On CPUs a prompt that is computed in parts does not end the engine where its answer is drawn by a seed.
"""

from __future__ import annotations

import ctypes
import functools
import json
import signal
from collections.abc import Callable, Iterable
from typing import Any

from .calls import GRAMMAR_KEY
from .thinking import ThinkingGrammar, thought_of

_PR_SET_PDEATHSIG = 1


def register() -> None:
    """Called by vLLM once in every process."""
    die_with_parent()
    _accept_grammars()
    _report_books()
    _keep_adapters_apart()
    _draw_for_whole_prompts()


def die_with_parent() -> None:
    """Linux ends this process when the one that started it has ended."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def unwrapped(spec: Any) -> dict[str, Any] | None:
    """The suite's own specification: a grammar or "", a thought or none, and the tokens that they have seen;
    None for any other.
    """
    if not isinstance(spec, str) or not spec.startswith(f'{{"{GRAMMAR_KEY}"'):
        return None
    found: dict[str, Any] = json.loads(spec)
    return found


def _accept_grammars() -> None:
    from vllm.v1.structured_output import backend_guidance as guidance

    serialize, compile_grammar = guidance.serialize_guidance_grammar, guidance.GuidanceBackend.compile_grammar
    if getattr(compile_grammar, "takes_grammars", False):
        return

    def serialized(request_type: Any, grammar_spec: Any, *rest: Any, **named: Any) -> str:
        found = unwrapped(grammar_spec)
        return (
            str(found[GRAMMAR_KEY]) if found else str(serialize(request_type, grammar_spec, *rest, **named))
        )

    def compiled(self: Any, request_type: Any, grammar_spec: Any, *rest: Any, **named: Any) -> Any:
        found = unwrapped(grammar_spec)
        grammar: Any = None
        if not found or found[GRAMMAR_KEY]:
            grammar = compile_grammar(self, request_type, grammar_spec, *rest, **named)
        if found and found["thinking"]:
            thought = thought_of(found["thinking"], has_grammar=grammar is not None)
            grammar = ThinkingGrammar(thought, grammar)
        if found and found["replay"] and not grammar.accept_tokens("replay", found["replay"]):
            raise ValueError("the tokens of another engine do not follow the grammar")
        return grammar

    def validate(params: Any, tokenizer: Any = None) -> None:
        # Those of the suite were compiled before they came here.
        outputs = params.structured_outputs
        if outputs is None or unwrapped(outputs.grammar) is None:
            checked(params, tokenizer)

    checked = guidance.validate_guidance_grammar
    compiled.takes_grammars = True  # type: ignore[attr-defined]
    guidance.serialize_guidance_grammar = serialized
    guidance.validate_guidance_grammar = validate
    guidance.GuidanceBackend.compile_grammar = compiled


def _report_books() -> None:
    from vllm.v1.engine.core import EngineCore

    def millrace_books(self: Any) -> dict[str, Any]:
        scheduler = self.scheduler
        pool = scheduler.kv_cache_manager.block_pool
        return {
            "free": pool.get_num_free_blocks(),
            # One of them is vLLM's own and never given out.
            "total": pool.num_gpu_blocks - 1,
            "keys": list(scheduler.requests),
            "running": len(scheduler.running),
        }

    EngineCore.millrace_books = millrace_books


def _keep_adapters_apart() -> None:
    from vllm.lora.ops.torch_ops import lora_ops
    from vllm.lora.punica_wrapper import punica_cpu

    for name in ("bgmv_expand", "bgmv_expand_slice"):
        expand = getattr(lora_ops, name)
        if not hasattr(expand, "__wrapped__"):
            for module in (lora_ops, punica_cpu):
                setattr(module, name, for_its_own(expand))


def for_its_own(expand: Callable[..., None]) -> Callable[..., None]:
    """`expand` that adds nothing to the rows of requests without an adapter, whose index is -1: there torch
    takes the last adapter's weights.
    """

    @functools.wraps(expand)
    def expanded(inputs: Any, weights: Any, output: Any, indices: Any, *rest: Any, **named: Any) -> None:
        expand(inputs.masked_fill((indices < 0).unsqueeze(1), 0), weights, output, indices, *rest, **named)

    return expanded


def _draw_for_whole_prompts() -> None:
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    # It inherits the method, until this replaces it.
    if "sample_tokens" not in vars(CPUModelRunner):
        CPUModelRunner.sample_tokens = without_discarded(CPUModelRunner.sample_tokens)


def without_discarded(sample: Callable[..., Any]) -> Callable[..., Any]:
    """`sample_tokens` of a model runner that draws from generators for those rows alone whose tokens count.

    A step draws for every row, also for one whose prompt it has computed a part of. vLLM discards that token
    and turns the row's generator back, by a call which generators of CPUs answer with an exception: the
    worker, and with it the engine, ends. A row without a generator is drawn for by a common one, and nothing
    has to be turned back.
    """

    @functools.wraps(sample)
    def sampled(self: Any, *arguments: Any, **named: Any) -> Any:
        batch = self.input_batch
        discarded: Iterable[Any] = self.discard_request_mask.np[: batch.num_reqs].nonzero()[0]
        rows = [int(row) for row in discarded if int(row) in batch.generators]
        kept = {row: batch.generators.pop(row) for row in rows}
        try:
            return sample(self, *arguments, **named)
        finally:
            batch.generators.update(kept)

    return sampled
