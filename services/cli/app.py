"""Commands and options of `millrace`. The surface is frozen by a test: scripts depend on it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.table import Table

from contract.errors import MillraceError
from services.bench.command import app as bench_app
from services.cli import owners
from services.cli.target import Target, find_target
from services.errors import ConfigError
from services.supervisor.config import BUNDLED_MODEL, Options

app = typer.Typer(
    help="Millrace serves large language models to many tenants, with promises that are kept.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
schema_app = typer.Typer(help="Response formats.", no_args_is_help=True)
app.add_typer(schema_app, name="schema")
app.add_typer(bench_app, name="bench")

_out = Console(highlight=False)
_notes = Console(stderr=True, highlight=False)

# Commands of other packages take their own options.
_PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}

Dtype = Literal["auto", "float32", "bfloat16"]
Quantization = Literal["off", "int8", "w8a8", "int4"]
ModelOption = Annotated[str, typer.Option(help="Model to ask for; the served one when empty.")]
UrlOption = Annotated[str, typer.Option(help="Server as host:port; the local stack when empty.")]
MaxTokens = Annotated[int | None, typer.Option(min=1, help="Most tokens to generate.")]
Temperature = Annotated[float | None, typer.Option(min=0, help="0 always takes the likeliest token.")]
TopP = Annotated[float | None, typer.Option(min=0, max=1, help="Nucleus sampling.")]
TopK = Annotated[int | None, typer.Option(min=0, help="Keep the k likeliest tokens; 0 keeps all.")]
Seed = Annotated[int | None, typer.Option(min=0, help="Equal seeds give equal answers.")]
Stop = Annotated[list[str] | None, typer.Option(help="Text that ends the answer; repeat for several.")]
Tier = Annotated[str, typer.Option(help="Service tier to ask for.")]
Schema = Annotated[Path | None, typer.Option(exists=True, dir_okay=False, help="JSON schema of the answer.")]
Regex = Annotated[str, typer.Option(help="Regular expression that the whole answer matches.")]
Config = Annotated[Path | None, typer.Option(exists=True, dir_okay=False, help="Configuration file (TOML).")]
Engines = Annotated[int | None, typer.Option(min=1, max=64, help="Engine processes.")]
Gateways = Annotated[int | None, typer.Option(min=1, max=64, help="Gateway processes.")]
Host = Annotated[str, typer.Option(help="IP address to listen on.")]
Port = Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")]
Simulated = Annotated[bool, typer.Option("--simulated", help="Engines without weights, for tests.")]
DtypeOption = Annotated[Dtype, typer.Option(help="Element type of weights and activations.")]
Quantize = Annotated[
    Quantization | None, typer.Option(help="Quantize weights at load; w8a8 rounds activations to int8, too.")
]


@contextmanager
def _errors_told() -> Iterator[None]:
    """One clear line instead of a traceback for what the user can change."""
    try:
        yield
    except (ConfigError, MillraceError) as error:
        _notes.print(f"millrace: {error}", style="red", markup=False, soft_wrap=True)
        raise typer.Exit(2 if isinstance(error, ConfigError) else 1) from error


def _target(url: str) -> Target:
    return find_target(url)


# --- running ----------------------------------------------------------------------------------------------


@app.command()
def up(
    model: Annotated[str | None, typer.Option(help="Directory in Hugging Face format, or a hub id.")] = None,
    dtype: DtypeOption = "auto",
    quantize: Quantize = None,
    engines: Engines = None,
    gateways: Gateways = None,
    host: Host = "127.0.0.1",
    port: Port = 8080,
    config: Config = None,
    simulated: Simulated = False,
) -> None:
    """Serve a model: start every process, wait until all are healthy, stop on Ctrl-C."""
    from services.supervisor.run import supervise

    options = Options(
        config=config.resolve() if config else None,
        model=model,
        dtype=None if dtype == "auto" else dtype,
        quantize=quantize,
        engines=engines,
        gateways=gateways,
        host="127.0.0.1" if host == "localhost" else host,
        port=port,
        simulated=simulated,
    )
    raise typer.Exit(supervise(options, Console(highlight=False)))


@app.command()
def serve(
    quantize: Quantize = None,
    engines: Engines = None,
    gateways: Gateways = None,
    host: Host = "127.0.0.1",
    port: Port = 8080,
    config: Config = None,
) -> None:
    """Serve the bundled model."""
    up(str(BUNDLED_MODEL), "auto", quantize, engines, gateways, host, port, config, False)


# --- asking -----------------------------------------------------------------------------------------------


@app.command()
def chat(
    text: Annotated[str, typer.Argument(help="One question; a conversation when left out.")] = "",
    model: ModelOption = "",
    system: Annotated[str, typer.Option(help="System message.")] = "",
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    top_p: TopP = None,
    top_k: TopK = None,
    seed: Seed = None,
    stop: Stop = None,
    tier: Tier = "",
    schema: Schema = None,
    regex: Regex = "",
    url: UrlOption = "",
) -> None:
    """Talk to the model; the question may also come from standard input."""
    from services.cli import chat as chatting
    from services.cli import inference

    with _errors_told(), inference.InferenceClient(_target(url)) as client:
        settings = chatting.ChatSettings(
            model=model or client.default_model(),
            system=system,
            sampling=inference.sampling_options(
                max_tokens=max_tokens,
                temperature=temperature,
                top_p=top_p,
                top_k=top_k,
                seed=seed,
                stop=stop or (),
            ),
            response_format=inference.response_format(_read(schema), regex),
            service_tier=tier,
        )
        conversation = chatting.Conversation(client, settings, _out, _notes)
        if text:
            conversation.ask(text)
        elif not sys.stdin.isatty():
            conversation.ask(sys.stdin.read())
        else:
            chatting.talk(conversation, input, _notes)


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="Text to continue; standard input when left out.")] = "",
    model: ModelOption = "",
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    top_p: TopP = None,
    top_k: TopK = None,
    seed: Seed = None,
    stop: Stop = None,
    tier: Tier = "",
    schema: Schema = None,
    regex: Regex = "",
    url: UrlOption = "",
) -> None:
    """Continue a text."""
    from services.cli import inference

    with _errors_told(), inference.InferenceClient(_target(url)) as client:
        inference.generate_to(
            client,
            sys.stdout,
            model=model or client.default_model(),
            prompt=prompt or sys.stdin.read(),
            sampling=inference.sampling_options(
                max_tokens=max_tokens,
                temperature=temperature,
                top_p=top_p,
                top_k=top_k,
                seed=seed,
                stop=stop or (),
            ),
            response_format=inference.response_format(_read(schema), regex),
            service_tier=tier,
        )


@app.command()
def models(url: UrlOption = "") -> None:
    """List the models that the key may use."""
    from services.cli import inference

    with _errors_told(), inference.InferenceClient(_target(url)) as client:
        for model in client.models():
            _out.print(f"{model.id}  {model.max_model_len} tokens", markup=False)


# --- looking ----------------------------------------------------------------------------------------------


@app.command()
def doctor() -> None:
    """Show what this machine has, and what Millrace would use of it."""
    from services.cli.doctor import examine, millrace_version

    table = Table.grid(padding=(0, 2))
    marks = {"good": "[green]✓[/]", "note": "[yellow]![/]", "bad": "[red]✗[/]"}
    table.add_row("", "millrace", millrace_version())
    bad = False
    for finding in examine():
        table.add_row(marks[finding.state], finding.subject, finding.text)
        bad = bad or finding.state == "bad"
    _out.print(table, soft_wrap=True)
    raise typer.Exit(1 if bad else 0)


@app.command(context_settings=_PASS_ON, add_help_option=False)
def trace(context: typer.Context) -> None:
    """Draw the trace of a request: its id, or `last`."""
    _run_on_traces("observability.analysis.waterfall", context.args)


@app.command(context_settings=_PASS_ON, add_help_option=False)
def why(context: typer.Context) -> None:
    """Say in words what made a request slow: its id, or `last`."""
    _run_on_traces("observability.analysis.why", context.args)


@app.command(context_settings=_PASS_ON, add_help_option=False)
def diagnose(context: typer.Context) -> None:
    """Find the slice of the last hour's requests that explains the slow ones."""
    _run_on_traces("observability.analysis.diagnose", context.args)


