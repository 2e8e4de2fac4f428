"""Drafts are verified where they pay, and nowhere else: by numbers, and by whole runs in virtual time."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.runner.speculation.economics import Economics, StepCost
from engine.runner.speculation.owners import LEAST_MARGIN, OwnerExperience
from engine.runner.speculation.progress import DraftProgress
from engine.runner.speculation.step_times import StepTimes
from tests.unit.engine.runner.virtual_drafts import Machine, Run, run

# What everybody keeps of what he has without speculation.
KEPT = 0.98


def plain(economics: Economics, seconds: float, num_sequences: int, times: int = 3) -> None:
    for _ in range(times):
        economics.stepped(
            StepCost(seconds=seconds, num_sequences=num_sequences, num_drafts=0, decodes_only=True)
        )


def measured(
    *, plain_s: float, per_row_s: float, per_draft_s: float, num_sequences: int = 1, most: int = 16
) -> Economics:
    """Economics that have seen plain steps, steps with drafts, and proposals."""
    economics = Economics(4, 0.05)
    plain(economics, plain_s, num_sequences)
    for num_drafts in range(1, most + 1):
        for _ in range(3):
            seconds = plain_s + per_row_s * num_drafts
            economics.stepped(
                StepCost(
                    seconds=seconds, num_sequences=num_sequences, num_drafts=num_drafts, decodes_only=True
                )
            )
            economics.proposed(num_sequences, 2, 2 * per_draft_s)
    for costs in economics._sizes.values():
        # These steps accepted nothing; what they teach is not the matter here. Nothing is left for trials.
        costs.margin, costs.balance, costs.credit_s = LEAST_MARGIN, 0.0, 0.0
        costs.steps_since_plain = 0
    return economics


def with_acceptance(share: float) -> DraftProgress:
    """A sequence whose drafts hold so often, one like the other."""
    progress = DraftProgress(found=1.0)
    for number in range(4000):
        held = 0
        while held < 4 and (number * 7919 + held * 104729) % 1000 < 1000 * share:
            held += 1
        progress.acceptance.saw(4, held)
    for place in range(8):
        # Without the noise of the last few.
        progress.acceptance._tried[place], progress.acceptance._accepted[place] = 1e6, 1e6 * share
    return progress


@pytest.mark.parametrize(
    ("share", "per_row_s", "per_draft_s", "expected"),
    [
        # Free drafts: as many as there may be. Then each next one must be worth its cost.
        (0.9, 0.0, 0.0, 4),
        (0.9, 0.01, 0.1, 4),
        (0.5, 0.0, 0.15, 2),
        (0.5, 0.01, 0.4, 1),
        (0.5, 0.0, 0.6, 0),
        (0.1, 0.05, 0.06, 0),
        (0.01, 0.0, 0.01, 0),
    ],
)
def test_drafts_are_as_many_as_pay_in_measured_time(
    share: float, per_row_s: float, per_draft_s: float, expected: int
) -> None:
    economics = measured(plain_s=1.0, per_row_s=per_row_s, per_draft_s=per_draft_s)
    assert economics.rounds([with_acceptance(share)], ["a"], [4]) == [expected]


@given(
    share=st.floats(0.0, 1.0),
    per_row_s=st.floats(0.0, 0.5),
    per_draft_s=st.floats(0.0, 0.5),
    most=st.integers(1, 8),
    unread=st.integers(0, 40),
    by_forwards=st.booleans(),
)
def test_a_sequence_alone_is_decided_about_as_one_of_many(
    share: float, per_row_s: float, per_draft_s: float, most: int, unread: int, by_forwards: bool
) -> None:
    economics = measured(plain_s=1.0, per_row_s=per_row_s, per_draft_s=per_draft_s)
    # What only many have to bear; and nothing is tried.
    economics._proposing_s = 0.0
    progress = with_acceptance(share)
    progress.num_unread = unread
    counts, gained_s = economics._best([progress], ["a"], [most], by_forwards=by_forwards)
    others, expected_s = economics._best_of_many([progress], ["a"], [most], by_forwards=by_forwards)
    assert counts == others
    assert gained_s == pytest.approx(expected_s)


def test_the_likeliest_drafts_of_a_batch_get_its_rows() -> None:
    """Eight rows are free, and each further one costs more than it brings."""
    economics = measured(plain_s=1.0, per_row_s=0.0, per_draft_s=0.0, num_sequences=4, most=8)
    for num_drafts in (10, 12, 14, 16):
        for _ in range(3):
            economics.stepped(
                StepCost(seconds=4.0, num_sequences=4, num_drafts=num_drafts, decodes_only=True)
            )
    for costs in economics._sizes.values():
        costs.margin, costs.credit_s = LEAST_MARGIN, 0.0
    good, fair, bad = with_acceptance(0.95), with_acceptance(0.6), with_acceptance(0.2)
    assert economics.verifiable([good, bad, fair, good], ["a"] * 4, [4] * 4) == [4, 0, 0, 4]
    assert economics.verifiable([good, bad, fair, fair], ["a"] * 4, [4] * 4) == [4, 0, 2, 2]
    # What was not found is not verified.
    assert economics.verifiable([good, bad, fair, fair], ["a"] * 4, [1, 4, 0, 4]) == [1, 3, 0, 4]


def test_others_bear_no_more_than_a_hundredth_of_a_step() -> None:
    good, bad = with_acceptance(0.9), with_acceptance(0.0)
    for per_row_s, expected in ((0.002, 5), (0.004, 2), (0.02, 0)):
        economics = measured(plain_s=1.0, per_row_s=per_row_s, per_draft_s=0.0, num_sequences=4)
        alone = economics.verifiable([good, good, bad, bad], ["a"] * 4, [4] * 4)
        assert sum(alone) >= 6
        economics._proposing_s = 0.0
        mixed = economics.verifiable([good, good, bad, bad], ["a", "a", "b", "b"], [4] * 4)
        assert sum(mixed) == expected
        # Who gains as well bears more.
        both = economics.verifiable([good, bad, good, bad], ["a", "a", "b", "b"], [4] * 4)
        assert sum(both) == sum(alone)


def test_that_a_tenant_gains_is_not_believed_of_what_others_experienced() -> None:
    economics = measured(plain_s=1.0, per_row_s=0.02, per_draft_s=0.0, num_sequences=2)
    good = with_acceptance(0.9)
    for _ in range(100):
        economics.owners.verified(DraftProgress(), "b", 4, 4)
    economics._proposing_s = 0.0
    assert sum(economics.verifiable([good, DraftProgress()], ["a", "b"], [4, 4])) == 0
    assert sum(economics.verifiable([good, good], ["a", "b"], [4, 4])) == 8


def test_drafts_that_turn_out_to_lose_time_stop() -> None:
    """The estimate says that they pay, the steps say otherwise."""
    economics = measured(plain_s=1.0, per_row_s=0.0, per_draft_s=0.2)
    hopeful = with_acceptance(0.6)
    assert economics.rounds([hopeful], ["a"], [4]) != [0]
    for _ in range(30):
        economics.proposed(1, 2, 0.4)
        economics.stepped(StepCost(seconds=1.0, num_sequences=1, num_drafts=2, decodes_only=True))
    for costs in economics._sizes.values():
        costs.credit_s = 0.0
    assert economics.rounds([hopeful], ["a"], [4]) == [0]


def test_a_draft_models_forwards_are_shared_and_paid_by_those_who_profit() -> None:
    economics = measured(plain_s=1.0, per_row_s=0.0, per_draft_s=0.3, num_sequences=4)
    good, bad = with_acceptance(0.9), with_acceptance(0.06)
    owners, most = ["a"] * 4, [4] * 4
    # A forward of 0.3 s gains 0.9 tokens of 1 / 4 s for one of them, and four times that for all.
    assert economics.rounds([good, bad, bad, bad], owners, most) == [0, 0, 0, 0]
    assert economics.rounds([good] * 4, owners, most) == [4, 4, 4, 4]
    few = economics.rounds([good, good, good, bad], owners, most)
    assert all(few[:3])


def test_trials_take_half_a_percent_of_the_time() -> None:
    economics = measured(plain_s=1.0, per_row_s=0.0, per_draft_s=0.6)
    progress = with_acceptance(0.5)
    took_s, trials = 0.0, []
    for step in range(5000):
        plain(economics, 1.0, 1, times=1)
        (count,) = economics.rounds([progress], ["a"], [4])
        if count:
            trials.append(step)
            took_s += 0.6 * count
            economics.proposed(1, count, 0.6 * count)
    assert len(trials) > 10
    assert took_s <= 0.0051 * 5000
    assert min(np.diff(trials)) >= 100


def test_drafts_that_were_dear_are_tried_again_and_come_back() -> None:
    """A machine that was busy when drafts were measured first."""
    economics = measured(plain_s=1.0, per_row_s=20.0, per_draft_s=0.0, most=4)
    progress, drafted = with_acceptance(0.9), []
    for _ in range(12_000):
        economics._proposing_s = 0.0
        (count,) = economics.verifiable([progress], ["a"], [4])
        drafted.append(count)
        economics.stepped(StepCost(seconds=1.0, num_sequences=1, num_drafts=count, decodes_only=True))
    assert sum(drafted[:400]) == 0
    assert drafted[-100:].count(0) < 10


def test_nothing_is_proposed_until_a_plain_step_was_measured_and_it_is_measured_again() -> None:
    economics = Economics(4, 0.05)
    fine = with_acceptance(0.9)
    assert economics.lookups([fine], ["a"]) == [0]
    plain(economics, 1.0, 1, times=1)
    proposals = []
    for _ in range(200):
        (count,) = economics.lookups([fine], ["a"])
        proposals.append(count)
        economics.stepped(StepCost(seconds=1.0, num_sequences=1, num_drafts=count, decodes_only=True))
    assert 2 <= proposals.count(0) <= 8


def test_new_sequences_begin_with_what_their_tenants_others_accepted() -> None:
    economics = Economics(4, 0.05)
    for _ in range(100):
        economics.owners.verified(DraftProgress(), "a", 4, 0)
    assert economics._chance(DraftProgress(found=1.0), "a") < 0.1
    assert economics._chance(DraftProgress(found=1.0), "b") == 0.5
    assert economics._chance(with_acceptance(0.9), "a") > 0.85


def test_drafts_that_were_not_verified_are_judged_by_what_is_drawn() -> None:
    economics, progress = Economics(4, 0.05), DraftProgress(found=1.0)
    progress.unverified, progress.num_known_then = (5, 6, 7), 2
    economics.owners.compared(progress, "a", np.array([1, 2, 5, 6]))
    # It is not known yet.
    assert progress.unverified == (5, 6, 7)
    economics.owners.compared(progress, "a", np.array([1, 2, 5, 6, 8]))
    assert progress.unverified == ()
    shares = [progress.acceptance.share(place, 0.5) for place in range(3)]
    assert shares[0] == shares[1] > 0.6
    assert shares[2] == 0


@given(
    plain_s=st.dictionaries(st.integers(1, 64), st.floats(0.001, 1.0), min_size=1, max_size=6),
    drafted=st.lists(st.tuples(st.integers(1, 64), st.integers(1, 200), st.floats(0.001, 3.0)), max_size=12),
    num_sequences=st.integers(1, 64),
)
def test_more_rows_are_never_expected_to_take_less(
    plain_s: dict[int, float], drafted: list[tuple[int, int, float]], num_sequences: int
) -> None:
    times = StepTimes()
    for count, seconds in plain_s.items():
        times.add(count, 0, seconds)
    for step in drafted:
        times.add(*step)
    factors = times.factors(num_sequences, 256)
    assert factors.shape == (257,)
    assert factors[0] == 1
    assert (np.diff(factors) >= -1e-9).all()


def test_what_was_never_measured_costs_in_proportion_to_rows_and_is_replaced_by_what_is_measured() -> None:
    times = StepTimes()
    times.add(4, 0, 1.0)
    assert times.factors(4, 4)[4] == 2.0
    times.add(8, 0, 1.2)
    assert times.factors(4, 4)[4] == pytest.approx(1.2)
    # The first step of a kind may be very slow.
    times.add(4, 4, 50.0)
    assert times.factors(4, 4)[4] == 2.0
    for _ in range(3):
        times.add(4, 4, 1.05)
    assert times.factors(4, 4)[4] == pytest.approx(1.05)


MACHINES = {
    # Weights are what takes time; or tiles of rows; or rows; or a step is so short that looking up counts.
    "weights": Machine(base=1.0, row=0.005),
    "tiles": Machine(base=0.8, group=0.2),
    "rows": Machine(base=0.2, row=0.1),
    "fast": Machine(base=0.2, row=0.1, plain_s=0.001),
}
DRAFTS = {
    "good": {"a": 0.9},
    "hopeless": {"a": 0.0},
    "both": {"a": 0.95, "b": 0.0},
    "mixed": {"a": 0.9, "b": 0.6, "c": 0.05},
}


def kept(with_drafts: Run, without: Run) -> dict[str, float]:
    """What is left of rates, of all and of each tenant."""
    assert with_drafts.outputs == without.outputs
    return {"all": with_drafts.tokens_per_s / without.tokens_per_s} | {
        tenant: with_drafts.rate(tenant) / without.rate(tenant) for tenant in set(without.tenants.values())
    }


@pytest.mark.parametrize("looks_up", [True, False], ids=["lookups", "forwards"])
@pytest.mark.parametrize("drafts", DRAFTS)
@pytest.mark.parametrize("num_streams", [1, 8, 32, 64])
@pytest.mark.parametrize("machine", MACHINES)
def test_nobody_is_slower_with_speculation(
    machine: str, num_streams: int, drafts: str, looks_up: bool
) -> None:
    accuracy = DRAFTS[drafts]
    if num_streams < len(accuracy):
        pytest.skip("fewer streams than tenants")
    if num_streams > 8 and not looks_up:
        pytest.skip("forwards differ from lookups in what they cost, and not by streams")
    device = MACHINES[machine]
    if not looks_up:
        device = device.with_draft_s(0.15 * device.plain_s)
    num_tokens = {1: 600, 8: 200, 32: 80, 64: 80}[num_streams]
    without = run(device, accuracy, num_streams, method="off", num_tokens=num_tokens)
    with_drafts = run(device, accuracy, num_streams, num_tokens=num_tokens, looks_up=looks_up)
    shares = kept(with_drafts, without)
    assert min(shares.values()) >= KEPT, shares
    if drafts == "good" and machine == "weights" and looks_up:
        assert shares["all"] > {1: 1.5, 8: 1.02}.get(num_streams, 0)
    if drafts == "hopeless":
        assert with_drafts.num_drafted < 0.02 * sum(map(len, with_drafts.outputs.values()))


@pytest.mark.parametrize("looks_up", [True, False], ids=["lookups", "forwards"])
@pytest.mark.parametrize("drafts", ["good", "hopeless", "both"])
@pytest.mark.parametrize("machine", ["weights", "rows"])
def test_nobody_waits_longer_for_the_next_words(machine: str, drafts: str, looks_up: bool) -> None:
    """At the 99th percentile: for eight tokens, and where drafts bring a tenant none, for each."""
    device = MACHINES[machine]
    if not looks_up:
        device = device.with_draft_s(0.15 * device.plain_s)
    options = {"num_tokens": 1400, "num_turns": 1}
    without = run(device, DRAFTS[drafts], 8, method="off", **options)
    with_drafts = run(device, DRAFTS[drafts], 8, looks_up=looks_up, **options)
    for tenant, accuracy in DRAFTS[drafts].items():
        for over in (8,) if accuracy else (8, 1):
            kept = without.p99_gap(tenant, over) / with_drafts.p99_gap(tenant, over)
            assert kept >= KEPT, (tenant, over, kept)
    if drafts == "good" and machine == "weights":
        assert with_drafts.tokens_per_s / without.tokens_per_s > (1.5 if looks_up else 1.2)


def came(economics: Economics, sequences: list[DraftProgress], owners: str, pace: float, held: int) -> None:
    """A step of so many plain ones; of the first sequence so many drafts hold, and one does not."""
    economics.owners.verified(sequences[0], owners[0], held + 1, held)
    economics._num_steps, economics._pace = economics._num_steps + 1, pace
    economics.came(sequences, owners)


def test_tokens_are_late_for_whom_they_take_longer_than_without() -> None:
    economics, sequences = Economics(4, 0.05), [DraftProgress(), DraftProgress()]
    first, second = (economics.owners.of(owner) for owner in "ab")
    # Eight tokens in six and a half steps are quick; who has no drafts waits half a step longer for each.
    came(economics, sequences, "ab", 1.5, 2)
    assert (first.late, second.late) == pytest.approx((7.995 - 1.5 / 8, 8.995))
    # The late one is paid for by two hundred tokens that are not.
    assert economics._borne_in == pytest.approx(199, abs=1)
    # Within two hundredths nobody notices; in vain, half a step is late until eight further tokens have come.
    came(economics, [DraftProgress()], "c", 1.02, 0)
    assert economics.owners.of("c").late < 8
    third = DraftProgress()
    came(economics, [third], "d", 1.5, 0)
    assert economics.owners.of("d").late > 8
    economics._num_steps += 8
    came(economics, [third], "d", 1.0, 0)
    assert economics.owners.of("d").late < 9
    assert list(third.paces) == [1.0] * 8


def test_early_tokens_make_up_for_late_ones_and_ended_answers_allow_more() -> None:
    owner = OwnerExperience()
    assert owner.came(1.0, 1) == pytest.approx(199, abs=1)
    # Half a gain for each of two steps; what is left over is not kept.
    assert owner.came(-0.5, 2) == pytest.approx(98, abs=1)
    assert owner.came(-0.5, 3) == 0
    assert owner.came(-20.0, 4) == 0
    assert owner.late == 0
    owner.expects_gain()
    borne = [owner.came(1.0, 5 + number) == 0 for number in range(30)]
    assert borne == [True] * 24 + [False] * 6


def test_while_somebody_has_waited_too_often_no_step_is_longer() -> None:
    economics = measured(plain_s=1.0, per_row_s=0.1, per_draft_s=0.0, num_sequences=2)
    good = with_acceptance(0.9)
    wanted, owners = [4, 4], ["a", "a"]
    economics._proposing_s = 0.0
    assert economics.verifiable([good, good], owners, wanted) == [4, 4]
    came(economics, [good, good], "aa", 3.0, 0)
    economics._proposing_s = 0.0
    assert economics.verifiable([good, good], owners, wanted) == [0, 0]
    assert economics.rounds([good], ["a"], [4]) == [0]
    # Each further token pays for a two-hundredth of a late one.
    for _ in range(200):
        economics._num_steps += 8
        came(economics, [DraftProgress(), DraftProgress()], "aa", 1.0, 0)
    assert economics.verifiable([good, good], owners, wanted) == [4, 4]


def test_lookups_that_find_nothing_cost_next_to_nothing() -> None:
    without = run(MACHINES["fast"], {"a": 0.9}, 8, method="off", num_tokens=250)
    with_drafts = run(MACHINES["fast"], {"a": 0.9}, 8, num_tokens=250, found=0.0)
    assert min(kept(with_drafts, without).values()) >= KEPT


@pytest.mark.parametrize("num_sequences", [1, 2])
def test_rows_beside_drafts_have_their_price(num_sequences: int) -> None:
    """Drafts that hold nearly always pay for themselves, and for some rows more, but not for many."""
    sequences = [with_acceptance(0.9)] * num_sequences
    owners, most = ["a"] * num_sequences, [4] * num_sequences
    economics = measured(plain_s=1.0, per_row_s=0.1, per_draft_s=0.0, num_sequences=num_sequences)
    found = {}
    # Also where those beside all but the first are too dear.
    for beside in ((), (5,), (40,), (1, 30, 30)):
        economics._rows_each = 1 + np.array([*beside, 0, 0, 0, 0][:5])
        found[beside] = economics.rounds(sequences, owners, most)
    assert found == {
        (): most,
        (5,): most,
        (40,): [0] * num_sequences,
        (1, 30, 30): [1] * num_sequences,
    }
