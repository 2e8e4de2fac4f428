"""The types of every table that the gateway owns: [gateway], [tiers], [tenants], [keys] and [envoy].

`gateway.settings` decodes and cross-checks them. A limit that is not set does not apply.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, TypeAlias, get_args

import msgspec

from contract.retention import FULL, POLICIES, RECOMPUTE, Beyond, Retention, RetentionPolicy
from runtime.errors import ConfigError

PositiveInt = Annotated[int, msgspec.Meta(ge=1)]
PositiveFloat = Annotated[float, msgspec.Meta(gt=0)]
NonNegativeFloat = Annotated[float, msgspec.Meta(ge=0)]
_Share = Annotated[float, msgspec.Meta(gt=0, le=1)]

# Ways to think longer about one answer (`test_time` of a request).
StrategyName: TypeAlias = Literal[
    "best_of", "self_consistency", "deepconf", "escalate", "critique_revise", "search"
]
STRATEGIES: tuple[StrategyName, ...] = get_args(StrategyName)
# Tier and tenant of an installation that configures none.
DEFAULT_TIER = "standard"
DEVELOPMENT_TENANT = "development"
_MIN_STORE_KEY = 32


class LimitsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[gateway.limits]`: where counters live and what happens when that place is lost."""

    # "" counts in this process; redis://host:port/db (or rediss://, unix://) shares counters among gateways.
    store: str = ""
    # Redis lost: "closed" refuses what needs a counter; "local_share" lets this process count alone, against
    # every limit divided by `expected_gateways`.
    on_store_loss: Literal["closed", "local_share"] = "closed"
    # Gateway processes that share the limits; the divisor of "local_share".
    expected_gateways: PositiveInt = 1
    # Longest time that one request waits for the store, in milliseconds.
    store_timeout_ms: PositiveInt = 250
    # A concurrency slot whose gateway died is free again after this many seconds.
    lease_ttl_s: PositiveFloat = 30.0
    # Completion tokens reserved when a request does not bound its answer.
    default_completion_tokens: PositiveInt = 1024


class LedgerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[gateway.ledger]`: where usage and cost are kept."""

    # SQLAlchemy URL (sqlite:///path, postgresql+psycopg://...); "" keeps no ledger.
    url: str = "sqlite:///.millrace/ledger.sqlite"
    # Folder for what is open, from which another gateway writes what a killed one could not; all that share
    # it share the ledger. "" is beside an SQLite file, and keeps nothing for other databases.
    journal: str = ""
    # Entries are written at least this often, in seconds ...
    flush_interval_s: PositiveFloat = 0.2
    # ... or as soon as this many are waiting, whichever comes first.
    flush_entries: PositiveInt = 512
    # Entries that may wait for a slow database before the oldest are dropped (counted and logged).
    max_waiting_entries: PositiveInt = 100_000


class RolloutConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[gateway.rollout]`: where `millrace rollout` sets the weights of `[routes]`."""

    # SQLAlchemy URL, the same for all gateways; "" is the ledger's.
    url: str = ""
    # A change is in force after at most so long, in seconds. Nothing is asked where there are no [routes].
    interval_s: PositiveFloat = 0.5


class StoreConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[gateway.store]`: responses and conversations of `/v1/responses` that are kept, encrypted."""

    # Tenants whose responses may be kept; "*" is every one. Empty keeps nothing.
    tenants: tuple[str, ...] = ()
    # SQLAlchemy URL (sqlite:///path, postgresql+psycopg://...), the same for all gateways.
    url: str = "sqlite:///.millrace/store.sqlite"
    # Key that everything is encrypted with, any text of 32 or more characters, the same for all gateways;
    # or a file with one key a line, which wins: the first one encrypts, all of them decrypt.
    key: str = ""
    key_file: str = ""
    # What was not used for so long is deleted.
    retention_days: PositiveFloat = 30.0
    # Bytes kept of each tenant. Beyond them the responses that were not used for longest are deleted;
    # conversations are not.
    max_bytes: PositiveInt = 1024 * 1024 * 1024
    # How often what has expired is looked for, in seconds.
    sweep_interval_s: PositiveFloat = 60.0
    # A background response whose gateway has not written for so long is taken over by another one.
    lease_s: Annotated[float, msgspec.Meta(ge=0.5)] = 10.0

    def secrets(self) -> tuple[str, ...]:
        """The keys, the one that encrypts first; raises ConfigError for none, or too short a one."""
        return _secrets("gateway.store", self.key, self.key_file)


