"""Coding agents that people point at a model server, each with a task that its model has by heart."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from tests.agents.scripted import Script
from tests.e2e.stack import Stack

MARKER = "TASK-MILL"
PROMPT = f"{MARKER}: make mill.py print 42, show that it does, and say so."
FINAL = "mill.py prints 42 now."
_LIMIT_S = 240.0
_WRONG = "def mill():\n    return 41\n\n\nprint(mill())\n"
_NOTES = "braces } and </tool_call> in an argument\n"


@dataclass(frozen=True)
class Run:
    """What an agent left behind."""

    status: int
    said: str
    files: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class Agent:
    """An agent: its package, how it is told of a stack, and how its model calls its tools."""

    name: str
    npm: tuple[str, ...]
    # The agent's argv for a stack's address, its key, the model's name and a folder of the agent's own.
    command: Callable[[Path, str, str, str, Path], list[str]]
    environment: Callable[[str, str, str, Path], dict[str, str]]
    # What the model says, call by call: arguments in the order of the tool's schema, which grammars lead in.
    calls: Sequence[tuple[str, Mapping[str, object]]]
    # By what its turns come: a method of requests.
    method: str = "POST"

    def script(self, folder: Path) -> Script:
        """The task in `folder`."""
        steps = []
        for number, (name, arguments) in enumerate(self.calls, 1):
            placed = json.dumps({"name": name, "arguments": arguments}).replace("FOLDER", str(folder))
            steps.append(f"Step {number}.\n<tool_call>\n{placed}\n</tool_call>")
        return Script(marker=MARKER, steps=steps, final=FINAL)

    def run(self, packages: Path, stack: Stack, folder: Path, home: Path) -> Run:
        """Works in `folder` until it has ended."""
        url, key, model = stack.url, stack.state.api_key, stack.model
        home.mkdir(parents=True, exist_ok=True)
        done = subprocess.run(
            self.command(packages, url, key, model, home),
            cwd=folder,
            env={
                "PATH": os.environ["PATH"],
                "HOME": str(home),
                "NO_PROXY": "127.0.0.1,localhost",
                **self.environment(url, key, model, home),
            },
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_LIMIT_S,
            check=False,
        )
        files = {
            str(path.relative_to(folder)): path.read_text(encoding="utf-8")
            for path in sorted(folder.rglob("*"))
            if path.is_file() and not {".git", "__pycache__"} & set(path.parts)
        }
        return Run(done.returncode, done.stdout + done.stderr, files)


def _nothing(url: str, key: str, model: str, home: Path) -> dict[str, str]:
    return {}


# --- opencode: chat completions ---


def _opencode(packages: Path, url: str, key: str, model: str, home: Path) -> list[str]:
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "Millrace",
        "options": {"baseURL": f"{url}/v1", "apiKey": key},
        "models": {model: {"name": model, "limit": {"context": 200_000, "output": 4096}}},
    }
    settings = {
        "provider": {"millrace": provider},
        "permission": {"edit": "allow", "bash": "allow"},
        "autoupdate": False,
        "share": "disabled",
    }
    (home / "opencode.json").write_text(json.dumps(settings), encoding="utf-8")
    return [
        str(packages / "opencode-linux-x64-baseline/bin/opencode"),
        "run",
        "-m",
        f"millrace/{model}",
        PROMPT,
    ]


def _opencode_environment(url: str, key: str, model: str, home: Path) -> dict[str, str]:
    return {
        "OPENCODE_CONFIG": str(home / "opencode.json"),
        "OPENCODE_DISABLE_AUTOUPDATE": "1",
        "OPENCODE_DISABLE_MODELS_FETCH": "1",
    }


def _bash(command: str) -> tuple[str, Mapping[str, object]]:
    return "bash", {"command": command, "description": "runs it"}


OPENCODE = Agent(
    name="opencode",
    npm=("opencode-ai@1.18.33",),
    command=_opencode,
    environment=_opencode_environment,
    calls=[
        ("write", {"content": _WRONG, "filePath": "FOLDER/mill.py"}),
        _bash("python3 mill.py"),
        ("read", {"filePath": "FOLDER/mill.py"}),
        ("edit", {"filePath": "FOLDER/mill.py", "oldString": "return 41", "newString": "return 42"}),
        _bash("python3 mill.py > out.txt; cat out.txt"),
        ("write", {"content": _NOTES, "filePath": "FOLDER/notes.md"}),
        ("read", {"filePath": "FOLDER/notes.md"}),
        ("edit", {"filePath": "FOLDER/notes.md", "oldString": "braces }", "newString": "both {} "}),
        _bash("cat out.txt notes.md | wc -l > lines.txt"),
        _bash("cat lines.txt"),
    ],
)

# --- Claude Code: messages ---


def _claude(packages: Path, url: str, key: str, model: str, home: Path) -> list[str]:
    return [
        *(str(packages / "@anthropic-ai/claude-code-linux-x64/claude"), "-p", PROMPT, "--model", model),
        *("--dangerously-skip-permissions", "--output-format", "text"),
    ]


def _claude_environment(url: str, key: str, model: str, home: Path) -> dict[str, str]:
    return {
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_API_KEY": key,
        "ANTHROPIC_SMALL_FAST_MODEL": model,
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": model,
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        # As root it asks for a sandbox before it runs commands unasked.
        "IS_SANDBOX": "1",
    }


CLAUDE = Agent(
    name="claude-code",
    npm=("@anthropic-ai/claude-code@2.1.332",),
    command=_claude,
    environment=_claude_environment,
    calls=[
        ("Write", {"file_path": "FOLDER/mill.py", "content": _WRONG}),
        ("Bash", {"command": "python3 mill.py", "description": "runs it"}),
        ("Read", {"file_path": "FOLDER/mill.py"}),
        ("Edit", {"file_path": "FOLDER/mill.py", "old_string": "return 41", "new_string": "return 42"}),
        ("Bash", {"command": "python3 mill.py > out.txt; cat out.txt", "description": "runs it"}),
        ("Write", {"file_path": "FOLDER/notes.md", "content": _NOTES}),
        ("Read", {"file_path": "FOLDER/notes.md"}),
        ("Edit", {"file_path": "FOLDER/notes.md", "old_string": "braces }", "new_string": "both {} "}),
        ("Bash", {"command": "cat out.txt notes.md | wc -l > lines.txt", "description": "counts"}),
        ("Bash", {"command": "cat lines.txt", "description": "shows"}),
    ],
)

# --- Codex: responses ---


def _codex(
    packages: Path, url: str, key: str, model: str, home: Path, *, websockets: bool = False
) -> list[str]:
    provider = {
        "name": "Millrace",
        "base_url": f"{url}/v1",
        "env_key": "MILLRACE_KEY",
        "wire_api": "responses",
        "supports_websockets": websockets,
        "stream_max_retries": 20,
        "request_max_retries": 20,
    }
    options = [f"model_providers.millrace.{name}={json.dumps(value)}" for name, value in provider.items()]
    options += ['model_provider="millrace"', "model_context_window=200000", 'web_search="disabled"']
    return [
        *(str(packages / ".bin/codex"), "exec", "--skip-git-repo-check", "-m", model),
        "--dangerously-bypass-approvals-and-sandbox",
        *(part for option in options for part in ("-c", option)),
        PROMPT,
    ]


def _codex_environment(url: str, key: str, model: str, home: Path) -> dict[str, str]:
    return {"MILLRACE_KEY": key, "CODEX_HOME": str(home)}


def _shell(command: str) -> tuple[str, Mapping[str, object]]:
    return "exec_command", {"cmd": command}


CODEX = Agent(
    name="codex",
    npm=("@openai/codex@0.171.0",),
    command=_codex,
    environment=_codex_environment,
    calls=[
        _shell(f"cat > mill.py <<'END'\n{_WRONG}END"),
        _shell("python3 mill.py"),
        _shell("cat mill.py"),
        _shell("sed -i 's/return 41/return 42/' mill.py"),
        _shell("python3 mill.py > out.txt; cat out.txt"),
        _shell(f"cat > notes.md <<'END'\n{_NOTES}END"),
        _shell("cat notes.md"),
        _shell("sed -i 's/braces }/both {} /' notes.md"),
        _shell("cat out.txt notes.md | wc -l > lines.txt"),
        _shell("cat lines.txt"),
    ],
)

# The same, each turn an event on a socket, continued from the one before it.
CODEX_SOCKET = replace(CODEX, name="codex-websocket", command=partial(_codex, websockets=True), method="GET")

# --- Qwen Code: chat completions ---


def _qwen(packages: Path, url: str, key: str, model: str, home: Path) -> list[str]:
    return [str(packages / ".bin/qwen"), "--yolo", "--auth-type", "openai", "-p", PROMPT]


def _qwen_environment(url: str, key: str, model: str, home: Path) -> dict[str, str]:
    return {"OPENAI_BASE_URL": f"{url}/v1", "OPENAI_API_KEY": key, "OPENAI_MODEL": model}


def _qwen_shell(command: str) -> tuple[str, Mapping[str, object]]:
    return "run_shell_command", {"command": command}


QWEN = Agent(
    name="qwen-code",
    npm=("@qwen-code/qwen-code@0.24.4",),
    command=_qwen,
    environment=_qwen_environment,
    calls=[
        ("write_file", {"file_path": "FOLDER/mill.py", "content": _WRONG}),
        _qwen_shell("python3 mill.py"),
        ("read_file", {"file_path": "FOLDER/mill.py"}),
        ("edit", {"file_path": "FOLDER/mill.py", "old_string": "return 41", "new_string": "return 42"}),
        _qwen_shell("python3 mill.py > out.txt; cat out.txt"),
        ("write_file", {"file_path": "FOLDER/notes.md", "content": _NOTES}),
        ("read_file", {"file_path": "FOLDER/notes.md"}),
        ("edit", {"file_path": "FOLDER/notes.md", "old_string": "braces }", "new_string": "both {} "}),
        _qwen_shell("cat out.txt notes.md | wc -l > lines.txt"),
        _qwen_shell("cat lines.txt"),
    ],
)

# --- pi: whichever of the three it is told ---


def _pi(api: str, packages: Path, url: str, key: str, model: str, home: Path) -> list[str]:
    of_model = {"id": model, "name": model, "contextWindow": 200_000, "maxTokens": 4096}
    base = url if api == "anthropic-messages" else f"{url}/v1"
    provider = {"baseUrl": base, "api": api, "apiKey": key, "models": [of_model]}
    (home / "models.json").write_text(json.dumps({"providers": {"millrace": provider}}), encoding="utf-8")
    asked = ("--provider", "millrace", "--model", model, "--no-session")
    return [str(packages / ".bin/pi"), "-p", PROMPT, *asked]


def _pi_environment(url: str, key: str, model: str, home: Path) -> dict[str, str]:
    return {"PI_CODING_AGENT_DIR": str(home), "PI_OFFLINE": "1"}


def _pi_edit(file: str, old: str, new: str) -> tuple[str, Mapping[str, object]]:
    return "edit", {"path": f"FOLDER/{file}", "edits": [{"oldText": old, "newText": new}]}


def _pi_bash(command: str) -> tuple[str, Mapping[str, object]]:
    return "bash", {"command": command}


PI = Agent(
    name="pi",
    npm=("@mariozechner/pi-coding-agent@0.73.1",),
    command=partial(_pi, "openai-completions"),
    environment=_pi_environment,
    calls=[
        ("write", {"path": "FOLDER/mill.py", "content": _WRONG}),
        _pi_bash("python3 mill.py"),
        ("read", {"path": "FOLDER/mill.py"}),
        _pi_edit("mill.py", "return 41", "return 42"),
        _pi_bash("python3 mill.py > out.txt; cat out.txt"),
        ("write", {"path": "FOLDER/notes.md", "content": _NOTES}),
        ("read", {"path": "FOLDER/notes.md"}),
        _pi_edit("notes.md", "braces }", "both {} "),
        _pi_bash("cat out.txt notes.md | wc -l > lines.txt"),
        _pi_bash("cat lines.txt"),
    ],
)
PI_MESSAGES = replace(PI, name="pi-messages", command=partial(_pi, "anthropic-messages"))
PI_RESPONSES = replace(PI, name="pi-responses", command=partial(_pi, "openai-responses"))

AGENTS = (OPENCODE, CLAUDE, CODEX, CODEX_SOCKET, QWEN, PI, PI_MESSAGES, PI_RESPONSES)
# Where their turns go.
PATHS = ("/v1/chat/completions", "/v1/messages", "/v1/responses")
# What every agent leaves.
FILES = {
    "lines.txt": "2\n",
    "mill.py": _WRONG.replace("41", "42"),
    "notes.md": _NOTES.replace("braces }", "both {} "),
    "out.txt": "42\n",
}
