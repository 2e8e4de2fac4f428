"""One step's plan and result: the whole contract between scheduler, core and runner.

There is no prefill or decode flag. The plan says how many tokens each sequence computes in this step:
prefill, chunks, decode, prefix hits and speculative verification are one rule.
"""

from __future__ import annotations

import msgspec

from contract.errors import RequestFailure
from contract.grammar import GrammarSpec
from contract.outputs import ChoiceStatistics, FinishReason, FirstToken, TokenLogprobs
from contract.pooling import PoolingParams
from contract.sampling import SamplingParams
from contract.thinking import ThinkingTags
from engine.types.request import Request
from engine.types.retention import KeptBlocks

# Who proposes tokens that a grammar forces; everybody else has the name of a method of speculation.
GRAMMAR_DRAFTS = "grammar"

# Events that leave the engine's core: tokens, ends and failures.


class FirstTokenTimings(msgspec.Struct, frozen=True, kw_only=True):
    """Where the time between submission and first token went, with the moments for spans."""

    arrival_s: float
    first_scheduled_s: float
    prefill_end_s: float
    first_token_s: float
    cached_prompt_tokens: int
    # (start, end, tokens) of every prefill chunk.
    prefill_chunks: tuple[tuple[float, float, int], ...] = ()

    @property
    def parts(self) -> FirstToken:
        """The failure as the gateway receives it."""
        return FirstToken(
            queue_s=self.first_scheduled_s - self.arrival_s,
            prefill_s=self.prefill_end_s - self.first_scheduled_s,
            first_decode_s=self.first_token_s - self.prefill_end_s,
            cached_prompt_tokens=self.cached_prompt_tokens,
            num_prefill_chunks=len(self.prefill_chunks),
        )


class ChoiceHistory(ChoiceStatistics, kw_only=True):
    """What one choice took, with the moments for spans."""

    # (start, end) of every time out of the batch.
    absences_s: tuple[tuple[float, float], ...] = ()
    # (start, end, tokens computed again) of every return to the batch, up to the next token.
    comebacks_s: tuple[tuple[float, float, int], ...] = ()
    # (start, end, tokens) of every step that brought blocks back from host memory.
    restores_s: tuple[tuple[float, float, int], ...] = ()
    # (start, end, tokens computed again) of the latest times that it went on beyond the model's positions, up
    # to the next token.
    renewals_s: tuple[tuple[float, float, int], ...] = ()
    # Drafts that were verified, and those of them that were accepted, by who proposed them.
    drafts: dict[str, tuple[int, int]] = msgspec.field(default_factory=dict)


class TokenEvent(msgspec.Struct, frozen=True, kw_only=True):
    """New tokens of one choice in one step, or its end. Every request ends in exactly one terminal event
    per choice, or in one failure for the whole request.
    """

    request_id: int
    choice_index: int = 0
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    failure: RequestFailure | None = None
    first_token: FirstTokenTimings | None = None
    statistics: ChoiceHistory | None = None
    # Tokens computed so far of answers that are sent at the end; in an event of its own.
    withheld_tokens: int = 0
    # What a model that pools makes of a prompt, little-endian float32; in its only event.
    pooled: bytes = b""

    @classmethod
    def of_failure(
        cls, request: Request, failure: RequestFailure, statistics: ChoiceHistory | None = None
    ) -> TokenEvent:
        """The end of a whole request with an error; of its statistics, what was spent on it counts."""
        return cls(
            request_id=request.request_id,
            choice_index=request.choice_index,
            finish_reason=FinishReason.ERROR,
            failure=failure,
            statistics=statistics,
        )