def _secrets(table: str, key: str, key_file: str) -> tuple[str, ...]:
    lines = [key]
    if key_file:
        try:
            lines = Path(key_file).read_text(encoding="utf-8").splitlines()
        except OSError as error:
            raise ConfigError(f"{table}.key_file: {error}") from error
    keys = tuple(filter(None, map(str.strip, lines)))
    if not keys or any(len(key) < _MIN_STORE_KEY for key in keys):
        raise ConfigError(
            f"{table}.key: what is stored is encrypted with a key of at least "
            f"{_MIN_STORE_KEY} characters; put one into the file {table}.key_file "
            "(openssl rand -base64 32), the same for every gateway"
        )
    return keys


class ObjectStorageConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[gateway.batches.s3]`: files in object storage that speaks S3's protocol."""

    # "" keeps files in the directory, where what is under way is in any case.
    bucket: str = ""
    # Objects' names begin with it.
    prefix: str = ""
    # URL of the storage, http:// for one without TLS; "" is AWS's own of the region.
    endpoint: str = ""
    region: str = ""
    # Both, or a file with each on a line of its own, which wins. Without them they are looked for as AWS's
    # own programs do: environment, web identity, the machine's role.
    access_key_id: str = ""
    secret_access_key: str = ""
    credentials_file: str = ""

    def credentials(self) -> dict[str, str]:
        """Those that are configured, none where AWS's own way finds them; raises ConfigError."""
        lines = [self.access_key_id, self.secret_access_key]
        if self.credentials_file:
            try:
                lines = Path(self.credentials_file).read_text(encoding="utf-8").split()
            except OSError as error:
                raise ConfigError(f"gateway.batches.s3.credentials_file: {error}") from error
        if not any(lines):
            return {}
        if len(lines) != 2 or not all(lines):
            raise ConfigError(
                "gateway.batches.s3.access_key_id: an id and its secret_access_key go together; give both, "
                "or name a credentials_file with each on a line of its own"
            )
        return {"access_key_id": lines[0], "secret_access_key": lines[1]}


class BatchesConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[gateway.batches]`: `/v1/files` and `/v1/batches`, whose lines run in what capacity is left."""

    # Folder of the files and of what is under way, the same for all gateways; "" serves neither files nor
    # batches.
    directory: str = ""
    # SQLAlchemy URL of what is known of them, the same for all gateways; "" is an SQLite file in the folder.
    url: str = ""
    # Bytes of one file, and of all files of a tenant; and how many of them it may have.
    max_file_bytes: PositiveInt = 512 * 1024 * 1024
    max_bytes: PositiveInt = 16 * 1024 * 1024 * 1024
    max_files: PositiveInt = 10_000
    # Lines of one batch, and batches of a tenant that have not ended.
    max_lines: PositiveInt = 1_000_000
    max_batches: PositiveInt = 100
    # Lines that are under way at a time for each engine that serves their models, where nobody else asks.
    max_in_flight: PositiveInt = 32
    # Batches pause while the folder's disk has less room than this; what ends one may use it.
    min_free_bytes: Annotated[int, msgspec.Meta(ge=0)] = 64 * 1024 * 1024
    # Files whose upload names no time, and batches that have ended, are deleted after it.
    retention_days: PositiveFloat = 30.0
    # How often what has expired is looked for, in seconds.
    sweep_interval_s: PositiveFloat = 60.0
    # A batch whose gateway has not written for so long is gone on with by another one.
    lease_s: Annotated[float, msgspec.Meta(ge=0.5)] = 10.0
    # Key that files, results and what batches say of themselves are encrypted with, of the form of
    # gateway.store.key; "" leaves them plain.
    key: str = ""
    key_file: str = ""
    s3: ObjectStorageConfig = ObjectStorageConfig()

    def secrets(self) -> tuple[str, ...]:
        """The keys, the one that encrypts first, none where nothing is encrypted; raises ConfigError."""
        return _secrets("gateway.batches", self.key, self.key_file) if self.key or self.key_file else ()


class PriceConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[gateway.prices.<model>]`: currency units per million tokens. The model "*" is the default."""

    prompt: NonNegativeFloat = 0.0
    cached_prompt: NonNegativeFloat = 0.0
    completion: NonNegativeFloat = 0.0
    # Cost of an hour of an engine to you, in currency units: `millrace usage` shows the share of it that
    # requests took beside what they were charged. Nobody is charged by it.
    engine_hour: NonNegativeFloat = 0.0


class RoutingConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[gateway.routing]`: how an engine is chosen."""

    policy: Literal["prefix", "least_pending"] = "prefix"
    # Prompts of at least this many uncached tokens use the engines of the long lane, if any; 0 is off.
    long_prompt_tokens: Annotated[int, msgspec.Meta(ge=0)] = 0
    # Engines that serve long prompts only: addresses, or pools that engines name (`engine.pool`).
    long_lane: tuple[str, ...] = ()
    # An engine may hold this many more pending tokens than the least loaded one before a prefix hit on it
    # is no longer worth the wait.
    prefix_imbalance_tokens: Annotated[int, msgspec.Meta(ge=0)] = 4096
    # Prompts of at least this many uncached tokens are computed by an engine of role = "prefill" and answered
    # by one of role = "decode", where there are both and forecasts say that it pays; 0 is never.
    split_tokens: Annotated[int, msgspec.Meta(ge=0)] = 1024
    # Gateways hear from engines of one in so many cached blocks: memory and messages of large fleets shrink
    # by as much, and a prefix is known up to the last block that was heard of. 1 is all.
    prefix_sample: Annotated[int, msgspec.Meta(ge=1, le=1024)] = 1
    # Engines that are compared for a request, where more take it: those that seem to hold its beginning, and
    # others by chance. With a long lane all are.
    max_candidates: PositiveInt = 64
    # How often a stream whose engine died is resumed on another one.
    max_continuations: Annotated[int, msgspec.Meta(ge=0)] = 3
    # How long such a stream waits for an engine when none is attached.
    continuation_wait_s: PositiveFloat = 5.0


class AutoscalingConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[gateway.autoscaling]`: how many engines are wanted (`millrace_engines_wanted`); others start them."""

    # Seconds from the decision for one more engine to its readiness: so far ahead is looked.
    load_s: PositiveFloat = 120.0
    # Part of what engines can do that is planned for; the rest is for what no forecast sees.
    utilization: Annotated[float, msgspec.Meta(gt=0, le=1)] = 0.8
    # The highest need of so many seconds counts, so that engines do not go between two waves.
    hold_s: PositiveFloat = 600.0
    # No engine is wanted after so many seconds without a request.
    idle_s: PositiveFloat = 900.0
    # Gateways are ready though no engine is there: requests are refused with Retry-After, and one is wanted
    # for them. Without it clients do not reach a gateway that has no engine, and nothing is wanted.
    from_zero: bool = False


class RequestConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[gateway.request]`: what one request may hold. More is refused with the field, before it is parsed."""

    # Messages of a conversation; the parts of all of them together, and their tool calls.
    max_messages: PositiveInt = 4096
    max_parts: PositiveInt = 8192
    max_tool_calls: PositiveInt = 4096
    # Functions that the model may call.
    max_tools: PositiveInt = 256
    # Token ids of one field: of a prompt, of those to decode, of those that are allowed or end the answer.
    max_token_ids: PositiveInt = 256 * 1024
    # Values of any other field: numbers, texts, lists and objects, wherever they stand in it.
    max_values: PositiveInt = 64 * 1024
    # Lists and objects inside each other.
    max_depth: PositiveInt = 512
    # Answers that are computed: prompts times the largest of n, best_of and beam_width.
    max_answers: PositiveInt = 256
    # Texts of a request for embeddings, scores or classes; pairs of one for scores.
    max_inputs: PositiveInt = 2048
    # Bytes of large bodies that are read, and of the requests in them until they are answered, counted three
    # times for what is made of them; and of answers with log-probabilities. A tenant may have as much as is
    # left free after it: half of this, where no other has any.
    max_held_bytes: PositiveInt = 104 * 1024 * 1024
    # Tokens, and log-probabilities with their alternatives, that an answer may be ahead of its client beyond
    # what is on the way to it; and all answers of a tenant together. Then the answer is ended.
    max_unread: PositiveInt = 32 * 1024
    max_unread_of_tenant: PositiveInt = 256 * 1024
    # Log-probabilities, alternatives included, of answers that are chosen among more at their end; those
    # whose length was not asked for end there.
    max_ranked_logprobs: PositiveInt = 128 * 1024
    # Refusals sent to a tenant a second, and at once as many more; further ones wait, up to a second.
    refusals_per_s: PositiveInt = 100


