"""The core loop and the socket it lives on."""

from __future__ import annotations

import socket

import msgspec
import pytest

from contract.frames import FrameBuffer
from engine.config import CacheConfig, SchedulerConfig, SimulatedConfig
from engine.core import messages
from engine.core.loop import EngineLoop
from engine.core.messages import CoreSocket, PeerGone, encode
from engine.runner.simulated import SimulatedRunner
from engine.scheduler import Scheduler
from engine.types import FinishReason, GrammarSpec, Request, RequestFailure, SamplingParams, TokenEvent
from tests.unit.engine.checked_runner import CheckedRunner, expected_token
from tests.unit.engine.driver import memory_plan

MEMORY = memory_plan(64, 4, 128)


class ListMailbox:
    """Commands from a list, reports into a list."""

    def __init__(self) -> None:
        self.commands: list[messages.Command] = []
        self.reports: list[messages.Report] = []
        # How long the loop was last ready to wait.
        self.patience_s = 0.0

    def receive(self, timeout_s: float) -> list[messages.Command]:
        self.patience_s = timeout_s
        commands, self.commands = self.commands, []
        return commands

    def send(self, message: messages.Report) -> None:
        self.reports.append(message)

    def events(self) -> list[TokenEvent]:
        return [
            event for each in self.reports if isinstance(each, messages.StepDone) for event in each.events
        ]

    def tokens(self, request_id: int) -> list[int]:
        return [
            token for event in self.events() if event.request_id == request_id for token in event.token_ids
        ]


def make_loop(runner: object, *, overlap: bool = False) -> tuple[EngineLoop, ListMailbox]:
    config = SchedulerConfig(max_num_batched_tokens=32, max_num_seqs=8)
    scheduler = Scheduler(config, CacheConfig(), MEMORY, model="m")
    mailbox = ListMailbox()
    return EngineLoop(scheduler, runner, mailbox, overlap=overlap), mailbox  # type: ignore[arg-type]


def request(request_id: int, prompt: tuple[int, ...], max_tokens: int = 6, **sampling: object) -> Request:
    params = SamplingParams(max_tokens=max_tokens, **sampling)  # type: ignore[arg-type]
    return Request(
        request_id=request_id, external_id=str(request_id), prompt_token_ids=prompt, sampling=params
    )


def run(loop: EngineLoop, mailbox: ListMailbox, num_ends: int) -> None:
    for _ in range(1000):
        loop.step()
        if sum(event.finish_reason is not None for event in mailbox.events()) >= num_ends:
            return
    raise AssertionError("the loop does not get there")


def test_overlapped_steps_yield_the_same_tokens_as_plain_ones() -> None:
    outputs = []
    for overlap in (False, True):
        loop, mailbox = make_loop(CheckedRunner(MEMORY.num_blocks, MEMORY.block_size), overlap=overlap)
        stop = expected_token((1, 2, 3), 0, 0, 4)
        mailbox.commands = [
            messages.Submit(request(1, (1, 2, 3), 20, stop_token_ids=(stop,))),
            messages.Submit(request(2, tuple(range(50)), 30)),
            messages.Submit(request(3, (9,) * 40, 3, n=2, best_of=2)),
        ]
        run(loop, mailbox, 4)
        outputs.append({index: sorted(mailbox.tokens(index)) for index in (1, 2, 3)})
        assert len(mailbox.tokens(1)) == 5
    assert outputs[0] == outputs[1]


def test_a_step_is_planned_while_the_one_before_it_runs() -> None:
    launched, collected = [], []

    class Watching(CheckedRunner):
        def launch(self, plan):  # type: ignore[no-untyped-def]
            step = super().launch(plan)
            launched.append((plan.step_id, len(collected)))
            wait = step.wait
            step.wait = lambda: (collected.append(plan.step_id), wait())[1]  # type: ignore[method-assign]
            return step

    loop, mailbox = make_loop(Watching(MEMORY.num_blocks, MEMORY.block_size), overlap=True)
    mailbox.commands = [messages.Submit(request(1, (1, 2, 3), 10))]
    run(loop, mailbox, 1)
    # When step n is launched, only n - 2 have been collected.
    assert [(step, before) for step, before in launched if step <= 9] == [
        (step, max(0, step - 2)) for step in range(1, 10)
    ]


def test_a_failing_sequence_ends_alone() -> None:
    runner = CheckedRunner(MEMORY.num_blocks, MEMORY.block_size, poison_token_id=77)
    loop, mailbox = make_loop(runner)
    mailbox.commands = [
        messages.Submit(request(index, (index, 77 if index == 2 else 5))) for index in range(5)
    ]
    run(loop, mailbox, 5)
    failures = {event.request_id: event.failure for event in mailbox.events() if event.failure}
    assert list(failures) == [2]
    assert failures[2]
    assert failures[2].reason == "POISONED_REQUEST"
    # All five, three of them, two, and the guilty one alone; or fewer halves, where it comes early. Its probe
    # does not fail.
    steps = [each for each in mailbox.reports if isinstance(each, messages.StepDone)]
    assert 2 <= sum(each.num_failed_steps for each in steps) <= 4
    assert all(len(mailbox.tokens(index)) == 6 for index in (0, 1, 3, 4))