class NewSequence(msgspec.Struct, frozen=True, array_like=True):
    """Everything the runner must know of a sequence that it has not seen, or sees again after preemption."""

    sequence_id: int
    # Prompt, then output tokens known already (continuation, or recompute after preemption).
    token_ids: tuple[int, ...]
    # Length of the prompt inside token_ids; later tokens are replayed into grammar and penalties.
    num_prompt_tokens: int
    sampling: SamplingParams
    # Choice index; the random stream is a function of (seed, choice_index, output position).
    choice_index: int
    grammar: GrammarSpec | None
    adapter: str
    # Whole block table so far, cached prefix included.
    block_ids: tuple[int, ...]
    # Where the adapter is, which stays there while the sequence runs; -1 for the base model.
    adapter_slot: int = -1
    # With a budget for what is thought.
    thinking: ThinkingTags | None = None
    # To a model that pools.
    pooling: PoolingParams | None = None
    # Where its state lies while it runs; -1 where the model has none.
    state_slot: int = -1
    # Whose it is, and what its cached prefixes are shared under: drafts are taken from no others' answers.
    tenant: str = ""
    cache_salt: bytes = b""
    # The blocks that it looks at, where some are forgotten.
    kept: KeptBlocks | None = None
    # Into these the runner copies the tokens that are chosen of the prompt, once that is computed; from then
    # on they come first in the table, in the place of the prompt's whole blocks.
    fresh_block_ids: tuple[int, ...] = ()
    # Tokens that lay between its first block and the others before it went on beyond the model's positions;
    # `num_prompt_tokens` is less by as many then, and below 0 where output is among them.
    left_token_ids: tuple[int, ...] = ()

    @property
    def text(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Prompt and output, with what was left."""
        ids, num_left = self.token_ids, len(self.left_token_ids)
        if num_left:
            assert self.kept is not None, "only who forgets goes on beyond the positions"
            num_sinks = self.kept.num_sinks * self.kept.block_size
            ids = (*ids[:num_sinks], *self.left_token_ids, *ids[num_sinks:])
        num_prompt = self.num_prompt_tokens + num_left
        return ids[:num_prompt], ids[num_prompt:]


class ScheduledSequence(msgspec.Struct, frozen=True, array_like=True):
    """The tokens that one sequence computes in this step: positions [start, start + num_tokens).

    A plan counts drafts that are in flight as accepted. A row that samples always ends with the sequence's
    last token and its drafts, so it begins as many positions before `start` as were rejected.
    """

    sequence_id: int
    start: int
    num_tokens: int
    # Appended to the sequence's block table in this step (empty for a NewSequence).
    new_block_ids: tuple[int, ...]
    # Whether a token is sampled: the span reaches the last known token.
    samples: bool
    # The last tokens of the span are drafts, to be verified. They are in no one's token list yet.
    draft_token_ids: tuple[int, ...] = ()
    # Leading blocks of the table that the sequence has given up, when that changed since its last row: the
    # runner must not read them, and puts the spare block (whose id is the number of blocks) in their place.
    # A NewSequence's table names the spare block there already.
    num_given_up: int = 0
    # (tokens that it holds, slot): copies of the sequence's state that the row leaves on the way, ascending.
    snapshots: tuple[tuple[int, int], ...] = ()


class SchedulerOutput(msgspec.Struct, frozen=True, array_like=True):
    """One step's plan. Plain data: the same for the real runner, the simulated one and remote workers.

    The runner applies it in this order: releases, new sequences, forks, offloads, restores, copies of blocks
    and states, restores of states, forward. Token ids of running sequences are the runner's own: it appends
    what it sampled, so that a plan can be made before the previous step's tokens are known.
    """

    step_id: int
    new_sequences: tuple[NewSequence, ...] = ()
    scheduled: tuple[ScheduledSequence, ...] = ()
    # Sequences whose runner state is dropped: finished, cancelled or preempted.
    released: tuple[int, ...] = ()
    # (source, destination) block ids, for copy-on-write.
    block_copies: tuple[tuple[int, int], ...] = ()
    # (device block, host block) and back, for the offload tier.
    offloads: tuple[tuple[int, int], ...] = ()
    restores: tuple[tuple[int, int], ...] = ()
    # (parent sequence, child sequence): the child starts with a copy of the parent's runner state.
    forks: tuple[tuple[int, int], ...] = ()
    # (source, destination) slots of states, as they were before the plan; and (slot, host row) and back.
    state_copies: tuple[tuple[int, int], ...] = ()
    state_offloads: tuple[tuple[int, int], ...] = ()
    state_restores: tuple[tuple[int, int], ...] = ()
    # Where only some layers have a window: (block, window block in which they keep it from now on), and
    # copies (source, destination) between window blocks, as they were before the plan.
    window_blocks: tuple[tuple[int, int], ...] = ()
    window_copies: tuple[tuple[int, int], ...] = ()
    # Blocks and window blocks whose memory the system may have back, since the other kind needs it.
    retired_blocks: tuple[int, ...] = ()
    retired_window_blocks: tuple[int, ...] = ()

    @property
    def num_tokens(self) -> int:
        """Tokens computed in the step."""
        return sum(sequence.num_tokens for sequence in self.scheduled)


class SequenceResult(msgspec.Struct, frozen=True, array_like=True):
    """What the runner found for one scheduled sequence that samples (or asked for prompt logprobs)."""

    sequence_id: int
    # Accepted drafts, then the sampled token; empty when nothing was sampled.
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    # The grammar is complete: the choice ends after these tokens.
    grammar_finished: bool = False
    # The sequence cannot go on (non-finite logits, broken grammar); names the cause. Others are not affected.
    failure: str = ""
    # Drafts proposed for the next step.
    next_draft_token_ids: tuple[int, ...] = ()
    num_drafted: int = 0
    num_accepted: int = 0
    grammar_s: float = 0.0
    # The option of the request that `failure` comes from; empty when nothing that was asked for is to blame.
    failure_field: str = ""
    # The whole answer of a model that pools, which has no tokens: little-endian float32.
    pooled: bytes = b""
    # Who proposed the next drafts: the method of speculation, or `GRAMMAR_DRAFTS`.
    next_drafter: str = ""
    # Of each position of the row the share of attention that was forgotten at most, where that is measured.
    lost: tuple[float, ...] = ()


class StepResult(msgspec.Struct, frozen=True, array_like=True):
    """Outcome of one step. `failure` is set when the step as a whole failed and nothing was computed."""

    step_id: int
    results: tuple[SequenceResult, ...]
    # Wall time of the forward and sampling, in seconds.
    compute_s: float = 0.0
    failure: str = ""
    # Part of compute_s that went into sampling, masks and copying the tokens to the host.
    sampling_s: float = 0.0
    # How often it, or a part of it, was cut in two for want of memory.
    num_halvings: int = 0
    # Time of plain steps that the drafts stood for which the step accepted, and what drafts took: to be
    # made, and what the step was longer by them.
    saved_s: float = 0.0
    spent_s: float = 0.0


# Cost of a step by the model's shapes: operations, and bytes that must be read.


class ModelWork(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of one model, and what its device can do; 0 where that is not known."""

    # Two for each weight that a token is multiplied with; of experts, of those that it is sent to.
    flop_per_token: float = 0.0
    # Attention's, of one layer, for each position that a token looks at.
    flop_per_position: float = 0.0
    # Layers by how far they look back, the token itself included; 0 is to the beginning.
    layers: tuple[tuple[int, int], ...] = ()
    weights_bytes: int = 0
    kv_bytes_per_token: int = 0
    # Peak of the device, per second.
    peak_flop: float = 0.0
    peak_read_bytes: float = 0.0


UNKNOWN_WORK = ModelWork()


def step_work(plan: SchedulerOutput, model: ModelWork) -> tuple[float, float]:
    """(operations, bytes read) of a step, each sequence's keys and values read once."""
    flop, read_bytes = plan.num_tokens * model.flop_per_token, float(model.weights_bytes)
    for row in plan.scheduled:
        end = row.start + row.num_tokens
        # Positions that the row's tokens look back on, on average.
        mean = row.start + (row.num_tokens + 1) / 2
        positions = sum(num * (min(mean, window) if window else mean) for window, num in model.layers)
        flop += row.num_tokens * positions * model.flop_per_position
        read_bytes += end * model.kv_bytes_per_token
    return flop, read_bytes