DEFAULT_REQUEST_LIMITS = RequestConfig()


class SocketConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[gateway.socket]`: WebSockets of `/v1/responses`."""

    # A socket that has been open for so long is closed once no response of it is under way.
    lifetime_s: PositiveFloat = 3600.0
    # Sockets that a tenant may have open at one gateway.
    max_of_tenant: PositiveInt = 256
    # Messages of one socket that wait for the end of a response; more are refused.
    max_waiting: PositiveInt = 16


DEFAULT_SOCKETS = SocketConfig()


class EffortsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[gateway.efforts]`: what a request with this `reasoning_effort` may think, as a share of the tier's
    max_thinking_tokens, or of what its max_tokens leave beside the answer's room. Holds for models whose
    template does not read the effort.
    """

    minimal: _Share = 0.1
    low: _Share = 0.2
    medium: _Share = 0.5
    high: _Share = 0.8
    xhigh: _Share = 0.95
    max: _Share = 1.0


class GatewayConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[gateway]`: one gateway process."""

    # gRPC face, ext_authz and rate limit services.
    grpc_listen: str = "127.0.0.1:50051"
    # OpenAI HTTP face.
    http_listen: str = "127.0.0.1:8000"
    # Prometheus metrics; "" is off.
    metrics_listen: str = ""
    # Address of the tokenizer service.
    tokenizer: str = "127.0.0.1:50061"
    # Addresses of the engines. Used with discovery "static".
    engines: tuple[str, ...] = ("127.0.0.1:50071",)
    # "static", "dns:<host>:<port>" (every A/AAAA record is an engine) or "file:<path>" (one address a line).
    # A name without records, or a file without addresses or with something else, changes nothing.
    discovery: str = "static"
    discovery_interval_s: PositiveFloat = 5.0
    # Socket of the supervisor that loads models with load = "on demand"; `millrace up` sets it.
    loader: str = ""
    # After SIGTERM health is NOT_SERVING, and requests are still taken for as long as Envoy needs to notice.
    drain_notice_s: NonNegativeFloat = 0.0
    # Streams in flight may go on for this long after that.
    drain_limit_s: PositiveFloat = 30.0
    # Largest request body. Envoy refuses larger ones by their declared length, the gateway by what arrives.
    max_body_bytes: PositiveInt = 16 * 1024 * 1024
    # Largest message to the gRPC face, which refuses a larger one before it is taken. The longest prompt
    # (tokenizer.limits.max_prompt_bytes) fits with what stands around it; JSON needs more for the same.
    max_message_bytes: PositiveInt = 10 * 1024 * 1024
    request: RequestConfig = DEFAULT_REQUEST_LIMITS
    socket: SocketConfig = DEFAULT_SOCKETS
    efforts: EffortsConfig = EffortsConfig()
    # Tenants whose keys may change what is served, such as adapters. The development key's tenant may, too.
    admin_tenants: tuple[str, ...] = ()
    # Tier of tenants that name none.
    default_tier: str = DEFAULT_TIER
    limits: LimitsConfig = LimitsConfig()
    ledger: LedgerConfig = LedgerConfig()
    rollout: RolloutConfig = RolloutConfig()
    store: StoreConfig = StoreConfig()
    batches: BatchesConfig = BatchesConfig()
    routing: RoutingConfig = RoutingConfig()
    autoscaling: AutoscalingConfig = AutoscalingConfig()
    prices: dict[str, PriceConfig] = msgspec.field(default_factory=dict)


class DeliberationConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[tiers.<name>.test_time]`: requests that choose one answer among several samples. Without it
    `test_time` is refused.
    """

    # Those that requests may name.
    strategies: tuple[StrategyName, ...] = STRATEGIES
    # Samples of one request at most.
    max_samples: Annotated[int, msgspec.Meta(ge=2, le=128)] = 8
    # Generated tokens of all samples of a request: the limit of those that name a budget, and the budget of
    # those that name none.
    max_budget_tokens: PositiveInt | None = None


class RetentionConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[tiers.<name>.kv]`: what answers may forget of their keys and values."""

    # Those that requests may name.
    policies: tuple[RetentionPolicy, ...] = POLICIES
    # Of requests that name none: "full" forgets nothing, the others have one of the numbers below. Models
    # that can forget nothing are served as with "full".
    policy: RetentionPolicy = FULL
    # Part of the prompt's tokens that are kept at a time.
    keep: float | None = None
    # The same as a number of tokens.
    window_tokens: int | None = None
    # The least that requests may ask for.
    min_keep: float | None = None
    min_window_tokens: PositiveInt | None = None
    # Share of its attention that an answer may lose by that, on average over its tokens: that of requests
    # that name none, and the most that they may name. What it lost at most is measured then, and reported;
    # steps take longer for all by that, so without it no request may ask for it.
    max_lost: float | None = None
    # What becomes of an answer that would lose more: "recompute" computes it anew with all of its keys and
    # values, and it goes on so; "refuse" ends it with an error.
    beyond: Beyond = RECOMPUTE

    @property
    def default(self) -> Retention:
        """What holds for requests that ask for nothing."""
        return Retention(
            policy=self.policy,
            keep=self.keep,
            window_tokens=self.window_tokens,
            max_lost=None if self.policy == FULL else self.max_lost,
            beyond=self.beyond,
            if_possible=True,
        )


class TierConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[tiers.<name>]`: one service level, promised to every request under it."""

    # OpenAI's word for it: requests may ask for the tier by it as well, and answers of the OpenAI API say it.
    # Clients that know OpenAI's words alone read no other. "" says the tier's own name.
    openai_name: Literal["", "default", "flex", "priority", "scale"] = ""
    # A higher number is served first.
    priority: Annotated[int, msgspec.Meta(ge=-1000, le=1000)] = 0
    # Fair-share weight, multiplied with the tenant's.
    weight: PositiveFloat = 1.0
    # Time to first token and time per output token that goodput is judged by. Our own engine's steps are made
    # short enough for the latter, as far as they can be.
    ttft_target_ms: PositiveInt | None = None
    tpot_target_ms: PositiveInt | None = None
    # "guaranteed": a request whose first token is expected later than ttft_target_ms is refused at once, with
    # Retry-After. "best_effort": it is taken, and comes late.
    admission: Literal["guaranteed", "best_effort"] = "guaranteed"
    # The same for this time, whatever `admission` says: longest expected time to the first token.
    queue_limit_ms: PositiveInt | None = None
    # Engines with this `engine.pool` alone serve the tier; "" takes every engine.
    pool: str = ""
    # Streams of the whole tier at a time, counted as max_concurrent_streams of tenants.
    max_concurrency: PositiveInt | None = None
    # Prompt plus completion.
    max_context_tokens: PositiveInt | None = None
    # What a choice may think at most: the budget of requests that name none, and of those that ask for more.
    max_thinking_tokens: PositiveInt | None = None
    # Model that answers where this one would be refused for its load ("*": any other one).
    fallback: dict[str, str] = {}
    test_time: DeliberationConfig | None = None
    kv: RetentionConfig = RetentionConfig()

    @property
    def accepted_within_ms(self) -> int | None:
        """Expected time to the first token up to which a request is accepted; None accepts any."""
        target = self.ttft_target_ms if self.admission == "guaranteed" else None
        return min((each for each in (target, self.queue_limit_ms) if each is not None), default=None)