@pytest.mark.parametrize("num_good", [1, 2, 3])
@pytest.mark.parametrize("num_poisoned", [1, 2])
def test_nobody_is_blamed_for_those_who_left_while_their_step_ran(num_good: int, num_poisoned: int) -> None:
    runner = CheckedRunner(MEMORY.num_blocks, MEMORY.block_size, poison_token_id=77)
    loop, mailbox = make_loop(runner, overlap=True)
    good, poisoned = range(num_good), range(num_good, num_good + num_poisoned)
    mailbox.commands = [
        *(messages.Submit(request(index, (1, 2, 3))) for index in good),
        *(messages.Submit(request(index, (1, 77, 3))) for index in poisoned),
    ]
    loop.step()
    mailbox.commands = [messages.Cancel(index, FinishReason.CANCELLED) for index in poisoned]
    run(loop, mailbox, num_good + num_poisoned)
    assert not any(event.failure for event in mailbox.events())
    assert all(len(mailbox.tokens(index)) == 6 for index in good)


@pytest.mark.parametrize("num_requests", [2, 5])
def test_when_every_step_fails_the_runner_is_broken(num_requests: int) -> None:
    runner = CheckedRunner(MEMORY.num_blocks, MEMORY.block_size, fault=lambda plan: "no device")
    loop, mailbox = make_loop(runner)
    mailbox.commands = [messages.Submit(request(index, (index, 5))) for index in range(num_requests)]
    run(loop, mailbox, num_requests)
    assert loop.stopped
    assert loop.broken
    assert any(isinstance(each, messages.Broken) for each in mailbox.reports)
    assert {event.failure.reason for event in mailbox.events() if event.failure} == {"STEP_FAILED"}


@pytest.mark.parametrize("together", [1, 2, 3])
def test_poisoned_requests_with_nothing_else_running_end_themselves_alone(together: int) -> None:
    runner = CheckedRunner(MEMORY.num_blocks, MEMORY.block_size, poison_token_id=77)
    loop, mailbox = make_loop(runner)
    for first in range(0, 12, together):
        mailbox.commands = [messages.Submit(request(first + each, (77, 5))) for each in range(together)]
        run(loop, mailbox, first + together)
    failures = [event.failure.reason for event in mailbox.events() if event.failure]
    assert failures == ["POISONED_REQUEST"] * 12
    assert not loop.stopped
    mailbox.commands = [messages.Submit(request(99, (1, 2)))]
    run(loop, mailbox, 13)
    assert len(mailbox.tokens(99)) == 6


def test_a_runner_that_breaks_under_one_request_alone_is_found_out_at_once() -> None:
    runner = CheckedRunner(MEMORY.num_blocks, MEMORY.block_size, fault=lambda plan: "no device")
    loop, mailbox = make_loop(runner)
    mailbox.commands = [messages.Submit(request(1, (1,)))]
    run(loop, mailbox, 1)
    assert [event.failure.reason for event in mailbox.events() if event.failure] == ["STEP_FAILED"]
    assert loop.broken


def test_what_is_left_of_the_last_request_waits_a_moment_for_the_next_one() -> None:
    runner = CheckedRunner(MEMORY.num_blocks, MEMORY.block_size)
    loop, mailbox = make_loop(runner)
    mailbox.commands = [messages.Submit(request(1, (1, 2, 3), 1))]
    run(loop, mailbox, 1)
    assert runner.num_states() == 1
    # The next one comes in time: one plan forgets the first and begins the second.
    mailbox.commands = [messages.Submit(request(2, (4, 5), 1))]
    num_reports = len(mailbox.reports)
    loop.step()
    assert 0.0 < mailbox.patience_s < 0.1
    assert len(mailbox.tokens(2)) == 1
    assert len(mailbox.reports) == num_reports + 1
    assert runner.num_states() == 1
    # Nobody comes: it goes by itself, and then there is nothing to do. It counts as no step.
    loop.step()
    assert runner.num_states() == 0
    loop.step()
    assert mailbox.patience_s > 0.1
    totals = [each for report in mailbox.reports for each in getattr(report, "totals", ())]
    assert [each.num_sequences for each in totals] == [1, 1]


def test_checks_are_answered_between_steps() -> None:
    loop, mailbox = make_loop(CheckedRunner(MEMORY.num_blocks, MEMORY.block_size), overlap=True)
    mailbox.commands = [messages.Submit(request(1, (1, 2, 3), 50))]
    loop.step()
    mailbox.commands = [messages.Check(9)]
    loop.step()
    (checked,) = [each for each in mailbox.reports if isinstance(each, messages.Checked)]
    assert (checked.token, checked.violation, checked.num_requests) == (9, "", 1)
    mailbox.commands = [messages.Cancel(1), messages.Check(10)]
    loop.step()
    checked = next(
        each for each in mailbox.reports if isinstance(each, messages.Checked) and each.token == 10
    )
    assert checked.num_runner_states == checked.num_requests == 0
    assert checked.num_unreferenced_blocks == checked.num_total_blocks


