"""The page at /ui in a browser: every control, by keyboard, on a phone, in the dark, when things break."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.e2e.browser import CHROMIUM, Page, browser
from tests.e2e.stack import CONFIG, Stack, eventually, running_stack
from tests.e2e.streaming import PACE

pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="Chromium is not installed (apt-get install chromium)"
)

_AXE = "axe-core@4.14.1"
_SETTINGS = """[gateway.store]
tenants = ["development"]
key = "a key of this test that is long enough"
[gateway.prices."*"]
prompt = 2.0
cached_prompt = 1.0
completion = 3.0

[tiers.interactive]"""
_WORKS = "document.getElementById('ask') !== null"
_ANSWERED = "document.querySelector('.message.assistant:last-child .facts') !== null"
# What axe is asked for: WCAG 2.2 to level AA.
_TAGS = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa"]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Simulated engines, whose answers last long enough to be stopped, and two gateways to lose one of."""
    config = CONFIG.replace("[tiers.interactive]", _SETTINGS)
    arguments = ("--simulated", "--gateways", "2")
    directory = tmp_path_factory.mktemp("stack")
    with running_stack(directory, *arguments, config=config, environment=PACE) as stack:
        yield stack


@pytest.fixture
def page(served: Stack, tmp_path: Path) -> Iterator[Page]:
    """A browser that has just been opened; what it asked for was this deployment's, and nothing failed."""
    with browser(tmp_path / "browser") as opened:
        opened.resize(1280)
        yield opened
        hosts = {urlsplit(url).netloc for url in opened.asked if urlsplit(url).scheme in ("http", "https")}
        assert hosts <= {served.address}
        assert opened.faults == []


def enter(page: Page, served: Stack) -> None:
    page.open(f"{served.url}/ui/")
    page.fill("#key-input", served.state.api_key)
    page.click("#key-form button[type=submit]")
    page.wait(_WORKS)


def say(page: Page, text: str, num_tokens: int = 12) -> None:
    """Asks, and waits for the whole answer."""
    set_options(page, max_tokens=str(num_tokens))
    page.fill("#ask", text)
    page.click("#send")
    page.wait(_ANSWERED)


def set_options(page: Page, **values: str) -> None:
    if not page.exists("#options"):
        page.click("#open-options")
    for name, value in values.items():
        page.fill(f"#option-{name}", value)


def test_a_wrong_key_is_refused_in_the_apis_words_and_a_right_one_is_kept_for_the_tab(
    page: Page, served: Stack
) -> None:
    page.open(f"{served.url}/ui")
    page.fill("#key-input", "mr-wrong")
    page.click("#key-form button[type=submit]")
    page.wait("document.getElementById('key-error').textContent.includes('key')")
    assert page.run("sessionStorage.getItem('millrace.key')") is None
    page.fill("#key-input", served.state.api_key)
    page.click("#key-form button[type=submit]")
    page.wait(_WORKS)
    page.open(f"{served.url}/ui/")
    page.wait(_WORKS)
    assert served.state.api_key not in str(page.run("JSON.stringify(localStorage)"))


def test_an_answer_shows_its_waterfall_its_cost_and_its_tokens(page: Page, served: Stack) -> None:
    enter(page, served)
    say(page, "Say *something*.")
    facts = page.text(".facts")
    assert all(word in facts for word in ("first token", "tokens in", "12 out", "cost")), facts
    page.click_text("Where the time went")
    times = page.run(
        "[...document.querySelectorAll('.details tbody td')].map(cell => parseFloat(cell.innerText))"
    )
    # Each is rounded.
    assert sum(times[:-1]) == pytest.approx(times[-1], abs=0.6 * len(times))
    assert page.exists(".details .hint")
    page.click_text("Tokens")
    page.run("document.querySelector('.tokens').focus()")
    page.press("ArrowRight")
    page.wait("document.querySelectorAll('.details tbody tr').length >= 1")
    assert "%" in page.text(".details table")
    assert page.run("document.querySelectorAll('.tokens span').length") == 12


def test_what_is_opened_under_an_answer_stays_when_a_late_frame_is_drawn(page: Page, served: Stack) -> None:
    enter(page, served)
    page.run("window.held = []; window.requestAnimationFrame = (draw) => held.push(draw)")
    say(page, "Say *something*.")
    assert page.run("held.length") >= 1
    page.click_text("Tokens")
    page.run("document.querySelector('.tokens').focus(); held.forEach((draw) => draw(0))")
    assert page.run("document.activeElement.className") == "tokens"