class LimitValues(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits of one tenant or key; None does not limit."""

    requests_per_minute: PositiveInt | None = None
    # Prompt plus completion tokens, those of candidates (best_of) and beams that are not returned included;
    # so are they in both monthly limits.
    tokens_per_minute: PositiveInt | None = None
    # Sequences that are computed at a time: a request has its prompts times the largest of n, best_of and
    # beam_width.
    max_concurrent_streams: PositiveInt | None = None
    # Tokens per calendar month (UTC).
    monthly_tokens: PositiveInt | None = None
    # Currency units per calendar month (UTC), by `[gateway.prices]`.
    monthly_budget: PositiveFloat | None = None


class Limited(LimitValues, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What has limits among its settings."""

    @property
    def limits(self) -> LimitValues:
        """The limits alone."""
        return LimitValues(**{name: getattr(self, name) for name in LimitValues.__struct_fields__})


class TenantConfig(Limited, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[tenants.<name>]`: who pays, and what was agreed with them."""

    # Tier of requests that ask for none; `gateway.default_tier` when empty.
    tier: str = ""
    # Further tiers that requests may ask for by `service_tier`.
    allowed_tiers: tuple[str, ...] = ()
    # Empty allows every model.
    allowed_models: tuple[str, ...] = ()
    # Fair-share weight inside the tier.
    weight: PositiveFloat = 1.0
    # Share cached prefixes with other tenants that do so too (their timing can then tell what was asked).
    cache_shared: bool = False
    # The tenant has consented that `millrace distill export` writes its stored responses as training data.
    training_data: bool = False


class KeyEntry(Limited, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One of `[[keys.entries]]`: an API key, known by its hash. Its limits apply beside its tenant's."""

    # Public name of the key in logs, metrics and the ledger.
    id: str
    tenant: str
    # "sha256:" and the lower-case hex SHA-256 of the key.
    hash: str
    disabled: bool = False
    # Seconds since the Unix epoch after which the key is refused.
    expires_unix_s: PositiveInt | None = None
    # Narrows the tenant's models; empty does not.
    allowed_models: tuple[str, ...] = ()
    # Tier instead of the tenant's; must be one of those that the tenant may use.
    tier: str = ""


class JwtConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[keys.jwt]`: tokens of an identity provider, verified by Envoy's jwt_authn filter."""

    # `iss` that tokens must carry; "" turns JWT off.
    issuer: str = ""
    # `aud` values of which a token must carry one; empty accepts every audience.
    audiences: tuple[str, ...] = ()
    # Keys of the issuer: a file in JWKS form, which Envoy reads when it starts, or the URL that serves one,
    # which it asks again. Exactly one of the two.
    jwks_file: str = ""
    jwks_url: str = ""
    # How long keys from `jwks_url` are kept.
    jwks_cache_s: PositiveInt = 300
    # Claim that names the tenant, and the one that names the tier ("" ignores it).
    tenant_claim: str = "tenant"
    tier_claim: str = ""
    # From the tenant claim's values to names in [tenants]; values that are not listed are taken as they are.
    tenants: dict[str, str] = msgspec.field(default_factory=dict)


class KeysConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[keys]`: who may come in."""

    entries: tuple[KeyEntry, ...] = ()
    # SQLite file or SQLAlchemy URL that `millrace keys` writes; read besides `entries`. "" uses those alone.
    store: str = ""
    # A key created or revoked in `store` takes effect after at most this long.
    refresh_interval_s: PositiveFloat = 2.0
    # Keys from a store that cannot be read are believed for this long; then only `entries` are.
    max_staleness_s: PositiveFloat = 300.0
    # Hash of the key for local development; accepted only while every listener is on loopback.
    development_hash: str = ""
    development_tenant: str = DEVELOPMENT_TENANT
    jwt: JwtConfig = JwtConfig()


class EnvoyConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[envoy]`: the edge."""

    listen: str = "127.0.0.1:8080"
    # Envoy's admin interface; keep it on loopback.
    admin: str = "127.0.0.1:9901"
    # Shows /ready and /metrics (Prometheus) of the admin interface and nothing else; "" is off.
    metrics_listen: str = ""
    # PEM files that make `listen` speak TLS; plain text when empty.
    tls_certificate: str = ""
    tls_key: str = ""
    # Authority whose client certificates are demanded; "" demands none.
    tls_client_ca: str = ""
    # Origins of pages that may call from a browser ("https://chat.example.com"; "*" is every one).
    cors_origins: tuple[str, ...] = ()
    # Path of the JSON access log; "" writes none.
    access_log: str = "/dev/stdout"
    # Gateway processes to balance over; those of [gateway] when empty.
    gateway_grpc: tuple[str, ...] = ()
    gateway_http: tuple[str, ...] = ()
    # Worker threads; 0 is one per core.
    concurrency: Annotated[int, msgspec.Meta(ge=0)] = 2
    connect_timeout_s: PositiveFloat = 1.0
    # Longest time for ext_authz and for the rate limit service to answer; the request is refused after it.
    authorization_timeout_ms: PositiveInt = 5000
    # A stream on which neither side sent a byte for this long is reset.
    stream_idle_timeout_s: PositiveFloat = 600.0
    # A client must have sent its whole request header within this time.
    request_headers_timeout_s: PositiveFloat = 10.0
    # A client must have sent its whole request within this time, or the answer must have begun.
    request_timeout_s: PositiveFloat = 60.0
    # Requests a second, of all clients together, for what needs no key: /health, /openapi.json, gRPC's
    # health check and the page at /ui, of each as many.
    public_requests_per_second: PositiveInt = 200
    # A client connection without a request is closed after this long.
    idle_timeout_s: PositiveFloat = 3600.0
    # Streams in flight may go on for this long when Envoy stops.
    drain_time_s: PositiveInt = 30
    max_connections: PositiveInt = 20_000
    max_requests: PositiveInt = 20_000
    # HTTP/2 streams per client connection.
    max_concurrent_streams: PositiveInt = 1024
    # Envoy sheds load when its heap comes near this many bytes.
    max_heap_bytes: PositiveInt = 1024 * 1024 * 1024
    # Believe x-forwarded-for of this many proxies in front of Envoy.
    trusted_hops: Annotated[int, msgspec.Meta(ge=0)] = 0
    # Share of requests that are traced, in per cent.
    trace_sampling_percent: Annotated[float, msgspec.Meta(ge=0, le=100)] = 100.0
    # Whether a client's traceparent says if its request is traced. Off: any client could hide its requests
    # from who looks for a fault, or have all of them kept.
    clients_decide_traces: bool = False