def test_a_request_can_be_ended_with_an_error_from_outside() -> None:
    loop, mailbox = make_loop(SimulatedRunner(SimulatedConfig()))
    mailbox.commands = [messages.Submit(request(1, (1, 2, 3), 50))]
    loop.step()
    mailbox.commands = [messages.Fail(1, RequestFailure(reason="DRAINING", message="enough"))]
    loop.step()
    assert mailbox.events()[-1].failure


def test_messages_survive_the_socket_in_any_pieces() -> None:
    ours, theirs = socket.socketpair()
    core = CoreSocket(theirs)
    sent = [
        messages.Submit(request(1, tuple(range(5000)), logit_bias={3: 0.5})),
        messages.Cancel(4),
        messages.Stop(),
    ]
    data = b"".join(encode(message) for message in sent)
    received: list[messages.Command] = []
    for start in range(0, len(data), 777):
        ours.sendall(data[start : start + 777])
        received += core.receive(0.0)
    while len(received) < len(sent):
        received += core.receive(1.0)
    assert received == sent
    core.send(messages.LoadProgress("load", 0.5))
    assert FrameBuffer().feed(ours.recv(1000))
    ours.close()
    with pytest.raises(PeerGone):
        core.receive(1.0)
    theirs.close()


def test_more_than_the_socket_holds_arrives_while_nobody_receives() -> None:
    ours, theirs = socket.socketpair()
    # If it stays full, sending fails.
    ours.settimeout(30.0)
    core = CoreSocket(theirs)
    sent = [messages.Submit(request(number, tuple(range(20_000)))) for number in range(60)]
    for message in sent:
        ours.sendall(encode(message))
    ours.close()
    received: list[messages.Command] = []
    while len(received) < len(sent):
        received += core.receive(1.0)
    assert received == sent
    with pytest.raises(PeerGone):
        core.receive(1.0)
    theirs.close()


def test_a_core_that_takes_nothing_holds_a_bounded_number_of_bytes() -> None:
    ours, theirs = socket.socketpair()
    ours.settimeout(1.0)
    core = CoreSocket(theirs)
    commands = encode(messages.Submit(request(1, tuple(range(200_000))))) * 1000
    with pytest.raises(TimeoutError):
        ours.sendall(commands)
    # It reads on.
    assert core.receive(1.0)
    ours.close()
    theirs.close()


class Making(CheckedRunner):
    """Has the grammars of which it was told."""

    made: frozenset[bytes] = frozenset()

    def is_ready(self, grammar: GrammarSpec, tenant: str) -> bool:
        return grammar.payload in self.made


def guided(request_id: int, payload: bytes) -> Request:
    grammar = GrammarSpec(digest="", payload=payload, backend="any")
    return msgspec.structs.replace(request(request_id, (1, 2, 3)), grammar=grammar)


@pytest.mark.parametrize("overlap", [False, True])
def test_nobody_waits_for_the_grammar_of_another_request(overlap: bool) -> None:
    runner = Making(MEMORY.num_blocks, MEMORY.block_size)
    loop, mailbox = make_loop(runner, overlap=overlap)
    mailbox.commands = [
        messages.Submit(guided(1, b"slow")),
        messages.Submit(guided(2, b"slower")),
        messages.Submit(request(3, (4, 5))),
        messages.Check(7),
    ]
    run(loop, mailbox, 1)
    assert [each.request_id for each in mailbox.events() if each.finish_reason is not None] == [3]
    # It looks again soon, and says that there is something to do.
    for _ in range(4):
        loop.step()
    assert 0 < mailbox.patience_s <= 0.01
    checked = [each for each in mailbox.reports if isinstance(each, messages.Checked)]
    assert checked[0].num_requests >= 2
    assert not checked[0].violation
    runner.made = frozenset({b"slow"})
    run(loop, mailbox, 2)
    assert len(mailbox.tokens(1)) == 6
    (end,) = [each for each in mailbox.events() if each.request_id == 1 and each.statistics]
    assert end.statistics
    assert list(end.statistics.delayed_by_s) == ["grammar_compile"]
    # One that is cancelled meanwhile ends as every other does.
    mailbox.commands = [messages.Cancel(2, FinishReason.CANCELLED)]
    run(loop, mailbox, 3)
    (last,) = [each for each in mailbox.events() if each.request_id == 2]
    assert last.finish_reason is FinishReason.CANCELLED
    assert not last.token_ids


def test_requests_that_wait_for_grammars_fail_with_the_runner() -> None:
    runner = Making(MEMORY.num_blocks, MEMORY.block_size, fault=lambda plan: "no device")
    loop, mailbox = make_loop(runner)
    mailbox.commands = [
        messages.Submit(guided(1, b"slow")),
        messages.Submit(request(2, (4, 5))),
        messages.Submit(request(3, (6, 5))),
    ]
    run(loop, mailbox, 3)
    assert loop.broken
    assert {each.request_id for each in mailbox.events() if each.failure} == {1, 2, 3}