_SHOWN_AS_DELAYED = """(async () => {
  const app = document.querySelector("script[type=module]").src;
  const { facts } = await import(app.replace("app.js", "answer.js"));
  const { store } = await import(app.replace("app.js", "store.js"));
  const message = store.list[0].messages[1];
  const found = (request_id, overlap_ms) => ({ request_id, cause: "batch_full", overlap_ms });
  const delayed_by_requests = [found(message.request.replace("chatcmpl-", ""), 25), found("r-elsewhere", 6)];
  const timings = { ...message.usage.timings, delayed_by_ms: { batch_full: 30 }, delayed_by_requests };
  document.querySelector("main").append(facts({ ...message, usage: { ...message.usage, timings } }, {}));
})()"""


def test_a_waterfall_names_the_tenants_own_requests_that_were_in_the_way(page: Page, served: Stack) -> None:
    enter(page, served)
    say(page, "Was it *me*?")
    page.run(_SHOWN_AS_DELAYED)
    page.click_text("Where the time went")
    told = page.text("main > .about .details")
    assert "Held back by: a full batch (30 ms)." in told
    assert (
        "Your own requests that the engine worked on meanwhile: “Was it *me*?” (a full batch, 25 ms); "
        in told
    )
    assert "r-elsewhere (a full batch, 6 ms)." in told


def test_an_answer_is_stopped_and_another_one_is_asked_for(page: Page, served: Stack) -> None:
    enter(page, served)
    set_options(page, max_tokens="2000")
    page.fill("#ask", "Write on.")
    page.click("#send")
    page.wait("(document.querySelector('.message.assistant .text')?.innerText.length ?? 0) > 20")
    page.click("#stop")
    page.wait("document.getElementById('send').checkVisibility()")
    assert "Stopped" in page.text("main")
    assert len(page.text(".message.assistant .text")) > 20
    set_options(page, max_tokens="5")
    page.click_text("Try again")
    page.wait(_ANSWERED)
    assert "5 out" in page.text(".facts")
    served.assert_nothing_leaked()


def test_fields_that_are_wrong_are_named(page: Page, served: Stack) -> None:
    enter(page, served)
    set_options(page, schema="{")
    page.fill("#ask", "Hello")
    page.click("#send")
    page.wait("document.getElementById('error-schema').textContent.includes('JSON')")
    assert page.run("document.activeElement.id") == "option-schema"
    assert page.text(".messages") == ""
    # What the API refuses stands where its parameter is entered, and under the answer with the request's id.
    set_options(page, schema="", temperature="9")
    page.click("#send")
    page.wait("document.querySelector('.message .notice') !== null")
    assert "temperature" in page.text(".message .notice")
    assert "Request" in page.text(".message .notice")
    assert page.run("document.getElementById('option-temperature').getAttribute('aria-invalid')") == "true"


def test_schemas_tools_tier_and_sampling_are_sent(page: Page, served: Stack) -> None:
    enter(page, served)
    page.run(
        "window.sent = []; const asked = window.fetch; "
        "window.fetch = (url, options) => { if (options?.body) sent.push(JSON.parse(options.body)); "
        "return asked(url, options); }"
    )
    set_options(page, tools='[{"name": "add", "parameters": {"type": "object"}}]', top_p="0.9", seed="7")
    set_options(page, system="Be brief.", stop_texts="END", tier="priority", tool_choice="none")
    say(page, "Hello")
    sent = page.run("sent.find(each => each.stream)")
    assert sent["tools"][0]["function"]["name"] == "add"
    assert (sent["top_p"], sent["seed"], sent["stop"], sent["tool_choice"]) == (0.9, 7, ["END"], "none")
    assert (sent["messages"][0]["role"], sent["service_tier"]) == ("system", "priority")


def test_conversations_are_kept_by_the_server_exported_and_deleted(page: Page, served: Stack) -> None:
    enter(page, served)
    say(page, "Remember the mill.")
    page.wait("(localStorage.getItem('millrace.kept') ?? '').includes('conv_')")
    answer = page.text(".message.assistant .text")
    # As another tab with the same key.
    page.run(
        f"sessionStorage.clear(); sessionStorage.setItem('millrace.key', {json.dumps(served.state.api_key)})"
    )
    page.open(f"{served.url}/ui/")
    page.wait("document.querySelector('#conversations button') !== null")
    page.click("#conversations button")
    page.wait("document.querySelector('.message.assistant .text') !== null")
    assert page.text(".message.assistant .text") == answer
    page.run(
        "URL.createObjectURL = (blob) => { blob.text().then(text => window.file = text); return 'blob:x'; }; "
        "HTMLAnchorElement.prototype.click = () => {}"
    )
    page.click("#export")
    page.wait("window.file")
    (exported,) = json.loads(page.run("window.file"))["conversations"]
    assert answer.split() == exported["messages"][1]["content"].split()
    page.run(
        "const moved = new DataTransfer(); moved.items.add(new File([window.file], 'x.json')); "
        "const input = document.getElementById('import-file'); input.files = moved.files; "
        "input.dispatchEvent(new Event('change'))"
    )
    page.wait("document.querySelectorAll('#conversations li').length === 2")
    page.run("[...document.querySelectorAll('#conversations .delete')].at(-1).click()")
    page.wait("document.querySelectorAll('#conversations li').length === 1")
    page.wait("localStorage.getItem('millrace.kept') === '[]'")


