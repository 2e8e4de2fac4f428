"""What people see of a stack: stages with seconds while it starts, one line for every event afterwards."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from services.supervisor import speeds
from services.supervisor.layout import Layout

_SPINNER = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"


class StartReport:
    """Live table of the processes that start; plain lines where standard output is not a terminal."""

    def __init__(self, console: Console, names: tuple[str, ...]) -> None:
        self._console = console
        self._started_s = time.monotonic()
        self._ready_s: dict[str, float | None] = dict.fromkeys(names)
        # By process: the name of what it loads, and the share that is loaded.
        self._loading: dict[str, tuple[str, float]] = {}
        self._live = Live(get_renderable=self._table, console=console, refresh_per_second=8, transient=True)

    def __enter__(self) -> StartReport:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._console.is_terminal:
            self._live.stop()

    def ready(self, name: str) -> None:
        """Notes that a process is ready."""
        seconds = self._ready_s[name] = self.elapsed_s
        self._line(f"{name} ready after {seconds:.1f} s")

    def loading(self, name: str, stage: str, fraction: float) -> None:
        """Notes what a process that is not ready yet is loading, from 0 to 1."""
        if stage and self._ready_s[name] is None:
            if self._loading.get(name, ("", 0.0))[0] != stage:
                self._line(f"{name}: {stage} ...")
            self._loading[name] = stage, fraction

    @property
    def elapsed_s(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._started_s

    def _line(self, text: str) -> None:
        if not self._console.is_terminal:
            self._console.print(f"  {text}", highlight=False, markup=False)

    def _table(self) -> Table:
        table = Table.grid(padding=(0, 2))
        frame = _SPINNER[int(self.elapsed_s * 8) % len(_SPINNER)]
        for name, seconds in self._ready_s.items():
            if seconds is None:
                stage, fraction = self._loading.get(name, ("starting", 0.0))
                done = f" {fraction:.0%}" if fraction else ""
                text = Text(f"{stage}{done}, {self.elapsed_s:.0f} s", style="dim")
                table.add_row(Text(frame, style="cyan"), name, text)
            else:
                table.add_row(Text("✓", style="green"), name, Text(f"{seconds:.1f} s", style="dim"))
        return table


def _program() -> str:
    """The command line's program as a terminal in this directory finds it."""
    program = Path(sys.executable).with_name("millrace")
    if shutil.which("millrace") == str(program):
        return "millrace"
    return str(program.relative_to(Path.cwd()) if program.is_relative_to(Path.cwd()) else program)


def usage_examples(address: str, api_key: str, model: str, scheme: str = "http") -> str:
    """Commands to copy and paste; each works as it stands against a stack on `address`."""
    key = api_key or "$MILLRACE_API_KEY"
    in_python = f'"{api_key}"' if api_key else 'os.environ["MILLRACE_API_KEY"]'
    imports = "" if api_key else "import os\n  "
    program = _program()
    return f"""\
curl:
  curl -N {scheme}://{address}/v1/chat/completions -H "authorization: Bearer {key}" \\
    -H "content-type: application/json" \\
    -d '{{"model": "{model}", "stream": true, "messages": [{{"role": "user", "content": "Hello!"}}]}}'

openai SDK:
  {imports}from openai import OpenAI
  client = OpenAI(base_url="{scheme}://{address}/v1", api_key={in_python})
  messages = [{{"role": "user", "content": "Hello!"}}]
  for chunk in client.chat.completions.create(model="{model}", messages=messages, stream=True):
      print(chunk.choices[0].delta.content or "", end="", flush=True)

terminal, in {Path.cwd()}:
  {program} chat "Hello!"
  {program} trace last"""


def _speed(layout: Layout, said: Mapping[str, Mapping[str, str]]) -> str:
    """A line for each engine that has measured how fast it is, and one for what would be faster."""
    measured = speeds.of_engines(layout.engine_models, said)
    lines = [
        f"\n  speed        {each.model}: about {each} (first steps, kernels {each.kernels})"
        for each in measured
    ]
    advice = speeds.advice(measured, speeds.read(layout.state_directory))
    return "".join(lines) + (f"\n  faster       {advice}" if advice else "")


def summary(layout: Layout, logs: str, said: Mapping[str, Mapping[str, str]]) -> str:
    """Everything that somebody needs who sees a healthy stack for the first time; `said` is what each process
    told of itself when it was ready.
    """
    key = layout.api_key or "make one with `millrace keys create` (the development key is for loopback only)"
    metrics = ", ".join(
        f"http://{addresses['metrics']}/metrics ({name})"
        for name, addresses in layout.addresses.items()
        if "metrics" in addresses
    )
    return f"""
Millrace serves {layout.model_names} on {layout.scheme}://{layout.edge}

  OpenAI API   {layout.scheme}://{layout.address}/v1
  gRPC         {layout.address}  (millrace.inference.v1.InferenceService)
  API key      {key}{_speed(layout, said)}
  metrics      {metrics}
  logs         {logs}

{usage_examples(layout.address, layout.api_key, layout.model_name, layout.scheme)}

Ctrl-C stops everything; streams in flight may finish."""
