"""Headless Chromium as tests drive it: by its own protocol, one page at a time, with all that it asks for."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from websockets.sync.client import ClientConnection, connect

from tests.e2e.stack import LIMIT_S, eventually

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
# Names of keys that write nothing, with their codes.
_KEYS = {"Tab": 9, "Enter": 13, "Escape": 27, "Home": 36, "ArrowLeft": 37, "ArrowRight": 39, "ArrowDown": 40}
_SHIFT = 8
_OPTIONS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--no-proxy-server"),
    *("--remote-debugging-port=0", "--hide-scrollbars", "--force-color-profile=srgb", "--lang=en"),
)


class Page:
    """One tab. `asked` are the addresses that it has requested, `faults` what its console complains of."""

    def __init__(self, socket: ClientConnection) -> None:
        self._socket = socket
        self._number = 0
        self.asked: list[str] = []
        self.faults: list[str] = []
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self._session: str | None = session
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.send(f"{domain}.enable")

    _session = None

    def send(self, method: str, **parameters: Any) -> Any:
        """The answer to a command of the protocol."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        self._socket.send(json.dumps(message))
        while True:
            answer = json.loads(self._socket.recv(timeout=LIMIT_S))
            if answer.get("id") == self._number:
                assert "error" not in answer, (method, answer["error"])
                return answer["result"]
            self._hear(answer)

    def _hear(self, event: dict[str, Any]) -> None:
        parameters = event.get("params", {})
        match event.get("method"):
            case "Network.requestWillBeSent":
                self.asked.append(parameters["request"]["url"])
            case "Runtime.exceptionThrown":
                details = parameters["exceptionDetails"]
                self.faults.append(details.get("exception", {}).get("description") or details["text"])
            case "Log.entryAdded" if parameters["entry"]["level"] == "error":
                entry = parameters["entry"]
                # What the API refuses is an error to the browser's log, and none of the page.
                if entry["source"] != "network":
                    self.faults.append(entry["text"])

    def run(self, script: str) -> Any:
        """The value of an expression, awaited where it is a promise."""
        answer = self.send(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True, userGesture=True
        )
        assert "exceptionDetails" not in answer, (script, answer["exceptionDetails"])
        return answer["result"].get("value")

    def wait(self, condition: str) -> None:
        """Waits until an expression is true."""
        is_true = eventually(lambda: bool(self.run(f"Boolean({condition})")))
        assert is_true, (condition, self.text("body"), self.faults)

    def open(self, url: str) -> None:
        """Goes to a page, and waits until it is loaded."""
        self.send("Page.navigate", url=url)
        self.wait(f"document.readyState === 'complete' && location.href.startsWith({json.dumps(url)})")

    def text(self, selector: str) -> str:
        """What can be read there; "" where there is no such element."""
        return str(self.run(f"document.querySelector({json.dumps(selector)})?.innerText ?? ''"))

    def exists(self, selector: str) -> bool:
        """Whether an element is there and shown."""
        return bool(self.run(f"document.querySelector({json.dumps(selector)})?.checkVisibility() ?? false"))

    def click(self, selector: str) -> None:
        """Clicks an element as a script does."""
        self.wait(f"document.querySelector({json.dumps(selector)})?.checkVisibility()")
        self.run(f"document.querySelector({json.dumps(selector)}).click()")

    def click_text(self, text: str, within: str = "main") -> None:
        """Clicks the last button with this label."""
        buttons = f"[...document.querySelectorAll('{within} button')]"
        found = f"{buttons}.findLast(each => each.innerText === {json.dumps(text)})"
        self.wait(f"{found}?.checkVisibility()")
        self.run(f"{found}.click()")

    def fill(self, selector: str, value: str) -> None:
        """Writes into a field, or chooses of a list."""
        self.wait(f"document.querySelector({json.dumps(selector)})?.checkVisibility()")
        self.run(
            f"(() => {{ const field = document.querySelector({json.dumps(selector)}); "
            f"field.value = {json.dumps(value)}; "
            "field.dispatchEvent(new Event('input')); field.dispatchEvent(new Event('change')); })()"
        )

    def type(self, text: str) -> None:
        """Types where the focus is."""
        self.send("Input.insertText", text=text)

    def press(self, key: str, *, shift: bool = False) -> None:
        """Presses a key."""
        event = {
            "key": key,
            "code": key,
            "windowsVirtualKeyCode": _KEYS[key],
            "modifiers": _SHIFT if shift else 0,
        }
        text = {"text": "\r"} if key == "Enter" else {}
        self.send("Input.dispatchKeyEvent", type="keyDown", **event, **text)
        self.send("Input.dispatchKeyEvent", type="keyUp", **event)

    def tab_to(self, condition: str, most: int = 60) -> None:
        """Presses Tab until the element with the focus, `at`, fulfils a condition."""
        for _ in range(most):
            self.press("Tab")
            if self.run(f"((at) => Boolean({condition}))(document.activeElement)"):
                return
        raise AssertionError(f"Tab never reaches {condition}")

    def resize(self, width: int, height: int = 800) -> None:
        """Sets the size of what is seen, in CSS pixels."""
        self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )

    def prefer(self, scheme: str) -> None:
        """Sets the colours that the system asks for: "light" or "dark"."""
        self.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def picture(self, path: Path) -> None:
        """Writes what is seen as PNG."""
        data = self.send("Page.captureScreenshot", format="png")["data"]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(base64.b64decode(data))


@contextmanager
def browser(directory: Path) -> Iterator[Page]:
    """A page of a Chromium of its own, which keeps its profile in the directory."""
    assert CHROMIUM is not None, "tests without it are skipped"
    process = subprocess.Popen(
        [CHROMIUM, *_OPTIONS, f"--user-data-dir={directory}", "about:blank"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        told = directory / "DevToolsActivePort"
        assert eventually(lambda: told.is_file() and len(told.read_text().split()) == 2), "no Chromium"
        port, path = told.read_text().split()
        with connect(f"ws://127.0.0.1:{port}{path}", max_size=None, proxy=None) as socket:
            yield Page(socket)
    finally:
        process.terminate()
        process.wait(LIMIT_S)
