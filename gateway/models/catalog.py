"""The models that are served now, by every name that a client may ask for."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping

import msgspec

from contract.engines import EngineInfo
from contract.errors import MillraceError, Reason, invalid
from gateway.engines.fleet import Fleet
from gateway.models.routes import SetRoute, pick, sticky_key
from gateway.text.detokenizer import Vocabulary
from gateway.tiers import Tiers
from gateway.types.request import Identity
from runtime.config import ModelConfig
from runtime.models import ADAPTER_SEPARATOR, Models

MAX_MODEL_NAME = 256


class ServedModel:
    """One version of a model."""

    def __init__(self, config: ModelConfig, vocabulary: Vocabulary) -> None:
        self.config = config
        self.name = config.served_name
        self.revision = config.served_revision
        # The name by which engines and the tokenizer service know the model.
        self.key = config.key
        self.vocabulary = vocabulary
        self.created_unix_s = int(time.time())


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """What a request is sent to."""

    served: ServedModel
    # Name of the model in the answer: that of the model that answers, as the client asked for it.
    told: str
    # LoRA adapter; "" for the base model.
    adapter: str = ""


class Catalog:
    """Finds what a name stands for. A version takes another's place when an engine serves it."""

    def __init__(self, models: Models, tiers: Tiers, *, from_zero: bool = False) -> None:
        """`from_zero`: models can be asked that no engine serves, so that one is started for them."""
        self.models = models
        self._from_zero = from_zero
        self._tiers = tiers
        # By name.
        self._served: dict[str, ServedModel] = {}
        self._pending: dict[str, ServedModel] = {}
        # By alias: what rollouts have set.
        self._set_routes: Mapping[str, SetRoute] = {}
        # Why a model is not served yet.
        self.failures: dict[str, str] = {}
        # Set once: engines are attached as this says.
        self.fleet: Fleet = None  # type: ignore[assignment]

    # --- what is served ---

    @property
    def served(self) -> Mapping[str, ServedModel]:
        """Models with a vocabulary, by name."""
        return self._served

    @property
    def ready(self) -> bool:
        """Whether some model can be asked."""
        return bool(self.askable)

    @property
    def askable(self) -> set[str]:
        """Versions that requests are sent to."""
        return {each.key for each in self._served.values() if self._may_ask(each)}

    @property
    def complete(self) -> bool:
        """Whether every model can be asked that could be loaded."""
        wanted = [name for name in self.models.models if name not in self.failures]
        return all(name in self._served and self._may_ask(self._served[name]) for name in wanted)

    def _may_ask(self, served: ServedModel) -> bool:
        """Whether requests for it are taken: an engine has it, or will when it is asked for."""
        return self._from_zero or served.config.is_on_demand or self.fleet.serving(served.key)

    def lacks(self, model: ModelConfig) -> bool:
        """Whether this version has no vocabulary here yet."""
        held = (self._served.get(model.served_name), self._pending.get(model.served_name))
        return all(each is None or each.key != model.key for each in held)

    def replace(self, models: Models) -> None:
        """Takes what the file says now. What is gone is not found any more; what runs goes on."""
        self.models = models
        for held in (self._served, self._pending):
            for name in [each for each in held if each not in models.models]:
                del held[name]
        for name, config in models.models.items():
            for held in (self._served, self._pending):
                if name in held and held[name].key == config.key:
                    held[name].config = config
        self.failures = {name: text for name, text in self.failures.items() if name in models.models}

    def loaded(self, served: ServedModel) -> None:
        """A version has its vocabulary."""
        self.failures.pop(served.name, None)
        self._pending[served.name] = served
        self.promote()
        self.fleet.reconsider()

    def promote(self) -> None:
        """Lets versions take their places whose engines are there, or whose predecessors' are not."""
        for name, served in list(self._pending.items()):
            before = self._served.get(name)
            if before is None or self.fleet.serving(served.key) or not self.fleet.serving(before.key):
                self._served[name] = served
                del self._pending[name]

    def fingerprint(self) -> str:
        """The only vocabulary, for engines to compare; "" where there are several."""
        held = [*self._served.values(), *self._pending.values()]
        prints = {each.vocabulary.fingerprint for each in held}
        return next(iter(prints)) if len(prints) == 1 and len(self.models.models) == 1 else ""

    def check_engine(self, target: str, info: EngineInfo) -> None:
        """Raises MODEL_NOT_FOUND or VOCABULARY_MISMATCH for an engine that cannot be used."""
        for held in (self._served, self._pending):
            served = held.get(info.model)
            if served is not None and served.key == info.model_key:
                self._check_vocabulary(target, info, served.vocabulary.fingerprint)
                return
        known = ", ".join(repr(each.key) for each in (*self._served.values(), *self._pending.values()))
        raise MillraceError(
            Reason.MODEL_NOT_FOUND,
            f"engine {target} serves model {info.model_key!r}, this gateway {known or 'none yet'}; give all "
            "services the same [model] name and path, or the same [models]",
        )

    def _check_vocabulary(self, target: str, info: EngineInfo, own: str) -> None:
        # A simulated engine may have none.
        if info.vocabulary_fingerprint and info.vocabulary_fingerprint != own:
            raise MillraceError(
                Reason.VOCABULARY_MISMATCH,
                f"engine {target} has vocabulary {info.vocabulary_fingerprint[:12]}…, the tokenizer "
                f"service has {own[:12]}…; serve the same checkpoint with both",
            )

    # --- what a name stands for ---

    def set_routes(self, routes: Mapping[str, SetRoute]) -> None:
        """Takes what rollouts have set. A request that is accepted keeps its model."""
        self._set_routes = routes

    def route(self, alias: str) -> Mapping[str, float] | None:
        """Weights in force by model; None for what is no alias."""
        configured = self.models.routes.get(alias)
        found = None if configured is None else self._set_routes.get(alias)
        return configured if configured is None or found is None else found.over(configured, time.monotonic())

    def num_engines(self, name: str) -> int:
        """Engines that take new requests for a model."""
        served = self._served.get(name)
        return 0 if served is None else self.fleet.num_ready(served.key)

    def names(self, identity: Identity) -> list[str]:
        """Names that the caller may ask for."""
        return [name for name in self._all_names() if not self._refused(identity, name)]

    def knows(self, name: str) -> bool:
        """Whether something is served under a name, whoever may use it."""
        return name in self.models.routes or self._find(name) is not None

    def check(self, identity: Identity, name: str) -> None:
        """Raises MODEL_NOT_FOUND, MODEL_NOT_ALLOWED, or INVALID_ARGUMENT for what can be no model's name."""
        refused = self._refused(identity, name)
        if not refused:
            return
        if len(name) > MAX_MODEL_NAME:
            raise invalid("model", f"{len(name)} characters; the limit is {MAX_MODEL_NAME}")
        reason, problem = Reason.MODEL_NOT_ALLOWED, f"{refused} may not use model {name!r}"
        if not self.knows(name):
            reason, problem = Reason.MODEL_NOT_FOUND, f"model {name!r} is not served here"
            if (missing := self._unloaded(name)) is not None:
                self._raise_unloaded(missing)
        usable = ", ".join(self.names(identity)) or "none"
        raise MillraceError(reason, f"{problem}; available: {usable}", field="model")

    def resolve(self, identity: Identity, name: str, *, tier: str, cache_key: str = "") -> Target:
        """What a request goes to; raises as `check`, and TOKENIZER_UNAVAILABLE for what is not loaded yet."""
        self.check(identity, name)
        if (weights := self.route(name)) is not None:
            name = self._routed(name, weights, sticky_key(identity.tenant, cache_key))
        target = self._find(name)
        assert target is not None, "what may be used is served"
        tiers = target.served.config.tiers
        if tiers and tier not in tiers:
            raise MillraceError(
                Reason.MODEL_NOT_ALLOWED,
                f"model {name!r} is not served under service_tier {tier!r}; use one of: {', '.join(tiers)}",
                field="service_tier",
            )
        return target

    def any_of(self, name: str) -> ServedModel | None:
        """A model that `name` may stand for: those of one alias are alike in form."""
        if (weights := self.route(name)) is not None:
            name = max(weights, key=weights.__getitem__)
        found = self._find(name)
        return None if found is None else found.served

    def _routed(self, alias: str, weights: Mapping[str, float], key: str) -> str:
        here = [(name, weight) for name, weight in weights.items() if weight and name in self._served]
        if not here:
            self._raise_unloaded(self.models.models[max(weights, key=weights.__getitem__)])
        # One without engines is left out while another has some.
        able = [each for each in here if self.fleet.serving(self._served[each[0]].key)]
        return pick(alias, key, able or here)

    def _find(self, name: str) -> Target | None:
        for served in self._served.values():
            if name in served.config.names:
                return Target(served=served, told=name)
        base, separator, adapter = name.rpartition(ADAPTER_SEPARATOR)
        found = self._find(base) if separator else None
        if found is None or found.adapter or adapter not in self._adapters(found.served):
            return None
        return Target(served=found.served, told=name, adapter=adapter)

    def _adapters(self, served: ServedModel) -> list[str]:
        known = self.fleet.adapters.of(served.key)
        # Until an engine has said what it serves, the configuration is believed.
        configured = () if self.fleet.of(served.key) else served.config.adapters.keys() - known.keys()
        return sorted({*configured, *(name for name, each in known.items() if each.version)})

    def _all_names(self) -> Iterator[str]:
        for served in filter(None, map(self._served.get, self.models.models)):
            yield from dict.fromkeys((served.name, *served.config.aliases))
            for adapter in self._adapters(served):
                yield f"{served.name}{ADAPTER_SEPARATOR}{adapter}"
        yield from self.models.routes

    def _refused(self, identity: Identity, name: str) -> str:
        """Who it is that may not use what the name stands for; "" for nobody."""
        allowed = identity.allowed_models
        if (weights := self.models.routes.get(name)) is not None:
            is_allowed, configs = name in allowed, [self.models.models[each] for each in weights]
            is_listed = True
        else:
            target = self._find(name)
            if target is None:
                return "nobody"
            base = name.removesuffix(f"{ADAPTER_SEPARATOR}{target.adapter}") if target.adapter else name
            is_allowed, configs = name in allowed or base in allowed, [target.served.config]
            adapter = target.served.config.adapters.get(target.adapter)
            is_listed = adapter is None or not adapter.tenants or identity.tenant in adapter.tenants
        if allowed and not is_allowed:
            return f"key {identity.key_id}"
        if not is_listed or any(self._refused_by(each, identity) for each in configs):
            return f"tenant {identity.tenant}"
        return ""

    def _refused_by(self, config: ModelConfig, identity: Identity) -> bool:
        if config.tenants and identity.tenant not in config.tenants:
            return True
        return bool(config.tiers) and not set(config.tiers) & set(self._tiers.allowed(identity))

    def _unloaded(self, name: str) -> ModelConfig | None:
        return next((each for each in self.models.models.values() if name in each.names), None)

    def _raise_unloaded(self, config: ModelConfig) -> None:
        why = self.failures.get(config.served_name, "its vocabulary is being loaded")
        raise MillraceError(
            Reason.TOKENIZER_UNAVAILABLE,
            f"model {config.served_name!r} cannot be served: {why}; ask for another one, or try again",
            field="model",
            retry_after_s=1.0,
        )
