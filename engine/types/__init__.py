"""Plain data that crosses the engine's internal borders. No torch, no grpc, no clock.

Every type is an immutable msgspec struct, so that it can be compared in tests, logged, and sent to another
process without a second declaration. Times are seconds of CLOCK_MONOTONIC unless the name says otherwise.
"""

from contract.engines import BlocksEvicted, BlocksStored, KvEvent
from contract.errors import RequestFailure
from contract.grammar import GrammarSpec
from contract.outputs import ChoiceStatistics, EngineTime, FinishReason, TokenLogprobs
from contract.sampling import SamplingParams
from engine.types.memory import DiskCounters, MemoryPlan, MemoryUse, SchedulerCounters, SchedulerLoad
from engine.types.model_facts import NOT_MEASURED, MeasuredSpeed, ModelFacts
from engine.types.request import Request
from engine.types.retention import ChosenTokens, KeptBlocks
from engine.types.step import (
    GRAMMAR_DRAFTS,
    ChoiceHistory,
    FirstTokenTimings,
    NewSequence,
    ScheduledSequence,
    SchedulerOutput,
    SequenceResult,
    StepResult,
    TokenEvent,
)

__all__ = [
    "GRAMMAR_DRAFTS",
    "NOT_MEASURED",
    "BlocksEvicted",
    "BlocksStored",
    "ChoiceHistory",
    "ChoiceStatistics",
    "ChosenTokens",
    "DiskCounters",
    "EngineTime",
    "FinishReason",
    "FirstTokenTimings",
    "GrammarSpec",
    "KeptBlocks",
    "KvEvent",
    "MeasuredSpeed",
    "MemoryPlan",
    "MemoryUse",
    "ModelFacts",
    "NewSequence",
    "Request",
    "RequestFailure",
    "SamplingParams",
    "ScheduledSequence",
    "SchedulerCounters",
    "SchedulerLoad",
    "SchedulerOutput",
    "SequenceResult",
    "StepResult",
    "TokenEvent",
    "TokenLogprobs",
]
