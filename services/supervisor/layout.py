"""Which processes make a stack, on which addresses, with which settings."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from checkpoint.files import expanded
from runtime import tls
from runtime.addresses import is_this_machine, join
from runtime.config import (
    MODELS_FILE_VARIABLE,
    HealthConfig,
    ModelConfig,
    SecurityConfig,
    load_section,
    read_tables,
)
from runtime.errors import ConfigError
from runtime.models import Models
from runtime.resources import num_cores
from services.compiler import find_compiler
from services.supervisor.config import (
    DEFAULT_CONFIG,
    Options,
    SupervisorConfig,
    development_key,
    kept_secret,
)
from services.supervisor.edge import envoy_binary
from services.supervisor.models import environment_of, resolve_models, write_engines, write_models
from services.supervisor.ports import can_bind, free_ports, require_free
from services.supervisor.process import ProcessSpec

_LOOPBACK = "127.0.0.1"
# There where drivers for GPUs are: NVIDIA's, the same under WSL 2, and AMD's.
_DRIVERS = tuple(map(Path, ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")))
# How often gateways look for engines that came or went.
_DISCOVERY_INTERVAL_S = 0.5
# The kernel's limit is 107.
_SOCKET_PATH_BYTES = 100
# Envoy leaves at once when told to: the stack waits for requests in flight before it does so.
_EDGE_STOP_LIMIT_S = 2.0


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Everything that is decided before the first process starts."""

    config: Path | None
    settings: SupervisorConfig
    # Overrides that every process gets.
    environment: Mapping[str, str]
    # Where the edge listens.
    edge: str
    # "https" where the edge has a certificate.
    scheme: str
    edge_admin: str
    api_key: str
    models: Models
    # Database of the local span store; empty when spans go elsewhere.
    trace_store: str
    state_directory: Path
    # After so much silence a process counts as dead.
    silence_limit_s: float
    envoy_config: Path
    collector: ProcessSpec | None
    tokenizer: ProcessSpec
    engines: tuple[ProcessSpec, ...]
    gateways: tuple[ProcessSpec, ...]
    envoy: ProcessSpec
    # Settings that work and are probably a mistake.
    warnings: tuple[str, ...] = ()
    # Addresses by process name and purpose, for the state file.
    addresses: dict[str, dict[str, str]] = field(default_factory=dict)
    # Another engine for a model, while the stack runs: its name, and what starts it.
    plan_engine: Callable[[int, ModelConfig], ProcessSpec]
    # Engine processes of a model from the start on.
    num_engines: Callable[[ModelConfig], int]
    # Settings of a model's engine, but for its addresses, as its environment has them.
    engine_settings: Callable[[ModelConfig], dict[str, str]]
    # Where gateways ask for models to be loaded.
    loader: Path

    @property
    def model_name(self) -> str:
        """The model that requests ask for if they name none."""
        return next(iter(self.models.models))

    @property
    def model_names(self) -> str:
        """All models, for people."""
        return ", ".join(self.models.models)

    @property
    def engine_models(self) -> dict[str, str]:
        """The model of each engine that starts with the stack, by the names of their processes."""
        names = [
            each.served_name for each in self.models.models.values() for _ in range(self.num_engines(each))
        ]
        return {engine.name: name for engine, name in zip(self.engines, names, strict=True)}

    @property
    def address(self) -> str:
        """Where clients on this machine connect: the edge, or loopback when it listens everywhere."""
        return self.edge.replace("0.0.0.0:", "127.0.0.1:").replace("[::]:", "[::1]:")

    @property
    def processes(self) -> tuple[ProcessSpec, ...]:
        """All of them, in the order in which they are listed."""
        collector = (self.collector,) if self.collector else ()
        return (*collector, self.tokenizer, *self.engines, *self.gateways, self.envoy)


def plan_layout(options: Options, state: Path, environ: Mapping[str, str] = os.environ) -> Layout:
    """Decides addresses and settings; raises ConfigError for whatever cannot work."""
    config = options.config or (DEFAULT_CONFIG if DEFAULT_CONFIG.is_file() else None)
    tables = read_tables(config, environ)
    # Its own questions about health are asked as the services ask one another.
    tls.use(load_section(tables, "security", SecurityConfig))
    return _Planner(options, config, tables, state, environ).plan()


