"""Needed, covered and never needed waits, against a search of the graph without each set of sites."""

from itertools import chain, combinations, pairwise
from unittest.mock import patch

from hypothesis import assume, event, given, settings
from hypothesis import strategies as st

from shardrt.device.program import HostWait, Wait
from shardrt.simulate.order import order_of
from shardrt.simulate.proof import prove
from shardrt.simulate.races import neighbours, races
from shardrt.simulate.waits import COVERED, MOST_SITES, NEEDED, NEVER, waits
from tests.simulate.test_races import SLOT, of_two_ranks, places, repair_all
from tests.simulate.written import Truth, Written, programs


def verdicts(*written):
    return {found.site: (found.verdict, *found.covered_by) for found in waits(written)}


def used_by_reduce(*sites):
    """What compute writes is reduced; compute is waited for at each of these sites."""
    program = Written()
    program.work("compute", "backward.py", writes=SLOT)
    for site in sites:
        program.wait("host" if site == "item" else "reduce", program.record("compute"), site)
    program.work("reduce", "reduce.py", reads=SLOT)
    return program


def test_the_only_wait_is_needed_and_the_race_that_it_prevents_is_reported():
    (found,) = waits([used_by_reduce("schedule.py:10")])
    assert (found.verdict, found.covered_by) == (NEEDED, ())
    assert (found.prevents.first.item.site, found.prevents.second.item.site) == ("backward.py", "reduce.py")
    assert "needed (reduce waits for compute, 1 times)" in str(found) and "reduce.py" in str(found)


def test_two_waits_for_the_same_cover_each_other_and_three_each_the_others():
    assert verdicts(used_by_reduce("a", "b")) == {"a": (COVERED, "b"), "b": (COVERED, "a")}
    assert verdicts(used_by_reduce("a", "b", "c"))["b"] == (COVERED, "a", "c")


def test_a_wait_that_more_than_three_others_cover_is_covered_by_many():
    five = waits([used_by_reduce(*"abcde")])
    assert {(site.verdict, site.covered_by) for site in five} == {(COVERED, ())}
    assert str(five[0]).startswith("a: covered by many others (")


def test_very_many_ways_take_no_longer_than_a_few_and_nothing_wrong_is_said_of_them():
    program, streams = Written(), [f"stream {n}" for n in range(24)]
    program.work(streams[0], "made.py", writes=SLOT)
    for n, (before, after) in enumerate(pairwise(streams)):  # 2 ** 23 ways
        for site in "ab":
            program.wait(after, program.record(before), f"{site}{n}")
    program.work(streams[-1], "used.py", reads=SLOT)
    for name, verdict in verdicts(program).items():
        other = name.translate(str.maketrans("ab", "ba"))
        assert verdict in ((COVERED, other), (COVERED,))


def test_what_is_said_to_cover_a_wait_spares_none_though_not_all_ways_were_followed():
    program = Written()
    program.work("a", "made.py", writes=SLOT)
    made = program.record("a")
    program.wait("d", made, "c3")
    for before, after, sites in ("d", "e", ("c1", "c2")), ("e", "b", ("p", "q")), ("b", "f", ("m",)):
        for site in sites:
            program.wait(after, program.record(before), site)
    for stream, site in ("x", "c1"), ("y", "c2"):
        program.wait(stream, made, site)
        program.wait("f", program.record(stream), stream)
    program.work("f", "used.py", reads=SLOT)
    # Ways: c3 and m with c1 or c2 and p or q, c1 and x, c2 and y. Without c1 and c2 there is none, m or no m.
    with patch("shardrt.simulate.waits.MOST_WAYS", 3):
        assert verdicts(program)["m"] == (COVERED, "c2", "x")
    assert frozenset(("c2", "x")) in by_search([program])["m"]


def test_a_wait_that_a_host_wait_hides_is_covered_by_it():
    assert verdicts(used_by_reduce("schedule.py", "item"))["schedule.py"] == (COVERED, "item")


def test_a_wait_for_what_nobody_shares_is_never_needed():
    program = used_by_reduce("needed")
    program.wait("compute", program.record("reduce"), "never")
    program.work("compute", "other.py", writes=(500, 600))
    assert verdicts(program) == {"needed": (NEEDED,), "never": (NEVER,)}


def test_a_wait_that_leads_there_only_over_one_that_suffices_alone_is_never_needed():
    program = Written()
    program.work("compute", "made.py", writes=SLOT)
    mark = program.record("compute")
    program.wait("copy", mark, "detour")
    program.wait("reduce", program.record("copy"), "direct")
    program.wait("reduce", mark, "direct")  # of the same site
    program.work("reduce", "used.py", reads=SLOT)
    assert verdicts(program) == {"detour": (NEVER,), "direct": (NEEDED,)}


def test_a_barrier_is_a_wait_for_the_other_ranks():
    assert verdicts(*of_two_ranks("all_gather", barrier=True)) == {"readers_done": (NEEDED,)}