def _run_on_traces(module: str, arguments: list[str]) -> None:
    store = [] if "--store" in arguments else ["--store", owners.trace_store()]
    raise typer.Exit(owners.run_module(module, [*store, *arguments]))


@app.command(context_settings=_PASS_ON, add_help_option=False)
def top(context: typer.Context) -> None:
    """Show engines, tiers, queues and rates, live."""
    targets = [] if "--target" in context.args else owners.metrics_targets()
    raise typer.Exit(owners.run_module("observability.analysis.top", [*targets, *context.args]))


@app.command()
def plan(
    model: Annotated[
        str, typer.Option(help="Directory or hub id; the served or bundled one when empty.")
    ] = "",
    dtype: DtypeOption = "auto",
    quantize: Quantize = None,
    config: Config = None,
    json: Annotated[bool, typer.Option("--json", help="Machine-readable output.")] = False,
) -> None:
    """Print the memory plan of a model: what fits, before anything is loaded."""
    with _errors_told():
        settings = owners.model_settings(model, None if dtype == "auto" else dtype, quantize)
    arguments = [*(["--config", str(config)] if config else []), *(["--json"] if json else [])]
    raise typer.Exit(owners.run_module("engine.model.plan_command", arguments, settings=settings))


@app.command(context_settings=_PASS_ON, add_help_option=False)
def keys(context: typer.Context) -> None:
    """Create, list and revoke API keys."""
    with _errors_told():
        status = owners.run_configured("gateway.auth.keys", context.args)
    raise typer.Exit(status)


@app.command(context_settings=_PASS_ON, add_help_option=False)
def usage(context: typer.Context) -> None:
    """Report tokens and cost by tenant, key and model."""
    with _errors_told():
        status = owners.run_configured("gateway.ledger", context.args)
    raise typer.Exit(status)


@schema_app.command("check", context_settings=_PASS_ON, add_help_option=False)
def schema_check(context: typer.Context) -> None:
    """Report what of a JSON schema would be enforced."""
    raise typer.Exit(owners.run_module("tokenizer_svc.check", context.args))


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
