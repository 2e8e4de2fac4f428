"""Commands and options of `millrace`. The surface is frozen by a test: scripts depend on it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn

import typer
from rich.console import Console
from rich.table import Table

from checkpoint.known import known_models
from contract.errors import MillraceError
from contract.formats import ReasoningFormat, ToolCallFormat
from observability.emit import names
from runtime.errors import ConfigError, described
from services.bench.command import app as bench_app
from services.cli import owners
from services.cli.batch import app as batch_app
from services.cli.options import flattened
from services.cli.target import find_target
from services.drafter.command import train_drafter
from services.gate.command import gate
from services.kvzap.command import train_kvzap
from services.quantize.command import quantize
from services.simulate.command import simulate
from services.supervisor.config import BUNDLED_MODEL, Options

# Not loaded by the supervisor, which asks nothing of a model.
if TYPE_CHECKING:
    from services.cli.inference import InferenceClient


app = typer.Typer(
    help="Millrace serves large language models to many tenants, with promises that are kept.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"millrace {version('millrace')}")
        raise typer.Exit


@app.callback()
def _every_command(
    _: Annotated[
        bool,
        typer.Option("--version", is_eager=True, callback=_show_version, help="Print the version and end."),
    ] = False,
) -> None:
    pass


engine_app = typer.Typer(help="Engines of another make.", no_args_is_help=True)
app.add_typer(engine_app, name="engine")
schema_app = typer.Typer(help="Response formats.", no_args_is_help=True)
app.add_typer(schema_app, name="schema")
app.add_typer(bench_app, name="bench")
app.add_typer(batch_app, name="batch")
app.command()(gate)
app.command()(quantize)
app.command()(train_drafter)
app.command()(train_kvzap)
app.command()(simulate)

_out = Console(highlight=False)
_notes = Console(stderr=True, highlight=False)

_MODEL_HELP = (
    f"Known name ({', '.join(known_models())}), hub id or hf:OWNER/NAME@REVISION:FILE, GGUF file, or "
    "directory in Hugging Face format"
)
Dtype = Literal["auto", "float32", "bfloat16"]
Quantization = Literal["off", "int8", "w8a8", "int4", "fp8"]
ModelOption = Annotated[str, typer.Option(help="Model to ask for; the served one when empty.")]
UrlOption = Annotated[str, typer.Option(help="Server as host:port; the local stack when empty.")]
Config = Annotated[Path | None, typer.Option(exists=True, dir_okay=False, help="Configuration file (TOML).")]
DtypeOption = Annotated[Dtype, typer.Option(help="Element type of weights and activations.")]
Quantize = Annotated[
    Quantization | None,
    typer.Option(help="Quantize weights at load; w8a8 and fp8 (for GPUs) round activations, too."),
]


@contextmanager
def _errors_in_one_line() -> Iterator[None]:
    """One clear line instead of a traceback for what the user can change."""
    try:
        yield
    except (ConfigError, MillraceError) as error:
        _notes.print(f"millrace: {error}", style="red", markup=False, soft_wrap=True)
        raise typer.Exit(2 if isinstance(error, ConfigError) else 1) from error
    except OSError as error:
        _notes.print(f"millrace: {described(error)}", style="red", markup=False, soft_wrap=True)
        raise typer.Exit(2) from error


# --- running ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Modelled:
    """Options that say which model is served, and how it writes."""

    model: Annotated[
        list[str] | None,
        typer.Option(help=f"{_MODEL_HELP}; repeat for several, as NAME=PATH."),
    ] = None
    dtype: DtypeOption = "auto"
    served_model_name: Annotated[str | None, typer.Option(help="Name that clients ask for.")] = None
    chat_template: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, help="Jinja template in place of the checkpoint's own."),
    ] = None
    tool_call_parser: Annotated[
        ToolCallFormat | None,
        typer.Option(help="How the model writes tool calls; else its template tells."),
    ] = None
    reasoning_parser: Annotated[
        ReasoningFormat | None, typer.Option(help="How it writes reasoning; else its template tells.")
    ] = None


@dataclass(frozen=True, kw_only=True)
class Made:
    """Options that say whose core computes, and over how many devices."""

    engine: Annotated[
        Literal["millrace", "vllm"] | None,
        typer.Option(help="Whose core computes; vllm serves over several devices and machines."),
    ] = None
    tensor_parallel_size: Annotated[
        int | None, typer.Option(min=1, help="Ranks that share each layer (vllm).")
    ] = None
    pipeline_parallel_size: Annotated[
        int | None, typer.Option(min=1, help="Ranks that follow one another (vllm).")
    ] = None
    data_parallel_size: Annotated[
        int | None, typer.Option(min=1, help="Copies of the model in one engine (vllm).")
    ] = None
    expert_parallel: Annotated[
        bool, typer.Option("--expert-parallel", help="Spread whole experts over the ranks (vllm).")
    ] = False

    def settings(self) -> dict[str, object]:
        """Overrides of [engine], as far as something was said."""
        chosen = {"engine.make": self.engine, "engine.vllm.expert_parallel": self.expert_parallel or None}
        for name in ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"):
            chosen[f"engine.vllm.{name}"] = getattr(self, name)
        return {key: value for key, value in chosen.items() if value is not None}


@dataclass(frozen=True, kw_only=True)
class Serving:
    """Options of the commands that start a stack."""

    quantize: Quantize = None
    max_model_len: Annotated[int | None, typer.Option(min=1, help="Most tokens of prompt and answer.")] = None
    adapter: Annotated[
        list[str] | None,
        typer.Option(help="Adapter (LoRA) to serve beside the model, as NAME=PATH; repeat for several."),
    ] = None
    engines: Annotated[int | None, typer.Option(min=1, max=64, help="Engine processes.")] = None
    gateways: Annotated[int | None, typer.Option(min=1, max=64, help="Gateway processes.")] = None
    host: Annotated[str, typer.Option(help="IP address to listen on.")] = "127.0.0.1"
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")] = 8080
    config: Config = None
    detach: Annotated[
        bool, typer.Option("--detach", help="Return when it is healthy; `millrace stop` ends it.")
    ] = False

    def supervise(self, model: Modelled, made: Made | None = None, *, simulated: bool = False) -> NoReturn:
        """Runs until it is told to stop, and exits."""
        if self.detach:
            from services.cli.background import detach

            with _errors_in_one_line():
                raise typer.Exit(detach([each for each in sys.argv[1:] if each != "--detach"], _out))
        from services.supervisor.run import supervise

        options = Options(
            config=self.config.resolve() if self.config else None,
            model=tuple(model.model) if model.model else None,
            served_model_name=model.served_model_name,
            chat_template=model.chat_template.resolve() if model.chat_template else None,
            tool_call_parser=model.tool_call_parser,
            reasoning_parser=model.reasoning_parser,
            max_model_len=self.max_model_len,
            dtype=None if model.dtype == "auto" else model.dtype,
            quantize=self.quantize,
            adapters=tuple(self.adapter or ()),
            engines=self.engines,
            gateways=self.gateways,
            host="127.0.0.1" if self.host == "localhost" else self.host,
            port=self.port,
            simulated=simulated,
            engine_settings=made.settings() if made else {},
        )
        raise typer.Exit(supervise(options, Console(highlight=False)))


@app.command()
@flattened
def up(
    *,
    model: Modelled,
    made: Made,
    serving: Serving,
    simulated: Annotated[
        bool, typer.Option("--simulated", help="Engines without weights, for tests.")
    ] = False,
) -> None:
    """Serve a model: start every process, wait until all are healthy, stop on Ctrl-C."""
    serving.supervise(model, made, simulated=simulated)


@app.command()
@flattened
def serve(
    serving: Serving,
    model: Annotated[str, typer.Option(help=f"{_MODEL_HELP}; the bundled model when empty.")] = "",
) -> None:
    """Serve the bundled model, or another one."""
    serving.supervise(Modelled(model=[model or str(BUNDLED_MODEL)]))


@app.command()
def status() -> None:
    """Show the stack that runs with this state directory: its processes and addresses."""
    from services.cli.background import status

    with _errors_in_one_line():
        status(_out)


@app.command()
def stop() -> None:
    """Stop the stack that runs with this state directory; streams in flight may finish."""
    from services.cli.background import stop

    with _errors_in_one_line():
        stop(_out)


@engine_app.command()
def install(
    make: Annotated[Literal["vllm"], typer.Argument(help="Whose engine; it gets an environment of its own.")],
    ray: Annotated[bool, typer.Option("--ray", help="With Ray, for engines over several machines.")] = False,
) -> None:
    """Install an engine of another make, in versions that were tried; takes minutes and gigabytes."""
    arguments = ["--ray"] if ray else []
    raise typer.Exit(owners.run_module({"vllm": "engine.vllm_core.install"}[make], arguments))


# --- asking -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Asking:
    """Options of the commands that have the model write something."""

    model: ModelOption = ""
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Most tokens to generate; chat: 1,024 unless set.")
    ] = None
    temperature: Annotated[float | None, typer.Option(min=0, help="0 always takes the likeliest token.")] = (
        None
    )
    top_p: Annotated[float | None, typer.Option(min=0, max=1, help="Nucleus sampling.")] = None
    top_k: Annotated[int | None, typer.Option(min=0, help="Keep the k likeliest tokens; 0 keeps all.")] = None
    seed: Annotated[int | None, typer.Option(min=0, help="Equal seeds give equal answers.")] = None
    stop: Annotated[list[str] | None, typer.Option(help="Text that ends the answer; repeat for several.")] = (
        None
    )
    tier: Annotated[str, typer.Option(help="Service tier to ask for.")] = ""
    schema: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="JSON schema of the answer.")
    ] = None
    regex: Annotated[str, typer.Option(help="Regular expression that the whole answer matches.")] = ""
    url: UrlOption = ""

    def fields(self, client: InferenceClient) -> dict[str, Any]:
        """What requests of both kinds have; raises ConfigError for options that exclude each other."""
        from services.cli.inference import response_format

        return {
            "model": self.model or client.default_model(),
            # None leaves the option at the model's default.
            "sampling": {
                "max_tokens": self.max_tokens,
                "temperature": self.temperature,
                "top_p": self.top_p,
                "top_k": self.top_k,
                "seed": self.seed,
                "stop": self.stop,
            },
            "response_format": response_format(_read(self.schema), self.regex),
            "service_tier": self.tier,
        }


@app.command()
@flattened
def chat(
    asking: Asking,
    text: Annotated[str, typer.Argument(help="One question; a conversation when left out.")] = "",
    system: Annotated[str, typer.Option(help="System message.")] = "",
) -> None:
    """Talk to the model; the question may also come from standard input."""
    from services.cli.chat import ChatSession, talk
    from services.cli.inference import InferenceClient

    with _errors_in_one_line(), InferenceClient(find_target(asking.url)) as client:
        conversation = ChatSession(client, asking.fields(client), system, _out, _notes)
        if text:
            conversation.ask(text)
        elif not sys.stdin.isatty():
            conversation.ask(sys.stdin.read())
        else:
            talk(conversation, input, _notes)


@app.command()
@flattened
def generate(
    asking: Asking,
    prompt: Annotated[str, typer.Argument(help="Text to continue; standard input when left out.")] = "",
) -> None:
    """Continue a text."""
    from services.cli.inference import InferenceClient

    with _errors_in_one_line(), InferenceClient(find_target(asking.url)) as client:
        fields = asking.fields(client)
        request_id = ""
        for response in client.generate(text=prompt or sys.stdin.read(), **fields):
            request_id = response.request_id
            for choice in response.choices:
                sys.stdout.write(choice.text)
                sys.stdout.flush()
        owners.remember_request(request_id)
        sys.stdout.write("\n")


@app.command()
def models(
    what: Annotated[
        Literal["families", "packed"] | None,
        typer.Argument(
            help="families: the architectures that the engine serves, whatever runs; packed: models whose "
            "weights are kept as an engine packed them."
        ),
    ] = None,
    url: UrlOption = "",
    json: Annotated[
        bool, typer.Option("--json", help="Of families and packed: machine-readable output.")
    ] = False,
    clear: Annotated[bool, typer.Option("--clear", help="Of packed: delete them.")] = False,
) -> None:
    """List the models that the key may use with their own sampling options, families, or packed weights."""
    if clear and what != "packed":
        raise typer.BadParameter("only what is packed can be deleted: millrace models packed --clear")
    if what == "packed":
        flags = [*(["--json"] if json else []), *(["--clear"] if clear else [])]
        with _errors_in_one_line():
            raise typer.Exit(owners.run_configured("engine.model.packed_command", flags))
    if what is not None:
        raise typer.Exit(owners.run_module("engine.model.families.table", ["--json"] if json else []))
    from services.cli.inference import InferenceClient, told_defaults, told_model

    with _errors_in_one_line(), InferenceClient(find_target(url)) as client:
        for model in client.models():
            _out.print(told_model(model), markup=False)
            if told := told_defaults(model, {}):
                _notes.print(f"  {told}", style="dim", markup=False, highlight=False, soft_wrap=True)


# --- looking ----------------------------------------------------------------------------------------------


@app.command()
def doctor() -> None:
    """Show what this machine has, and what Millrace would use of it."""
    from services.cli.doctor import examine

    table = Table.grid(padding=(0, 2))
    marks = {"good": "[green]✓[/]", "note": "[yellow]![/]", "bad": "[red]✗[/]"}
    table.add_row("", "millrace", version("millrace"))
    bad = False
    for finding in examine():
        table.add_row(marks[finding.state], finding.subject, finding.text)
        bad = bad or finding.state == "bad"
    _out.print(table, soft_wrap=True)
    raise typer.Exit(1 if bad else 0)


@app.command()
def plan(
    model: Annotated[
        str,
        typer.Option(
            help="Directory, hub id, or a model of the file; the configured or bundled one when empty."
        ),
    ] = "",
    dtype: DtypeOption = "auto",
    quantize: Quantize = None,
    config: Config = None,
    json: Annotated[bool, typer.Option("--json", help="Machine-readable output.")] = False,
    streams: Annotated[int | None, typer.Option(min=1, help="Will so many answers at a time fit?")] = None,
    prompt: Annotated[int | None, typer.Option(min=1, help="Tokens of each prompt.")] = None,
    output: Annotated[int | None, typer.Option(min=1, help="Tokens of each answer.")] = None,
    devices: Annotated[
        int | None, typer.Option(min=1, max=16, help="By which engine.parallel may so many devices share it?")
    ] = None,
    device_gib: Annotated[
        float | None,
        typer.Option(min=0.001, max=2**20, help="Memory of each; else its part of what is free."),
    ] = None,
    try_it: Annotated[
        bool, typer.Option("--try", help="Load it, drive the worst case, and show the peak beside the plan.")
    ] = False,
) -> None:
    """Print the memory plan of a model: what fits, before anything is loaded."""
    with _errors_in_one_line():
        settings = owners.model_settings(model, None if dtype == "auto" else dtype, quantize, config=config)
    arguments = [*(["--config", str(config)] if config else []), *(["--json"] if json else [])]
    load: dict[str, float | None] = {"--streams": streams, "--prompt": prompt, "--output": output}
    load |= {"--devices": devices, "--device-gib": device_gib}
    if try_it:
        if any(load.values()):
            told = f"it drives the worst case that there may be; leave out {', '.join(load)}"
            raise typer.BadParameter(told, param_hint="--try")
        raise typer.Exit(owners.run_module("engine.core.plan_trial", arguments, settings=settings))
    arguments += [f"{name}={count}" for name, count in load.items() if count]
    raise typer.Exit(owners.run_module("engine.model.plan_command", arguments, settings=settings))


def _on_traces(module: str, arguments: list[str]) -> int:
    options = {argument.partition("=")[0] for argument in arguments}
    local = [] if options & {"--store", "--jaeger"} else ["--store", owners.trace_store()]
    return owners.run_module(module, [*local, *arguments])


def _on_one_trace(module: str, arguments: list[str]) -> int:
    options = {argument.partition("=")[0] for argument in arguments}
    after = [] if options & {"--store", "--jaeger"} else owners.last_request()
    return _on_traces(module, [*after, *arguments])


def _on_metrics(module: str, arguments: list[str]) -> int:
    options = {argument.partition("=")[0] for argument in arguments}
    targets = [] if options & {"--target", "--prometheus"} else owners.metrics_targets()
    return owners.run_module(module, [*targets, *arguments])


def _on_rollout(module: str, arguments: list[str]) -> int:
    targets = owners.metrics_targets(kind=names.GATEWAY)
    return owners.run_configured(module, [*targets, *arguments], owners.asking(arguments))


def _pass_on(group: typer.Typer, name: str, run: Callable[[str, list[str]], int], module: str) -> None:
    """Adds a command of another package, which takes its own options. Its help is in `_OWNED`."""

    def command(context: typer.Context) -> None:
        with _errors_in_one_line():
            status = run(module, context.args)
        raise typer.Exit(status)

    settings = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
    group.command(name, help=_OWNED[module], context_settings=settings, add_help_option=False)(command)


_OWNED = {
    "observability.analysis.waterfall": "Draw the trace of a request: its id, or `last`.",
    "observability.analysis.why": "Say in words what made a request slow: its id, or `last`.",
    "observability.analysis.diagnose": "Find the slice of the last hour's requests that explains slow ones.",
    "observability.analysis.shadows": "Compare what shadows would have answered with what was.",
    "observability.analysis.top": "Show engines, tiers, queues and rates, live.",
    "services.rollout": "Advance a candidate 1, 10, 50, 100 % of an alias, or take it back.",
    "services.distill": "Write stored answers of consenting tenants as training data.",
    "gateway.auth.keys": "Create, list and revoke API keys.",
    "gateway.ledger": "Report tokens and cost by tenant, key and model.",
    "tokenizer_svc.check": "Report what of a JSON schema would be enforced.",
}
_pass_on(app, "trace", _on_one_trace, "observability.analysis.waterfall")
_pass_on(app, "why", _on_one_trace, "observability.analysis.why")
_pass_on(app, "diagnose", _on_traces, "observability.analysis.diagnose")
_pass_on(app, "top", _on_metrics, "observability.analysis.top")
_pass_on(app, "shadows", _on_metrics, "observability.analysis.shadows")
_pass_on(app, "rollout", _on_rollout, "services.rollout")
_pass_on(app, "distill", owners.run_configured, "services.distill")
_pass_on(app, "keys", owners.run_configured, "gateway.auth.keys")
_pass_on(app, "usage", owners.run_configured, "gateway.ledger")
_pass_on(schema_app, "check", owners.run_module, "tokenizer_svc.check")


def _read(path: Path | None) -> str:
    if path is None:
        return ""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text at byte {error.start}; save the file as UTF-8") from error


def main() -> None:
    """Entry point of the `millrace` script."""
    app(prog_name="millrace")