@dataclass
class _Planner:
    options: Options
    config: Path | None
    tables: dict[str, Any]
    state: Path
    environ: Mapping[str, str]
    overrides: dict[str, str] = field(default_factory=dict)
    addresses: dict[str, dict[str, str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._settings = load_section(self.tables, "supervisor", SupervisorConfig)
        self._usual_engines = self.options.engines or self._settings.engines
        self._num_gateways = self.options.gateways or self._settings.gateways
        asked = self._settings.scheduling
        self._is_batch = asked == "batch" or (asked == "auto" and self.options.simulated)

    def plan(self) -> Layout:
        require_free(self.options.host, self.options.port)
        models = self._plan_models()
        engines_of = [
            (model, self._role(number, model))
            for model in models.models.values()
            for number in range(self._num_engines(model))
        ]
        # Of models that are loaded on demand, one computes beside those that are always there.
        num_busy = len(engines_of) + any(each.is_on_demand for each in models.models.values())
        self._num_threads = max(1, num_cores() // max(1, num_busy))
        count = 6 + 2 * len(engines_of) + 3 * self._num_gateways
        first = self._settings.metrics_port
        fixed = {self.options.port, *range(first, first + count)}
        ports = iter(free_ports(count, _LOOPBACK, beside=fixed))
        edge = join(self.options.host, self.options.port or next(ports))
        admin = f"{_LOOPBACK}:{next(ports)}"
        api_key = self._plan_security()
        collector = self._plan_collector(ports)
        tokenizer = self._plan_tokenizer(ports)
        engines = tuple(
            self._plan_engine(index, model, ports, role) for index, (model, role) in enumerate(engines_of)
        )
        self._plan_discovery(engines)
        loader = self._plan_loader()
        gateways = tuple(self._plan_gateway(index, ports) for index in range(self._num_gateways))
        self._plan_edge(edge, admin)
        envoy_config = self.state / "envoy.yaml"
        return Layout(
            config=self.config,
            settings=self._settings,
            environment=self.overrides,
            edge=edge,
            scheme="https" if self.tables.get("envoy", {}).get("tls_certificate") else "http",
            edge_admin=admin,
            api_key=api_key,
            models=models,
            trace_store=self._trace_store if collector else "",
            state_directory=self.state,
            silence_limit_s=load_section(self.tables, "health", HealthConfig).silence_limit_s,
            envoy_config=envoy_config,
            collector=collector,
            tokenizer=tokenizer,
            engines=engines,
            gateways=gateways,
            envoy=self._envoy_spec(envoy_config, admin),
            warnings=self._warnings(),
            addresses=self.addresses,
            plan_engine=self._plan_further_engine,
            num_engines=self._num_engines,
            engine_settings=self._variables_of,
            loader=loader,
        )

    def _num_engines(self, model: ModelConfig) -> int:
        if model.is_on_demand:
            return 0
        return model.engines or self._usual_engines

    def _role(self, number: int, model: ModelConfig) -> str:
        """Of one of a model's engines; "" where the configuration says it. Raises ConfigError."""
        num_prefill, num_engines = self._settings.prefill_engines, self._num_engines(model)
        if not num_prefill:
            return ""
        if num_prefill >= num_engines:
            raise ConfigError(
                f"supervisor.prefill_engines = {num_prefill}: {model.served_name!r} has {num_engines} engines"
                ", one must answer; raise supervisor.engines, or lower it"
            )
        return "prefill" if number < num_prefill else "decode"

    def _plan_further_engine(self, index: int, model: ModelConfig) -> ProcessSpec:
        return self._plan_engine(index, model, iter(free_ports(2, _LOOPBACK)))

    def _warnings(self) -> tuple[str, ...]:
        warnings = []
        # A machine with a GPU computes there.
        on_cpu = not self.options.simulated and not shutil.which("nvidia-smi", path=self.environ.get("PATH"))
        if on_cpu and not find_compiler(self.environ):
            warnings.append(
                "no C++ compiler (g++ or clang++) is installed: unless the native kernels were built before, "
                "torch computes instead, several times slower; install one, or name one with CXX"
            )
        num = self._num_gateways
        if num == 1 or self._configured("gateway.limits.store"):
            return tuple(warnings)
        return (
            *warnings,
            f"gateway.limits.store is not set: each of the {num} gateways counts alone, so that a tenant can "
            f"get up to {num} times its limits; set it to the URL of a Redis that all of them share "
            "(redis://host:port/0), or start one gateway",
        )

    # --- settings that all processes share ---

    def _set(self, key: str, value: object) -> None:
        """Overrides `table.key`, whatever the configuration says."""
        self.overrides[_variable(key)] = _toml(value)

    def _default(self, key: str, value: object) -> None:
        """Sets `table.key` unless the configuration does."""
        if not self._configured(key):
            self._set(key, value)

    def _configured(self, key: str) -> Any:
        value: Any = self.tables
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        return value

    def _plan_models(self) -> Models:
        models = resolve_models(self.options, self.tables, self.environ)
        self.state.mkdir(parents=True, exist_ok=True)
        self.overrides[MODELS_FILE_VARIABLE] = str(write_models(self.state, models, self.tables))
        return models

    def _plan_discovery(self, engines: Sequence[ProcessSpec]) -> None:
        path = write_engines(self.state, [spec.health for spec in engines])
        self._set("gateway.discovery", f"file:{path}")
        self._default("gateway.discovery_interval_s", _DISCOVERY_INTERVAL_S)

    def _plan_loader(self) -> Path:
        path = self.state / "loads.sock"
        if len(os.fsencode(path)) > _SOCKET_PATH_BYTES:
            path = Path(tempfile.mkdtemp(prefix="millrace-")) / path.name
        self._set("gateway.loader", str(path))
        return path

    def _plan_security(self) -> str:
        if not self._configured("security.context_secret_file"):
            # Tenants' prefixes are named by it, and those on disk are to be found after the next start.
            is_kept = bool(self._configured("engine.cache.disk_path"))
            secret = kept_secret(self.state) if is_kept else secrets.token_hex(32)
            self._default("security.context_secret", secret)
        for place, local in (
            ("gateway.ledger.url", f"sqlite:///{self.state / 'ledger.sqlite'}"),
            ("gateway.store.url", f"sqlite:///{self.state / 'store.sqlite'}"),
            ("gateway.batches.directory", str(self.state / "batches")),
            ("keys.store", str(self.state / "keys.sqlite")),
        ):
            # An empty one says that there shall be none.
            if self._configured(place) is None:
                self._set(place, local)
        if not is_this_machine(self.options.host):
            return ""
        key = development_key(self.environ)
        self._default("keys.development_hash", f"sha256:{hashlib.sha256(key.encode()).hexdigest()}")
        return key

    @property
    def _trace_store(self) -> str:
        configured = self._configured("observability.store")
        return str(configured or self.state / "traces.sqlite")

    # --- processes ---

    def _plan_collector(self, ports: Iterator[int]) -> ProcessSpec | None:
        self._default("observability.store", self._trace_store)
        if self._configured("observability.otlp_endpoint"):
            return None
        listen = f"{_LOOPBACK}:{next(ports)}"
        self._set("observability.listen", listen)
        # Beside the receiver that OTEL_* variables name, if they do.
        self._set("observability.store_endpoint", listen)
        self.addresses["collector"] = {"otlp": listen}
        # Exporters of traces bring no certificates.
        spec = self._spec("collector", "observability", {}, health=listen, drain_limit_s=5.0)
        return replace(spec, is_plain=True)

    def _plan_tokenizer(self, ports: Iterator[int]) -> ProcessSpec:
        listen = f"{_LOOPBACK}:{next(ports)}"
        metrics = self._metrics_address(ports)
        self._set("gateway.tokenizer", listen)
        self.addresses["tokenizer"] = {"grpc": listen, "metrics": metrics}
        settings: dict[str, object] = {"tokenizer.listen": listen, "tokenizer.metrics_listen": metrics}
        if self.options.simulated:
            settings["tokenizer.simulated"] = True
        return self._spec("tokenizer", "tokenizer_svc", settings, health=listen)

    def _plan_engine(
        self, index: int, model: ModelConfig, ports: Iterator[int], role: str = ""
    ) -> ProcessSpec:
        name = f"engine-{index}"
        listen = f"{_LOOPBACK}:{next(ports)}"
        metrics = self._metrics_address(ports)
        self.addresses[name] = {"grpc": listen, "metrics": metrics}
        settings: dict[str, object] = {
            "engine.listen": listen,
            "engine.metrics_listen": metrics,
            "engine.drain_limit_s": self._settings.drain_limit_s,
            **self._settings_of(model),
        }
        if role:
            settings["engine.role"] = role
        spec = self._spec(name, "engine", settings, health=listen, num_threads=self._num_threads)
        return replace(spec, niceness=self._niceness())

    def _niceness(self) -> int:
        """Of engines."""
        device = self._configured("engine.device") or "auto"
        has_gpu = device == "cuda" or (device == "auto" and any(each.exists() for each in _DRIVERS))
        return 0 if self.options.simulated or has_gpu else self._settings.engine_niceness

    def _variables_of(self, model: ModelConfig) -> dict[str, str]:
        return {_variable(key): _toml(value) for key, value in self._settings_of(model).items()}

    def _settings_of(self, model: ModelConfig) -> dict[str, object]:
        settings = environment_of(model)
        if model.pool:
            settings["engine.pool"] = model.pool
        if not self._configured("engine.num_threads"):
            settings["engine.num_threads"] = self._num_threads
        if self.options.simulated:
            settings["engine.simulated"] = True
        if self.options.dtype:
            settings["engine.dtype"] = self.options.dtype
        if self.options.max_model_len:
            settings["engine.max_model_len"] = self.options.max_model_len
        if self.options.quantize:
            settings["engine.quantize"] = self.options.quantize
        if self.options.adapters:
            configured = self._configured("engine.adapters.paths") or {}
            settings["engine.adapters.paths"] = configured | _adapters(self.options.adapters)
        return settings | dict(self.options.engine_settings)

    def _metrics_address(self, ports: Iterator[int]) -> str:
        port = next(ports)
        if first := self._settings.metrics_port:
            port = first + sum("metrics" in each for each in self.addresses.values())
            if not can_bind(_LOOPBACK, port):
                raise ConfigError(
                    f"supervisor.metrics_port: another program uses {_LOOPBACK}:{port}; set another first "
                    "port, or 0 for free ones"
                )
        return f"{_LOOPBACK}:{port}"

    def _plan_gateway(self, index: int, ports: Iterator[int]) -> ProcessSpec:
        name = f"gateway-{index}"
        grpc, http = (f"{_LOOPBACK}:{next(ports)}" for _ in range(2))
        metrics = self._metrics_address(ports)
        self.addresses[name] = {"grpc": grpc, "http": http, "metrics": metrics}
        settings: dict[str, object] = {
            "gateway.grpc_listen": grpc,
            "gateway.http_listen": http,
            "gateway.metrics_listen": metrics,
            "gateway.drain_limit_s": self._settings.drain_limit_s,
        }
        return self._spec(name, "gateway", settings, health=grpc)

    def _plan_edge(self, edge: str, admin: str) -> None:
        gateways = [self.addresses[f"gateway-{index}"] for index in range(self._num_gateways)]
        self._set("envoy.listen", edge)
        self._set("envoy.admin", admin)
        self._default("envoy.access_log", str(self.state / "logs" / "access.log"))
        self._set("envoy.gateway_grpc", [addresses["grpc"] for addresses in gateways])
        self._set("envoy.gateway_http", [addresses["http"] for addresses in gateways])
        self._set("gateway.limits.expected_gateways", self._num_gateways)
        self.addresses["envoy"] = {"listen": edge, "admin": admin}

    def _envoy_spec(self, envoy_config: Path, admin: str) -> ProcessSpec:
        argv = (
            *(str(envoy_binary()), "--config-path", str(envoy_config)),
            *("--concurrency", str(self._configured("envoy.concurrency") or min(2, num_cores()))),
            # Several stacks may run on one machine.
            *("--disable-hot-restart", "--log-level", "warning"),
        )
        return ProcessSpec(
            name="envoy",
            argv=argv,
            health_url=f"http://{admin}/ready",
            says_ready=False,
            drain_limit_s=_EDGE_STOP_LIMIT_S,
            is_batch=self._is_batch,
        )

    def _spec(
        self,
        name: str,
        module: str,
        settings: Mapping[str, object],
        *,
        health: str = "",
        num_threads: int = 1,
        drain_limit_s: float | None = None,
    ) -> ProcessSpec:
        # -P keeps the working directory from hiding the suite's packages.
        config = ("--config", str(self.config)) if self.config else ()
        own = {_variable(key): _toml(value) for key, value in settings.items()}
        return ProcessSpec(
            name=name,
            argv=(sys.executable, "-P", "-m", module, *config),
            environment={"OMP_NUM_THREADS": str(num_threads), **own},
            health=health,
            drain_limit_s=self._settings.drain_limit_s if drain_limit_s is None else drain_limit_s,
            is_batch=self._is_batch,
        )


def _variable(key: str) -> str:
    return "MILLRACE_" + key.upper().replace(".", "__")


def _adapters(asked: Sequence[str]) -> dict[str, str]:
    """Folders by name, of NAME=PATH each."""
    found = {}
    for each in asked:
        name, is_named, path = each.partition("=")
        if not (name and is_named and path):
            raise ConfigError(f"--adapter {each}: give it as NAME=PATH")
        if name in found:
            raise ConfigError(f"--adapter {each}: another adapter has the name {name!r} already")
        found[name] = str(expanded(path).resolve())
    return found


def _toml(value: object) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_toml(key)} = {_toml(each)}" for key, each in value.items()) + "}"
    # JSON's texts, numbers, booleans and lists are TOML's as well.
    return json.dumps(value, ensure_ascii=False)
