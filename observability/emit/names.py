"""Every span, attribute and metric of the suite, declared once with its unit and meaning.

Producers and consumers (waterfall, `why`, dashboards, alerts, the cluster's autoscaler) take names from here
and nowhere else; tests hold dashboards and alert rules to this list. A name that is not here is not emitted.
The list is kept in one file, longer than others, because it is looked up rather than read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, NewType

# Plain strings at run time: encoders are fast for those.
SpanName = NewType("SpanName", str)
Attribute = NewType("Attribute", str)
# What was declared, with its meaning.
SPANS: dict[str, str] = {}
ATTRIBUTES: dict[str, str] = {}


def span(name: str, meaning: str) -> SpanName:
    """Declares a span; ours begin with the service that makes them."""
    SPANS[name] = meaning
    return SpanName(name)


def attribute(key: str, unit: str, meaning: str) -> Attribute:
    """Declares a span attribute. `unit` is "" for text, else the number's (UCUM-like: ms, s, {token})."""
    ATTRIBUTES[key] = f"{meaning} [{unit}]" if unit else meaning
    return Attribute(key)


@dataclass(frozen=True)
class Metric:
    """One metric family as Prometheus sees it. `name` is the exposed name, suffixes included."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    unit: str
    meaning: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.name in METRICS:
            raise ValueError(f"{self.name} is declared twice")
        if (self.kind == "counter") != self.name.endswith("_total"):
            raise ValueError(f"{self.name}: counters, and only counters, end in _total")
        if (self.kind == "histogram") != bool(self.buckets):
            raise ValueError(f"{self.name}: histograms, and only histograms, have buckets")
        METRICS[self.name] = self


METRICS: dict[str, Metric] = {}

# --- Services (service.name of the trace resource) ---------------------------------------------------------
ENVOY = "envoy"
GATEWAY = "gateway"
TOKENIZER = "tokenizer"
ENGINE = "engine"
SERVICES = (ENVOY, GATEWAY, TOKENIZER, ENGINE)

# --- Spans -------------------------------------------------------------------------------------------------
# A step of a request that took less is told in an attribute of its span: a span costs many times as much, and
# under load, when there is least time for that, every step takes tens of milliseconds.
LONG_MS = 100.0
# No delay is blamed that was shorter.
DELAY_MS = 5.0
# Envoy names its own server span; this is the operation its configuration sets.
ENVOY_INGRESS = span("ingress", "The request at the edge, first byte in to last byte out.")
GATEWAY_AUTHORIZE = span(
    "gateway.authorize",
    "Credentials to tenant and tier, where they were refused or it took long.",
)
GATEWAY_RATE_LIMIT = span("gateway.rate_limit", "Requests per minute, asked by the edge.")
GATEWAY_REQUEST = span("gateway.request", "The whole request in the gateway; has the TTFT parts.")
GATEWAY_PREPARE = span("gateway.prepare", "Call to the tokenizer service.")
GATEWAY_RESERVE = span("gateway.reserve", "Reservation of the token budget.")
GATEWAY_ADMIT = span("gateway.admit", "Admission or refusal by the tier's promises.")
GATEWAY_ROUTE = span("gateway.route", "Choice of the engine.")
GATEWAY_STREAM = span("gateway.stream", "From the first output of the engine to the last chunk.")
GATEWAY_RESUBMIT = span("gateway.resubmit", "Continuation on another engine after one was lost.")
TOKENIZER_PREPARE = span("tokenizer.prepare", "Template, encoding and grammar of one request.")
TOKENIZER_RENDER = span("tokenizer.render", "The chat template.")
TOKENIZER_ENCODE = span("tokenizer.encode", "Text to token ids.")
TOKENIZER_COMPILE = span("tokenizer.compile", "Grammar compiled, or found in the cache.")
ENGINE_REQUEST = span("engine.request", "The request in the engine, submission to last token.")
ENGINE_QUEUE = span("engine.queue", "Waiting until the first token of the prompt is scheduled.")
ENGINE_PREFILL = span("engine.prefill", "One chunk of the prompt in one step.")
ENGINE_FIRST_DECODE = span("engine.first_decode", "From the end of the prompt to the first token.")
ENGINE_DECODE = span("engine.decode", "All decode steps as one summary.")
ENGINE_PREEMPTED = span("engine.preempted", "Out of the batch, its blocks given to others.")
ENGINE_RESUMED = span(
    "engine.resumed", "Back in the batch, until its next token: what was lost is computed again."
)
ENGINE_OFFLOAD = span("engine.offload", "The step in which blocks of it were brought back from host memory.")

# --- Attributes --------------------------------------------------------------------------------------------
REQUEST_ID = attribute("millrace.request_id", "", "Id that Envoy gave the request; on every span.")
CLIENT_REQUEST_ID = attribute("millrace.client_request_id", "", "The client's own x-request-id.")
TENANT = attribute("millrace.tenant", "", "Who asked.")
TIER = attribute("millrace.tier", "", "SLA tier the request is served under.")
IDENTITY = (REQUEST_ID, CLIENT_REQUEST_ID, TENANT, TIER)
STEPS = attribute(
    "millrace.steps", "", "Short steps of the span as JSON: name, Unix ns of the beginning, ms, attributes."
)
DETAILS = attribute(
    "millrace.details",
    "",
    "What else is known of the span, by key, as JSON: an attribute of its own costs as much as all these.",
)
KEY_ID = attribute("millrace.key_id", "", "Public identifier of the API key; never the key.")
FACE = attribute("millrace.face", "", "grpc or http.")
STREAMING = attribute("millrace.streaming", "", "Whether the answer is streamed.")
OUTCOME = attribute("millrace.outcome", "", "Finish reason, or the reason of the error table.")
ENGINE_ID = attribute("millrace.engine_id", "", "Engine process that served the request.")
POOL = attribute("millrace.pool", "", "Pool of the engine that served; absent where engines name none.")
ADAPTER = attribute("millrace.adapter", "", "LoRA adapter; absent for the base model.")
GUIDED = attribute("millrace.guided", "", "Kind of output constraint; absent without one.")
SPECULATIVE = attribute("millrace.speculative", "", "Whether drafts were verified for this request.")
PROMPT_TOKENS = attribute("millrace.prompt_tokens", "{token}", "Length of the prompt.")
CACHED_TOKENS = attribute("millrace.cached_prompt_tokens", "{token}", "Prompt tokens from the prefix cache.")
OUTPUT_TOKENS = attribute("millrace.output_tokens", "{token}", "Tokens generated.")
MAX_TOKENS = attribute("millrace.max_tokens", "{token}", "Limit of generated tokens.")
NUM_CHOICES = attribute("millrace.num_choices", "{choice}", "Choices asked for.")
CHOICE_INDEX = attribute("millrace.choice_index", "", "Which choice the span is about.")
CHUNK_TOKENS = attribute("millrace.chunk_tokens", "{token}", "Prompt tokens computed in this chunk.")
NUM_CHUNKS = attribute("millrace.num_prefill_chunks", "{chunk}", "Chunks the prompt was computed in.")
NUM_STEPS = attribute("millrace.num_steps", "{step}", "Engine steps the choice took part in.")
NUM_PREEMPTIONS = attribute("millrace.num_preemptions", "{preemption}", "Times the request lost its place.")
RECOMPUTED_TOKENS = attribute("millrace.recomputed_tokens", "{token}", "Tokens computed a second time.")
RESTORED_TOKENS = attribute("millrace.restored_tokens", "{token}", "Tokens brought back from host memory.")
LINK_CAUSE = attribute("millrace.link.cause", "", "On links: the delay that the linked request had part in.")
LINK_OVERLAP_MS = attribute("millrace.link.overlap_ms", "ms", "On links: its work during the time lost.")
DRAFTED_TOKENS = attribute("millrace.drafted_tokens", "{token}", "Tokens proposed by the draft.")
ACCEPTED_TOKENS = attribute("millrace.accepted_tokens", "{token}", "Proposed tokens that were kept.")
GRAMMAR_DIGEST = attribute("millrace.grammar.digest", "", "Digest of the compiled grammar.")
GRAMMAR_CACHE = attribute("millrace.grammar.cache", "", "hit or miss.")
GRAMMAR_MS = attribute("millrace.grammar_ms", "ms", "Time spent on grammar masks in the engine.")
EXPECTED_WAIT_MS = attribute("millrace.expected_wait_ms", "ms", "Wait that admission expected.")
ROUTE_REASON = attribute("millrace.route.reason", "", "Why this engine: prefix, least_pending, only, ...")
ROUTE_PREFIX_TOKENS = attribute(
    "millrace.route.prefix_tokens", "{token}", "Prefix the router expected cached."
)
RETRY_AFTER_S = attribute("millrace.retry_after_s", "s", "Advice given with a refusal.")
TPOT_MS = attribute("millrace.tpot_ms", "ms", "Mean time per output token after the first.")
ITL_MAX_MS = attribute("millrace.itl_max_ms", "ms", "Longest gap between two chunks.")
E2E_MS = attribute("millrace.e2e_ms", "ms", "First byte in to last byte out, at the gateway.")
TTFT_TARGET_MS = attribute("millrace.ttft_target_ms", "ms", "Target of the tier.")
TPOT_TARGET_MS = attribute("millrace.tpot_target_ms", "ms", "Target of the tier.")
TTFT_MS = attribute("millrace.ttft_ms", "ms", "Time to the first token; the sum of the parts.")
DELAYED_BY = attribute("millrace.delayed_by", "", "Causes that cost time, the most expensive first.")
# Envoy writes these itself.
ENVOY_REQUEST_ID = attribute("guid:x-request-id", "", "Request id on Envoy's own spans.")
HTTP_STATUS = attribute("http.status_code", "", "Status on Envoy's own spans.")


class TtftPart(StrEnum):
    """The named parts whose sum is the time to the first token, in the order in which they pass."""

    NETWORK = "network"
    PREPROCESS = "preprocess"
    QUEUE = "queue"
    PREFILL = "prefill"
    FIRST_DECODE = "first_decode"
    SERIALIZE = "serialize"


TTFT_PART_MEANING: Mapping[TtftPart, str] = {
    TtftPart.NETWORK: "edge to gateway, and gateway to engine and back",
    TtftPart.PREPROCESS: "authorization, template, encoding, grammar, reservation, admission, routing",
    TtftPart.QUEUE: "waiting in the engine until the first prompt token was scheduled",
    TtftPart.PREFILL: "computing the prompt",
    TtftPart.FIRST_DECODE: "from the end of the prompt to the first sampled token",
    TtftPart.SERIALIZE: "token to text to the first chunk on the socket",
}
TTFT_PARTS: Mapping[TtftPart, Attribute] = {
    part: attribute(f"millrace.ttft.{part}_ms", "ms", TTFT_PART_MEANING[part]) for part in TtftPart
}


class Cause(StrEnum):
    """What can hold a request back. Keys of ChoiceStatistics.delayed_by_s and values of DELAYED_BY."""

    LONG_PREFILL = "long_prefill"
    KV_PRESSURE = "kv_pressure"
    PREEMPTION = "preemption"
    BATCH_FULL = "batch_full"
    HIGHER_TIER = "higher_tier"
    GRAMMAR_COMPILE = "grammar_compile"
    RATE_LIMIT = "rate_limit"
    # Reserved: nothing reports it, since engines refuse adapters (`engine/service/convert.py`).
    COLD_ADAPTER = "cold_adapter"
    OFFLOAD = "offload"
    ENGINE_LOST = "engine_lost"


CAUSE_MEANING: Mapping[Cause, str] = {
    Cause.LONG_PREFILL: "the long prompt of another request filled the steps",
    Cause.KV_PRESSURE: "no free blocks in the KV cache",
    Cause.PREEMPTION: "it lost its place to another request and had to be computed again",
    Cause.BATCH_FULL: "the batch was full of other requests",
    Cause.HIGHER_TIER: "requests of a higher tier went first",
    Cause.GRAMMAR_COMPILE: "its grammar had to be compiled and made ready",
    Cause.RATE_LIMIT: "its tenant's limits made it wait",
    Cause.COLD_ADAPTER: "its adapter had to be loaded",
    Cause.OFFLOAD: "its blocks were brought back from host memory",
    Cause.ENGINE_LOST: "its engine was lost and another one continued",
}
DELAYED_BY_MS: Mapping[Cause, Attribute] = {
    cause: attribute(f"millrace.delayed_by.{cause}_ms", "ms", CAUSE_MEANING[cause]) for cause in Cause
}

# --- Buckets of lengths, as label values -------------------------------------------------------------------
LENGTH_BOUNDS = (128, 512, 2_048, 8_192, 32_768)


def length_bucket(num_tokens: int) -> str:
    """Label value for a length: "<=128", ..., ">32768"."""
    for bound in LENGTH_BOUNDS:
        if num_tokens <= bound:
            return f"<={bound}"
    return f">{LENGTH_BOUNDS[-1]}"


# --- Metrics -----------------------------------------------------------------------------------------------
_FAST = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0)
_LATENCY = (0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0, 1.5, 2.5, 5.0, 10.0, 30.0, 60.0)
_TOKEN_GAP = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5)
_DURATION = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 900.0)
_COUNT = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)

# Gateway: what clients get.
REQUESTS = Metric(
    "millrace_requests_total",
    "counter",
    "{request}",
    "Requests that ended, by outcome: ok, cancelled, refused or failed.",
    ("face", "model", "tier", "tenant", "outcome"),
)
REJECTIONS = Metric(
    "millrace_rejections_total",
    "counter",
    "{request}",
    "Requests refused, by reason of the error table.",
    ("reason", "tier"),
)
TTFT = Metric(
    "millrace_time_to_first_token_seconds",
    "histogram",
    "s",
    "Time to the first token, seen at the gateway.",
    ("model", "tier", "prompt_bucket", "cache", "guided", "adapter", "pool"),
    _LATENCY,
)
TTFT_PART = Metric(
    "millrace_ttft_part_seconds",
    "histogram",
    "s",
    "One named part of the time to the first token.",
    ("part", "tier"),
    (0.001, *_LATENCY),
)
TPOT = Metric(
    "millrace_time_per_output_token_seconds",
    "histogram",
    "s",
    "Mean time per output token after the first, one observation a request.",
    ("model", "tier", "output_bucket", "speculative", "pool"),
    _TOKEN_GAP,
)
ITL = Metric(
    "millrace_inter_token_latency_seconds",
    "histogram",
    "s",
    "Gap between two consecutive outputs of a stream.",
    ("model", "tier"),
    _TOKEN_GAP,
)
E2E = Metric(
    "millrace_request_duration_seconds",
    "histogram",
    "s",
    "First byte in to last byte out, at the gateway.",
    ("model", "tier", "face"),
    _DURATION,
)
SLO = Metric(
    "millrace_slo_requests_total",
    "counter",
    "{request}",
    "Requests judged against a target of their tier: objective is ttft or tpot, met is true or false.",
    ("tier", "tenant", "objective", "met"),
)
TOKENS = Metric(
    "millrace_tokens_total",
    "counter",
    "{token}",
    "Tokens by kind: prompt_computed, prompt_cached, completion, reasoning.",
    ("kind", "model", "tier", "tenant"),
)
COST = Metric(
    "millrace_cost_total",
    "counter",
    "{currency}",
    "Cost by the configured prices, in the ledger's currency.",
    ("tier", "tenant"),
)
# The same times by the names, labels and buckets of the GenAI conventions, for dashboards of others.
_GEN_AI_LABELS = (
    "gen_ai_operation_name",
    "gen_ai_provider_name",
    "gen_ai_request_model",
    "gen_ai_response_model",
)
GEN_AI_DURATION = Metric(
    "gen_ai_server_request_duration_seconds",
    "histogram",
    "s",
    "First byte in to last byte out; a request that failed has its error_type.",
    (*_GEN_AI_LABELS, "error_type"),
    (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92),
)
GEN_AI_TTFT = Metric(
    "gen_ai_server_time_to_first_token_seconds",
    "histogram",
    "s",
    "Time to the first token of requests that succeeded.",
    _GEN_AI_LABELS,
    (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
)
GEN_AI_TPOT = Metric(
    "gen_ai_server_time_per_output_token_seconds",
    "histogram",
    "s",
    "Mean time per output token after the first, of requests that succeeded.",
    _GEN_AI_LABELS,
    (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5),
)
ACTIVE_STREAMS = Metric(
    "millrace_active_requests", "gauge", "{request}", "Requests in the gateway now.", ("tier",)
)
AUTHORIZE_SECONDS = Metric(
    "millrace_authorize_seconds", "histogram", "s", "External authorization in the gateway.", (), _FAST
)
PREPARE_SECONDS = Metric(
    "millrace_prepare_seconds", "histogram", "s", "Call to the tokenizer service.", (), _LATENCY
)
EXPECTED_WAIT = Metric(
    "millrace_admission_expected_wait_seconds",
    "gauge",
    "s",
    "Wait that admission expects for a new request.",
    ("tier",),
)
ROUTED = Metric(
    "millrace_routed_requests_total",
    "counter",
    "{request}",
    "Requests sent to an engine, with the router's reason.",
    ("engine", "reason"),
)
RESUBMISSIONS = Metric(
    "millrace_resubmissions_total",
    "counter",
    "{request}",
    "Streams continued on another engine.",
    ("outcome",),
)
ENGINES_UP = Metric("millrace_engines_up", "gauge", "{engine}", "Engines that the gateway can send work to.")
LIMIT_STORE_UP = Metric(
    "millrace_limit_store_up",
    "gauge",
    "1",
    "1 while the shared limit store answers; 0 while the policy applies.",
)
LEDGER_PENDING = Metric(
    "millrace_ledger_pending_entries", "gauge", "{entry}", "Ledger entries not yet written."
)
GUIDED_OUTPUTS = Metric(
    "millrace_guided_outputs_total",
    "counter",
    "{output}",
    "Finished guided outputs, by whether they satisfy their constraint.",
    ("kind", "valid"),
)

# Tokenizer service.
TOKENIZER_STAGE_SECONDS = Metric(
    "millrace_tokenizer_stage_seconds", "histogram", "s", "render, encode or compile.", ("stage",), _FAST
)
PROMPT_LENGTH = Metric(
    "millrace_prompt_length_tokens", "histogram", "{token}", "Prompt length of prepared requests.", (), _COUNT
)
GRAMMAR_COMPILE_SECONDS = Metric(
    "millrace_grammar_compile_seconds",
    "histogram",
    "s",
    "Compilation of a grammar that was not cached.",
    ("kind",),
    _LATENCY,
)
GRAMMAR_LOOKUPS = Metric(
    "millrace_grammar_lookups_total",
    "counter",
    "{lookup}",
    "Grammar cache, result is hit or miss.",
    ("result",),
)
GRAMMAR_REFUSALS = Metric(
    "millrace_grammar_refusals_total", "counter", "{grammar}", "Grammars refused, by cause.", ("cause",)
)
COMPILES_WAITING = Metric(
    "millrace_grammar_compiles_waiting", "gauge", "{grammar}", "Compilations waiting for a worker."
)

# Engine. The first three, the cache's shape and the adapters are what an endpoint picker scrapes.
REQUESTS_WAITING = Metric(
    "millrace_engine_requests_waiting", "gauge", "{request}", "Requests in the engine's queue."
)
REQUESTS_RUNNING = Metric("millrace_engine_requests_running", "gauge", "{request}", "Requests in the batch.")
KV_USAGE = Metric(
    "millrace_engine_kv_cache_usage_ratio", "gauge", "1", "Share of the KV blocks held by requests, 0 to 1."
)
CACHE_INFO = Metric(
    "millrace_engine_cache_info",
    "gauge",
    "1",
    "Always 1; the labels give the shape of the KV cache.",
    ("block_size", "num_blocks"),
)
ADAPTERS_INFO = Metric(
    "millrace_engine_adapters_info",
    "gauge",
    "s",
    "Unix time of the last change; the labels name the adapters.",
    ("max_lora", "running_lora_adapters", "waiting_lora_adapters"),
)
OLDEST_WAIT = Metric(
    "millrace_engine_queue_oldest_age_seconds", "gauge", "s", "Age of the oldest request in the queue."
)
QUEUE_SECONDS = Metric(
    "millrace_engine_queue_seconds", "histogram", "s", "Time in the queue, a request.", ("tier",), _LATENCY
)
PREFILL_SECONDS = Metric(
    "millrace_engine_prefill_seconds", "histogram", "s", "Time of the prompt, a request.", ("tier",), _LATENCY
)
DECODE_SECONDS = Metric(
    "millrace_engine_decode_seconds",
    "histogram",
    "s",
    "Time of the decode steps, a choice.",
    ("tier",),
    _DURATION,
)
STEP_SECONDS = Metric(
    "millrace_engine_step_seconds",
    "histogram",
    "s",
    "One engine step; kind is prefill, decode or mixed.",
    ("kind",),
    _TOKEN_GAP,
)
STEP_TOKENS = Metric(
    "millrace_engine_step_tokens", "histogram", "{token}", "Tokens computed in one step.", (), _COUNT
)
STEP_SEQUENCES = Metric(
    "millrace_engine_step_sequences", "histogram", "{sequence}", "Sequences in one step.", (), _COUNT[:12]
)
PENDING_PREFILL = Metric(
    "millrace_engine_pending_prefill_tokens", "gauge", "{token}", "Prompt tokens not yet computed."
)
PROMPT_TOKENS_DONE = Metric(
    "millrace_engine_prompt_tokens_total",
    "counter",
    "{token}",
    "Prompt tokens by source: computed, cached or restored.",
    ("source",),
)
GENERATED_TOKENS = Metric(
    "millrace_engine_generated_tokens_total", "counter", "{token}", "Tokens generated.", ("tier",)
)
KV_BLOCKS = Metric(
    "millrace_engine_kv_blocks", "gauge", "{block}", "Blocks by state: free, cached or used.", ("state",)
)
PREFIX_QUERIES = Metric(
    "millrace_engine_prefix_cache_queries_total", "counter", "{token}", "Prompt tokens looked up."
)
PREFIX_HITS = Metric("millrace_engine_prefix_cache_hits_total", "counter", "{token}", "Prompt tokens found.")
PREEMPTIONS = Metric(
    "millrace_engine_preemptions_total", "counter", "{sequence}", "Sequences that lost their place."
)
RECOMPUTED = Metric(
    "millrace_engine_recomputed_tokens_total", "counter", "{token}", "Tokens computed again after preemption."
)
EVICTIONS = Metric("millrace_engine_evicted_blocks_total", "counter", "{block}", "Cached blocks given away.")
OFFLOADED = Metric(
    "millrace_engine_offloaded_blocks_total",
    "counter",
    "{block}",
    "Blocks moved to (out) or from (in) host memory.",
    ("direction",),
)
DRAFTED = Metric("millrace_engine_drafted_tokens_total", "counter", "{token}", "Tokens proposed by drafts.")
ACCEPTED = Metric("millrace_engine_accepted_tokens_total", "counter", "{token}", "Proposed tokens kept.")
GRAMMAR_SECONDS = Metric(
    "millrace_engine_grammar_seconds_total", "counter", "s", "Time spent on grammar masks."
)
ENGINE_CANCELLED = Metric(
    "millrace_engine_cancelled_total", "counter", "{request}", "Requests cancelled, by reason.", ("reason",)
)
DELAYED_SECONDS = Metric(
    "millrace_engine_delayed_seconds_total",
    "counter",
    "s",
    "Time that requests lost, by cause.",
    ("cause", "tier"),
)
STEP_FAILURES = Metric(
    "millrace_engine_step_failures_total", "counter", "{request}", "Requests that a failed step ended."
)
MEMORY_PLAN = Metric(
    "millrace_engine_memory_plan_bytes",
    "gauge",
    "By",
    "The memory plan: weights, workspace, headroom, kv_cache; and what is really resident.",
    ("part",),
)

MEMORY_USED = Metric(
    "millrace_engine_memory_used_bytes",
    "gauge",
    "By",
    "What parts of the memory plan really take: weights, kv_cache (written blocks), workspace (peak).",
    ("part",),
)

# Every service.
BUILD_INFO = Metric(
    "millrace_build_info", "gauge", "1", "Always 1; the labels name service, version and model.",
    ("service", "version", "model"),
)  # fmt: skip
SPANS_STORED = Metric("millrace_spans_stored_total", "counter", "{span}", "Spans written to the local store.")
SPANS_DROPPED = Metric(
    "millrace_spans_dropped_total", "counter", "{span}", "Spans lost because the local store was behind."
)

# What the Kubernetes Gateway API Inference Extension's endpoint picker reads (model server protocol).
INFERENCE_EXTENSION: Mapping[str, Metric] = {
    "TotalQueuedRequests": REQUESTS_WAITING,
    "TotalRunningRequests": REQUESTS_RUNNING,
    "KVCacheUtilization": KV_USAGE,
    "CacheInfo": CACHE_INFO,
    "LoraInfo": ADAPTERS_INFO,
}