def test_what_races_without_a_wait_says_nothing_of_it():
    program = used_by_reduce()
    program.wait("reduce", program.record("compute"), "late")
    assert len(races([program])) == 1
    assert verdicts(program) == {"late": (NEVER,)}


def asks_for_its_loss(*sites):
    """What compute writes is gathered, behind the host's wait for the loss."""
    program = Written()
    program.work("compute", "update.py", writes=SLOT)
    mark = program.record("compute")
    for site in sites:
        program.wait("gather", mark, site)
    program.wait("host", mark, "train.py")
    program.host("train.py", reads=(0, 4), why="loss")
    program.work("gather", "gathers.py", reads=SLOT)
    return program


def test_a_proof_tells_a_race_that_only_a_wait_for_a_value_hides():
    proof = prove([asks_for_its_loss()])
    assert proof.races == []
    assert [race.second.item.site for race in proof.hidden] == ["gathers.py"]
    assert "hidden  by the host's waits for values" in str(proof)


def test_a_proof_tells_a_wait_as_needed_that_programs_need_which_ask_for_no_value():
    program = asks_for_its_loss("schedule.py")
    assert verdicts(program)["schedule.py"] == (COVERED, "train.py")
    proof = prove([program])
    assert (proof.races, proof.hidden) == ([], [])
    message = {site.site: site.verdict for site in proof.waits}
    assert message == {"schedule.py": NEEDED, "train.py": COVERED}
    assert str(proof).startswith("no race, at any speed") and "waits covered by others\ntrain.py: " in str(
        proof
    )


def test_a_race_is_told_once_whether_or_not_values_are_asked_for():
    program = asks_for_its_loss("schedule.py")
    program.work("reduce", "after.py", writes=SLOT)
    proof = prove([program])
    message = [
        [(r.first.item.site, r.second.item.site) for r in found] for found in (proof.races, proof.hidden)
    ]
    assert message == [[("gathers.py", "after.py")], [("update.py", "after.py")]]


# --- programs by chance -------------------------------------------------------------------------------------


def subsets(sites):
    return map(frozenset, chain.from_iterable(combinations(sites, n) for n in range(len(sites) + 1)))


def by_search(written):
    """By site, the sets of others without which leaving it out breaks an order: found by trying all sets."""
    truth, order = Truth(written), order_of(written)
    pairs = [(places(order, a), places(order, b)) for a, b in neighbours(order)]
    names = sorted(verdicts(*written))
    broken = {
        without: frozenset(pair for pair in pairs if not truth.in_order(*pair, without=without))
        for without in subsets(names)
    }
    found = {}
    for name in names:
        covers = [
            without
            for without in broken
            if name not in without and broken[without | {name}] > broken[without]
        ]
        found[name] = covers
    return found


def agree(written):
    found = by_search(written)
    for name, (verdict, *covered_by) in verdicts(*written).items():
        covers = found[name]
        event(verdict)
        if verdict == NEVER:
            assert not covers
        else:
            fewest = min(map(len, covers))
            assert (verdict == NEEDED) == (fewest == 0)
            if fewest < MOST_SITES:
                assert frozenset(covered_by) in covers and len(covered_by) == fewest
            else:
                assert covered_by == []


@settings(max_examples=50, deadline=None)
@given(programs(length=16, wait_sites=4))
def test_verdicts_on_a_random_program_are_those_of_a_search_without_each_set_of_sites(written):
    agree(written)
    repair_all(written[0])
    agree(written)


@settings(max_examples=30, deadline=None)
@given(programs(ranks=2, length=16, wait_sites=4))
def test_verdicts_on_two_random_ranks_are_those_of_a_search_without_each_set_of_sites(written):
    agree(written)


@settings(max_examples=30, deadline=None)
@given(programs(length=16, wait_sites=4), st.integers(1, 2))
def test_verdicts_are_right_as_far_as_they_go_where_not_all_ways_are_followed(written, most):
    repair_all(written[0])
    with patch("shardrt.simulate.waits.MOST_WAYS", most):
        found = verdicts(*written)
    covers = by_search(written)
    for name, (verdict, *covered_by) in found.items():
        assert (verdict == NEEDED) == (frozenset() in covers[name])
        assert verdict != NEVER or not covers[name]
        assert not covered_by or frozenset(covered_by) in covers[name]


@settings(max_examples=30, deadline=None)
@given(programs(length=16))
def test_of_a_correct_random_program_a_needed_wait_and_no_other_can_not_be_removed(written):
    (program,) = written
    repair_all(program)
    found = verdicts(program)
    assume(found)
    for site, (verdict, *_) in found.items():
        kept = [i for i in program.items if not (isinstance(i, Wait | HostWait) and i.site == site)]
        less = Written(by_host=program.by_host)
        less.items = kept
        raced = bool(Truth([less]).races())
        assert raced == (verdict == NEEDED) == bool(races([less]))