def test_two_models_are_compared_blind_until_it_is_decided(page: Page, served: Stack) -> None:
    enter(page, served)
    set_options(page, max_tokens="4")
    page.run("location.hash = '#compare'")
    for number in range(1, 3):
        page.fill("#compare-ask", f"Question {number}")
        page.click("#ask-both")
        page.wait("document.getElementById('vote').childElementCount > 0")
        assert page.run("document.querySelectorAll('.side .text').length") == 2
        assert served.model not in page.text("#sides")
        page.click_text("Left is better")
        page.wait(f"document.getElementById('verdict').innerText.includes('Votes: {number}')")
    assert "Not decided yet" in page.text("#verdict")
    page.click_text("Reveal")
    assert served.model in page.text("#verdict")


def test_usage_and_operators_views_show_what_was_asked(page: Page, served: Stack) -> None:
    enter(page, served)
    say(page, "Count this.")
    # A moment after the answer it is in the ledger's database, which the page asks once.
    headers = {"headers": {"authorization": f"Bearer {served.state.api_key}"}}
    asked = f"fetch('/v1/usage', {json.dumps(headers)}).then((each) => each.json())"
    asked = f"{asked}.then((each) => each.data.length)"
    assert eventually(lambda: page.run(asked) > 0)
    page.run("location.hash = '#usage'")
    page.wait("document.querySelector('#usage-table table') !== null")
    page.fill("#usage-by", "model")
    page.wait(f"document.querySelector('#usage-table').innerText.includes({json.dumps(served.model)})")
    page.run("location.hash = '#operators'")
    page.wait("document.querySelectorAll('#now table').length === 2")
    assert "standard" in page.text("#now")
    assert "ready" in page.text("#now")
    # The engine's own figures: its latest steps took some time. Its address is a head of the row.
    engines = "document.querySelectorAll('#now table')[1]"
    column = f"[...{engines}.querySelectorAll('th')].findIndex((each) => each.textContent === 'Step p50')"
    page.wait(f"/[1-9]/.test({engines}.querySelectorAll('td')[{column} - 1].textContent)")


def test_a_killed_gateway_leaves_the_answer_so_far_and_it_goes_on(page: Page, served: Stack) -> None:
    enter(page, served)
    set_options(page, max_tokens="2000")
    page.fill("#ask", "Write on.")
    page.click("#send")
    page.wait("(document.querySelector('.message.assistant .text')?.innerText.length ?? 0) > 20")
    gateways = [each.pid for each in served.state.processes if each.name.startswith("gateway")]
    for pid in gateways:
        os.kill(pid, signal.SIGKILL)
    page.wait("document.querySelector('.message.assistant .notice') !== null")
    assert "connection was lost" in page.text(".message .notice")
    so_far = page.text(".message.assistant .text")
    assert len(so_far) > 20
    set_options(page, max_tokens="5")

    def is_answered() -> bool:
        page.click_text("Try again")
        page.wait("document.getElementById('send').checkVisibility()")
        return bool(page.run(_ANSWERED))

    # The supervisor starts them again meanwhile.
    while not is_answered():
        page.wait("document.querySelector('.message.assistant .notice') !== null")
    assert page.run("document.querySelectorAll('.message.assistant').length") == 1


