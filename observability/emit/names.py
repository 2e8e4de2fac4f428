"""Every span, attribute and metric of the suite, declared once with its unit and meaning.

Producers and consumers (waterfall, `why`, dashboards, alerts, the cluster's autoscaler) take names from here
and nowhere else; tests hold dashboards and alert rules to this list. A name that is not here is not emitted.
The list is kept in one file, longer than others, because it is looked up rather than read.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Self

from observability.emit import declare

# Others know these by this file.
Attribute = declare.Attribute
Metric = declare.Metric
SpanName = declare.SpanName
ATTRIBUTES, METRICS, SPANS = declare.ATTRIBUTES, declare.METRICS, declare.SPANS
attribute, span = declare.attribute, declare.span
counter, gauge, histogram = declare.counter, declare.gauge, declare.histogram

# --- Services (service.name of the trace resource) ---------------------------------------------------------
ENVOY = "envoy"
GATEWAY = "gateway"
TOKENIZER = "tokenizer"
ENGINE = "engine"
SERVICES = (ENVOY, GATEWAY, TOKENIZER, ENGINE)

# --- Spans -------------------------------------------------------------------------------------------------
# A step of a request that took less is recorded in an attribute of its span: a span costs many times as much,
# and under load, when there is least time for that, every step takes tens of milliseconds.
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
GATEWAY_SAMPLE = span("gateway.sample", "One of the samples that an answer is chosen from (test_time).")
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
REQUEST_ID = attribute("millrace.request_id", "", "Id that Envoy gave the request; on its spans.")
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
REVISION = attribute("millrace.revision", "", "Version of the model; absent where it has none.")
FALLBACK_FROM = attribute(
    "millrace.fallback_from", "", "Model that was asked for and had no capacity; absent where it answered."
)
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
NUM_PREEMPTIONS = attribute("millrace.num_preemptions", "{preemption}", "Times the request was preempted.")
RECOMPUTED_TOKENS = attribute("millrace.recomputed_tokens", "{token}", "Tokens computed a second time.")
LOST_TOKENS = attribute("millrace.lost_tokens", "{token}", "Shares of attention lost at most, summed.")
RESTORED_TOKENS = attribute("millrace.restored_tokens", "{token}", "Tokens brought back from host memory.")
LINK_CAUSE = attribute("millrace.link.cause", "", "On links: the delay that the linked request had part in.")
LINK_OVERLAP_MS = attribute("millrace.link.overlap_ms", "ms", "On links: its work during the time lost.")
DRAFTED_TOKENS = attribute("millrace.drafted_tokens", "{token}", "Tokens proposed by the draft.")
CANDIDATE_TOKENS = attribute(
    "millrace.candidate_tokens", "{token}", "Tokens of candidates and beams that were not returned."
)
ACCEPTED_TOKENS = attribute("millrace.accepted_tokens", "{token}", "Proposed tokens that were kept.")
GRAMMAR_DIGEST = attribute("millrace.grammar.digest", "", "Digest of the compiled grammar.")
GRAMMAR_CACHE = attribute("millrace.grammar.cache", "", "hit or miss.")
GRAMMAR_MS = attribute("millrace.grammar_ms", "ms", "Time spent on grammar masks in the engine.")
EXPECTED_WAIT_MS = attribute(
    "millrace.expected_wait_ms", "ms", "Time that prompts before the request took, as expected."
)
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


class _Meant(StrEnum):
    """A word with its meaning."""

    meaning: str

    def __new__(cls, word: str, meaning: str) -> Self:
        """A member as it is written below."""
        member = str.__new__(cls, word)
        member._value_, member.meaning = word, meaning
        return member


class TtftPart(_Meant):
    """The named parts whose sum is the time to the first token, in the order in which they pass."""

    NETWORK = "network", "edge to gateway, and gateway to engine and back"
    PREPROCESS = "preprocess", "authorization, template, encoding, grammar, reservation, admission, routing"
    QUEUE = "queue", "waiting in the engine until the first prompt token was scheduled"
    PREFILL = "prefill", "computing the prompt"
    FIRST_DECODE = "first_decode", "from the end of the prompt to the first sampled token"
    DELIBERATION = "deliberation", "computing samples after the first one's first token, until one was chosen"
    SERIALIZE = "serialize", "token to text to the first chunk on the socket"


TTFT_PARTS: Mapping[TtftPart, Attribute] = {
    part: attribute(f"millrace.ttft.{part}_ms", "ms", part.meaning) for part in TtftPart
}


class Cause(_Meant):
    """What can hold a request back. Keys of ChoiceStatistics.delayed_by_s and values of DELAYED_BY."""

    LONG_PREFILL = "long_prefill", "the long prompt of another request filled the steps"
    KV_PRESSURE = "kv_pressure", "no free blocks in the KV cache"
    PREEMPTION = "preemption", "it lost its batch slot to another request and had to be computed again"
    BATCH_FULL = "batch_full", "the batch was full of other requests"
    HIGHER_TIER = "higher_tier", "requests of a higher tier went first"
    GRAMMAR_COMPILE = "grammar_compile", "its grammar had to be compiled and made ready"
    RATE_LIMIT = "rate_limit", "its tenant's limits made it wait"
    COLD_ADAPTER = "cold_adapter", "its adapter had to be loaded"
    OFFLOAD = "offload", "its blocks were brought back from host memory or disk"
    HAND_OVER = "hand_over", "the blocks of its prompt came from the engine that had computed it"
    ANSWER_PACE = "answer_pace", "answers of others had to keep their pace, so that its prompt was held back"
    FORGOTTEN = "forgotten", "it lost more of its attention than it may, and was computed again with all"
    ENGINE_LOST = "engine_lost", "its engine was lost and another one continued"


DELAYED_BY_MS: Mapping[Cause, Attribute] = {
    cause: attribute(f"millrace.delayed_by.{cause}_ms", "ms", cause.meaning) for cause in Cause
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
# By what times to tokens can be asked for. Of many combinations, further ones have no tenant (emit/metrics).
_SLICES = "tenant,tier,model,revision,prompt_bucket,cache,guided,speculative,adapter,pool"
REQUESTS = counter(
    "millrace_requests_total{face,model,revision,tier,tenant,outcome=ok|cancelled|refused|failed}",
    "{request}",
    "Requests that ended, by outcome: ok, cancelled, refused or failed.",
)
REJECTIONS = counter(
    "millrace_rejections_total{reason,tier}", "{request}", "Requests refused, by reason of the error table."
)
TTFT = histogram(
    f"millrace_time_to_first_token_seconds{{{_SLICES}}}",
    "s",
    "Time to the first token, seen at the gateway.",
    _LATENCY,
)
TTFT_PART = histogram(
    "millrace_ttft_part_seconds{part,tier}",
    "s",
    "One named part of the time to the first token.",
    (0.001, *_LATENCY),
)
TPOT = histogram(
    f"millrace_time_per_output_token_seconds{{{_SLICES},output_bucket}}",
    "s",
    "Mean time per output token after the first, one observation a request.",
    _TOKEN_GAP,
)
ITL = histogram(
    "millrace_inter_token_latency_seconds{model,tier}",
    "s",
    "Gap between two consecutive outputs of a stream.",
    _TOKEN_GAP,
)
E2E = histogram(
    "millrace_request_duration_seconds{model,revision,tier,face}",
    "s",
    "First byte in to last byte out, at the gateway.",
    _DURATION,
)
SLO = counter(
    "millrace_slo_requests_total{tier,tenant,objective,met=true|false}",
    "{request}",
    "Requests judged against a target of their tier: objective is ttft or tpot, met is true or false.",
)
GOODPUT = counter(
    "millrace_goodput_requests_total{tier,model,met=true|false}",
    "{request}",
    "Accepted requests of tiers with targets whose client has stayed; met is true where all targets were.",
)
TOOL_CALLS = counter(
    "millrace_tool_calls_total{model,valid=true|false}",
    "{call}",
    "Tool calls in answers; valid is true for a tool that was offered, with a JSON object as arguments.",
)
TOKENS = counter(
    "millrace_tokens_total{kind,model,revision,tier,tenant}",
    "{token}",
    "Tokens by kind: prompt_computed, prompt_cached, completion, reasoning, candidate (not returned).",
)
COST = counter(
    "millrace_cost_total{tier,tenant}",
    "{currency}",
    "Cost by the configured prices, in the ledger's currency.",
)
# The same times by the names, labels and buckets of the GenAI conventions, for dashboards of others.
_GEN_AI_LABELS = "gen_ai_operation_name,gen_ai_provider_name,gen_ai_request_model,gen_ai_response_model"
GEN_AI_DURATION = histogram(
    f"gen_ai_server_request_duration_seconds{{{_GEN_AI_LABELS},error_type}}",
    "s",
    "First byte in to last byte out; a request that failed has its error_type.",
    (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92),
)
GEN_AI_TTFT = histogram(
    f"gen_ai_server_time_to_first_token_seconds{{{_GEN_AI_LABELS}}}",
    "s",
    "Time to the first token of requests that succeeded.",
    (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
)
GEN_AI_TPOT = histogram(
    f"gen_ai_server_time_per_output_token_seconds{{{_GEN_AI_LABELS}}}",
    "s",
    "Mean time per output token after the first, of requests that succeeded.",
    (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5),
)
ACTIVE_STREAMS = gauge("millrace_active_requests{tier}", "{request}", "Requests in the gateway now.")
OPEN_SOCKETS = gauge("millrace_open_websockets", "{connection}", "WebSockets that are open now.")
SOCKET_ENDS = counter(
    "millrace_websockets_ended_total{reason=client|lifetime|restart|failed|refused}",
    "{connection}",
    "WebSockets that are over: left by their client or closed for what it sent, open for longest, closed by "
    "a gateway that drains or by a defect; or never opened for want of a key or a place.",
)
AUTHORIZE_SECONDS = histogram(
    "millrace_authorize_seconds", "s", "External authorization in the gateway.", _FAST
)
PREPARE_SECONDS = histogram("millrace_prepare_seconds", "s", "Call to the tokenizer service.", _LATENCY)
EXPECTED_WAIT = gauge(
    "millrace_admission_expected_wait_seconds{tier}", "s", "Time that prompts before a new request take."
)
ROUTED = counter(
    "millrace_routed_requests_total{engine,reason}",
    "{request}",
    "Requests sent to an engine, with the router's reason.",
)
RESUBMISSIONS = counter(
    "millrace_resubmissions_total{outcome=continued|failed}",
    "{request}",
    "Streams continued on another engine.",
)
ENGINES_UP = gauge("millrace_engines_up", "{engine}", "Engines that the gateway can send work to.")
ENGINES_WANTED = gauge(
    "millrace_engines_wanted{model,pool}",
    "{engine}",
    "Engines that this gateway's requests need; the deployment needs the sum, rounded up.",
)
LIMIT_STORE_UP = gauge(
    "millrace_limit_store_up", "1", "1 while the shared limit store answers; 0 while the policy applies."
)
LEDGER_PENDING = gauge("millrace_ledger_pending_entries", "{entry}", "Ledger entries not yet written.")
LEDGER_JOURNALS = counter(
    "millrace_ledger_journals_total", "{journal}", "Journals of killed gateways that were taken in."
)
LEDGER_RECOVERED = counter(
    "millrace_ledger_recovered_entries_total{interrupted=true|false}",
    "{entry}",
    "Ledger entries of killed gateways, from their journals; interrupted (true or false) were cut off.",
)
LEDGER_MISSING = counter(
    "millrace_ledger_missing_entries_total{reason=killed|waiting|refused}",
    "{entry}",
    "Requests without a ledger entry: killed (its gateway, of a full disk), waiting (too many) or refused.",
)
FALLBACKS = counter(
    "millrace_fallbacks_total{model,fallback,tier,reason}",
    "{request}",
    "Requests that a cheaper model answered, with the reason of the refusal that they would have got.",
)
SHADOW_REQUESTS = counter(
    "millrace_shadow_requests_total{model,shadow,outcome=same|different|failed|late|dropped}",
    "{request}",
    "Copies for another model, by outcome: same, different, failed, late or dropped. Charged to nobody.",
)
SHADOW_AGREEMENT = histogram(
    "millrace_shadow_agreement_ratio{model,shadow}",
    "1",
    "Share of the longer of both answers up to their first difference.",
    (0.0, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99, 1.0),
)
SHADOW_OUTPUTS = counter(
    "millrace_shadow_outputs_total{model,shadow,side=live|shadow,valid=true|false}",
    "{output}",
    "Constrained answers of both sides (live or shadow), by whether they satisfy their constraint.",
)
SHADOW_PAIRS = counter(
    "millrace_shadow_pairs_total{model,shadow,better=live|shadow|neither}",
    "{pair}",
    "Pairs of answers by which one is whole and satisfies its constraint where the other does not.",
)
SHADOW_TTFT = histogram(
    "millrace_shadow_time_to_first_token_seconds{model,shadow,side}",
    "s",
    "From submission to first token, of answers that were compared.",
    _LATENCY,
)
SHADOW_TPOT = histogram(
    "millrace_shadow_time_per_output_token_seconds{model,shadow,side}",
    "s",
    "Mean time per output token after the first, of answers that were compared.",
    _TOKEN_GAP,
)
SHADOW_COST = counter(
    "millrace_shadow_cost_total{model,shadow,side}",
    "{currency}",
    "What answers that were compared cost, or would have cost.",
)
GUIDED_OUTPUTS = counter(
    "millrace_guided_outputs_total{kind,model,valid=true|false}",
    "{output}",
    "Guided requests that succeeded; valid is inferred from their end (no limit cut them), as each token was "
    "allowed by the grammar. Only where a schema is not wholly enforced, the text is checked.",
)

ROUTE_SHARE = gauge("millrace_route_share_ratio{alias,model}", "1", "Share that a model has of an alias.")
ROUTE_ENGINES = gauge("millrace_route_engines{alias,model}", "{engine}", "Engines that could answer for it.")
ROLLOUT_SILENCE = gauge(
    "millrace_rollout_silence_seconds{alias}",
    "s",
    "Since the last sign of life of whoever watches a rollout.",
)

# Files and batches. What the database tells, every gateway tells: its highest value counts.
BATCHES_RUNNING = gauge(
    "millrace_batches_running{status=validating|in_progress|cancelling|finalizing|paused}",
    "{batch}",
    "Batches that this gateway runs, by status; paused ones wait for room, database or object storage.",
)
BATCHES_ENDED = counter(
    "millrace_batches_ended_total{status=completed|failed|expired|cancelled}",
    "{batch}",
    "Batches that ended, by how.",
)
BATCHES_OLDEST = gauge(
    "millrace_batches_oldest_waiting_seconds", "s", "Age of the oldest batch that no gateway runs; 0 without."
)
BATCH_LINES = counter(
    "millrace_batch_lines_total{tenant,outcome=succeeded|errored|cancelled|expired}",
    "{line}",
    "Lines of batches that came to their end, by what became of them.",
)
BATCH_LINES_RUNNING = gauge(
    "millrace_batch_lines_running", "{line}", "Lines of batches that are under way in this gateway."
)
BATCH_FILE_BYTES = gauge("millrace_batch_file_bytes", "By", "Bytes of all files, as clients see them.")

# Tokenizer service.
TOKENIZER_STAGE_SECONDS = histogram(
    "millrace_tokenizer_stage_seconds{stage}", "s", "render, encode or compile.", _FAST
)
PROMPT_LENGTH = histogram(
    "millrace_prompt_length_tokens", "{token}", "Prompt length of prepared requests.", _COUNT
)
GRAMMAR_COMPILE_SECONDS = histogram(
    "millrace_grammar_compile_seconds{kind}", "s", "Compilation of a grammar that was not cached.", _LATENCY
)
GRAMMAR_LOOKUPS = counter(
    "millrace_grammar_lookups_total{result=hit|miss}", "{lookup}", "Grammar cache, result is hit or miss."
)
GRAMMAR_REFUSALS = counter(
    "millrace_grammar_refusals_total{cause=grammar|time|memory}", "{grammar}", "Grammars refused, by cause."
)
COMPILES_WAITING = gauge(
    "millrace_grammar_compiles_waiting", "{grammar}", "Compilations waiting for a worker."
)

# Engine. The first three, the cache's shape and the adapters are what an endpoint picker scrapes.
REQUESTS_WAITING = gauge("millrace_engine_requests_waiting", "{request}", "Requests in the engine's queue.")
REQUESTS_RUNNING = gauge("millrace_engine_requests_running", "{request}", "Requests in the batch.")
KV_USAGE = gauge(
    "millrace_engine_kv_cache_usage_ratio", "1", "Share of the KV blocks held by requests, 0 to 1."
)
CACHE_INFO = gauge(
    "millrace_engine_cache_info{block_size,num_blocks}",
    "1",
    "Always 1; the labels give the shape of the KV cache.",
)
ADAPTERS_INFO = gauge(
    "millrace_engine_adapters_info{max_lora,running_lora_adapters,waiting_lora_adapters}",
    "s",
    "Unix time of the last change; the labels name the adapters in memory.",
)
OLDEST_WAIT = gauge(
    "millrace_engine_queue_oldest_age_seconds", "s", "Age of the oldest request in the queue."
)
QUEUE_SECONDS = histogram(
    "millrace_engine_queue_seconds{tier}", "s", "Time in the queue, a request.", _LATENCY
)
PREFILL_SECONDS = histogram(
    "millrace_engine_prefill_seconds{tier}", "s", "Time of the prompt, a request.", _LATENCY
)
DECODE_SECONDS = histogram(
    "millrace_engine_decode_seconds{tier}", "s", "Time of the decode steps, a choice.", _DURATION
)
STEP_SECONDS = histogram(
    "millrace_engine_step_seconds{kind}",
    "s",
    "One engine step; kind is prefill, decode, mixed or failed. The sum is for how long the engine was busy.",
    _TOKEN_GAP,
)
ENGINE_SECONDS = counter(
    "millrace_engine_request_seconds_total{use,tier}",
    "s",
    "Seconds of steps, reported with requests' ends; use is prefill, decode, speculative_waste or recompute.",
)
STEP_TOKENS = histogram("millrace_engine_step_tokens", "{token}", "Tokens computed in one step.", _COUNT)
STEP_SEQUENCES = histogram(
    "millrace_engine_step_sequences", "{sequence}", "Sequences in one step.", _COUNT[:12]
)
MODEL_FLOP = counter(
    "millrace_engine_model_flop_total",
    "{operation}",
    "Operations of computed tokens by the model's shapes: two for each weight, and attention's.",
)
MODEL_READ = counter(
    "millrace_engine_model_read_bytes_total",
    "By",
    "Bytes that steps read at least: the weights, and each sequence's keys and values, once.",
)
PEAK = gauge(
    "millrace_engine_peak_per_second{of}",
    "1/s",
    "What the device can do by data sheet or configuration, of flop or read_bytes; absent where unknown.",
)
PENDING_PREFILL = gauge(
    "millrace_engine_pending_prefill_tokens", "{token}", "Prompt tokens not yet computed."
)
PROMPT_TOKENS_DONE = counter(
    "millrace_engine_prompt_tokens_total{source}",
    "{token}",
    "Prompt tokens by source: computed, cached or restored.",
)
GENERATED_TOKENS = counter("millrace_engine_generated_tokens_total{tier}", "{token}", "Tokens generated.")
KV_BLOCKS = gauge("millrace_engine_kv_blocks{state}", "{block}", "Blocks by state: free, cached or used.")
PREFIX_QUERIES = counter("millrace_engine_prefix_cache_queries_total", "{token}", "Prompt tokens looked up.")
PREFIX_HITS = counter("millrace_engine_prefix_cache_hits_total", "{token}", "Prompt tokens found.")
PREEMPTIONS = counter("millrace_engine_preemptions_total", "{sequence}", "Sequences that were preempted.")
RECOMPUTED = counter(
    "millrace_engine_recomputed_tokens_total", "{token}", "Tokens computed again after preemption."
)
EVICTIONS = counter("millrace_engine_evicted_blocks_total", "{block}", "Cached blocks given away.")
OFFLOADED = counter(
    "millrace_engine_offloaded_blocks_total{direction}",
    "{block}",
    "Blocks moved to (out) or from (in) host memory.",
)
DISK_BLOCKS = counter(
    "millrace_engine_disk_blocks_total{event=written|read|damaged|dropped|failed|evicted}",
    "{block}",
    "Blocks of the prefix cache on disk: written, read, found damaged, given away before they were written, "
    "refused by the system, removed to keep the bound.",
)
DISK_BYTES = gauge("millrace_engine_disk_bytes", "By", "What `engine.cache.disk_path` holds, of all models.")
DRAFTED = counter("millrace_engine_drafted_tokens_total{method}", "{token}", "Tokens proposed by drafts.")
ACCEPTED = counter("millrace_engine_accepted_tokens_total{method}", "{token}", "Proposed tokens kept.")
SPECULATION_SECONDS = counter(
    "millrace_engine_speculation_seconds_total{kind=saved|spent,method}",
    "s",
    "Plain steps that accepted drafts stood for, and what drafts took: made, and steps longer by them.",
)
GRAMMAR_SECONDS = counter("millrace_engine_grammar_seconds_total", "s", "Time spent on grammar masks.")
ENGINE_CANCELLED = counter(
    "millrace_engine_cancelled_total{reason}", "{request}", "Requests cancelled, by reason."
)
DELAYED_SECONDS = counter(
    "millrace_engine_delayed_seconds_total{cause,tier}", "s", "Time that requests lost, by cause."
)
STEP_FAILURES = counter(
    "millrace_engine_step_failures_total", "{request}", "Requests that a failed step ended."
)
FAILED_STEPS = counter(
    "millrace_engine_failed_steps_total",
    "{step}",
    "Steps that failed as a whole; their sequences run again in halves.",
)
ISOLATED = counter(
    "millrace_engine_isolated_requests_total",
    "{request}",
    "Requests ended alone because their own step or numbers fail.",
)
STEP_HALVINGS = counter(
    "millrace_engine_step_halvings_total", "{cut}", "Steps, and parts of them, cut in two for want of memory."
)
STARTUP_SECONDS = gauge(
    "millrace_engine_startup_seconds{stage}",
    "s",
    "What each stage of the core's start-up took: loading, measuring, compiling, capturing.",
)
MEMORY_PLAN = gauge(
    "millrace_engine_memory_plan_bytes{part}",
    "By",
    "The memory plan: weights, workspace, headroom, kv_cache, adapter; and what is really resident.",
)

MEMORY_USED = gauge(
    "millrace_engine_memory_used_bytes{part}",
    "By",
    "What parts of the memory plan really take: weights, kv_cache (written blocks), workspace (peak).",
)

# Every service.
BUILD_INFO = gauge(
    "millrace_build_info{service,version,model}", "1", "Always 1; the labels name service, version and model."
)
CONFIGURATION_INFO = gauge(
    "millrace_gateway_configuration_info{sha256}",
    "1",
    "Always 1; the label is of the configuration file that the gateway was started with.",
)
SPANS_STORED = counter("millrace_spans_stored_total", "{span}", "Spans written to the local store.")
SPANS_DROPPED = counter(
    "millrace_spans_dropped_total", "{span}", "Spans lost because the local store was behind."
)

# Metrics that the Kubernetes Gateway API Inference Extension's endpoint picker reads (model server protocol).
INFERENCE_EXTENSION: Mapping[str, Metric] = {
    "TotalQueuedRequests": REQUESTS_WAITING,
    "TotalRunningRequests": REQUESTS_RUNNING,
    "KVCacheUtilization": KV_USAGE,
    "CacheInfo": CACHE_INFO,
    "LoraInfo": ADAPTERS_INFO,
}