def test_an_answer_that_a_killed_gateway_has_cut_is_continued_where_it_ended(
    page: Page, served: Stack
) -> None:
    enter(page, served)
    set_options(page, max_tokens="2000")
    page.fill("#ask", "Write on.")
    page.click("#send")
    page.wait("(document.querySelector('.message.assistant .text')?.innerText.length ?? 0) > 20")
    for each in served.state.processes:
        if each.name.startswith("gateway"):
            os.kill(each.pid, signal.SIGKILL)
    page.wait("document.querySelector('.message.assistant .notice') !== null")
    so_far = page.text(".message.assistant .text").split()
    set_options(page, max_tokens="5")
    page.run(
        "window.sent = []; const asked = window.fetch; "
        "window.fetch = (url, options) => { if (options?.body) sent.push(JSON.parse(options.body)); "
        "return asked(url, options); }"
    )
    # Until the supervisor has started the gateways again it is refused, and is still there to be continued.
    page.click_text("Continue")
    page.wait("document.getElementById('send').checkVisibility()")
    while not page.run(_ANSWERED):
        page.click_text("Continue")
        page.wait("document.getElementById('send').checkVisibility()")
    body = page.run("sent.findLast(each => each.stream)")
    assert body["continue_final_message"] is True
    assert [each["role"] for each in body["messages"]] == ["user", "assistant"]
    assert body["messages"][-1]["content"].split() == so_far
    whole = page.text(".message.assistant .text").split()
    # The last word may have been one of two halves.
    assert whole[: len(so_far) - 1] == so_far[:-1]
    assert len(" ".join(whole)) > len(" ".join(so_far))
    assert "5 out" in page.text(".facts")
    assert page.run("document.querySelectorAll('.message.assistant').length") == 1


def test_everything_is_reached_by_keyboard(page: Page, served: Stack) -> None:
    page.open(f"{served.url}/ui/")
    page.wait("document.activeElement.id === 'key-input'")
    page.type(served.state.api_key)
    page.press("Enter")
    page.wait(_WORKS)
    page.run("document.activeElement.blur()")
    page.tab_to("at.classList.contains('skip')")
    page.tab_to("at.id === 'open-options'")
    page.press("Enter")
    page.wait("document.getElementById('options') !== null")
    page.tab_to("at.id === 'option-max_tokens'")
    page.type("6")
    page.tab_to("at.id === 'ask'")
    page.type("Hello")
    page.press("Enter")
    page.wait(_ANSWERED)
    page.tab_to("at.innerText === 'Tokens'")
    page.press("Enter")
    page.tab_to("at.classList.contains('tokens')")
    page.press("ArrowRight")
    page.wait("document.querySelector('.tokens .chosen') !== null")
    page.tab_to("at.dataset.view === 'compare'")
    page.press("Enter")
    page.wait("document.getElementById('compare-ask') !== null")


@pytest.mark.parametrize("language", ["en", "de", "es"])
def test_nothing_is_wider_than_a_phone(page: Page, served: Stack, language: str) -> None:
    page.resize(320, 640)
    enter(page, served)
    page.fill("#language", language)
    say(page, "```\n" + "wide " * 60 + "\n```\n\n| a | b |\n|---|---|\n| " + "x" * 200 + " | y |")
    for view in ("chat", "compare", "usage", "operators"):
        page.run(f"location.hash = '#{view}'")
        page.wait(f"document.querySelector('[data-view={view}]').getAttribute('aria-current') === 'page'")
        page.wait(
            "document.documentElement.scrollWidth <= 320 && document.querySelector('main').scrollWidth <= 320"
        )


def _axe_script(folder: Path) -> str:
    """The source of axe-core, from the registry; skips where it cannot be had."""
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("npm is not installed, so that axe-core cannot be had")
    command = [npm, "pack", "--silent", _AXE]
    packed = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if packed.returncode:
        pytest.skip(f"{_AXE} cannot be fetched: {packed.stderr[-200:]}")
    shutil.unpack_archive(folder / packed.stdout.strip().splitlines()[-1], folder)
    return (folder / "package" / "axe.min.js").read_text(encoding="utf-8")


def test_axe_finds_nothing(page: Page, served: Stack, tmp_path: Path) -> None:
    axe = _axe_script(tmp_path)

    def check(where: str) -> None:
        page.run(f"{axe}; 0")
        found = page.run(
            f"axe.run({{runOnly: {json.dumps(_TAGS)}}}).then(result => result.violations.map("
            "each => [each.id, each.nodes.map(node => node.html.slice(0, 200))]))"
        )
        assert found == [], where

    page.open(f"{served.url}/ui/")
    page.wait("document.getElementById('key-dialog').open")
    check("key")
    enter(page, served)
    for scheme in ("light", "dark"):
        page.prefer(scheme)
        say(page, "Hello")
        page.click_text("Where the time went")
        check(f"waterfall, {scheme}")
        page.click_text("Tokens")
        check(f"tokens, {scheme}")
        for view, ready in {
            "compare": "document.getElementById('verdict') !== null",
            "usage": "document.querySelector('#usage-table table') !== null",
            "operators": "document.querySelector('#now table') !== null",
            "chat": _WORKS,
        }.items():
            page.run(f"location.hash = '#{view}'")
            page.wait(ready)
            check(f"{view}, {scheme}")
