"""Each wait, record and barrier made wrong in each way: a race is told, or a row says why not.

Those of fsdp/, of updates on the host, of activation offload, of links between stages, and of what runs
beside ops and in parallel/. The rows are in waits.toml; a wrong or a useless one fails.
"""

import ast
import importlib
import tomllib
from collections import defaultdict
from dataclasses import replace
from functools import cache

import pytest

from shardrt.device.cpu import CPUDevice
from shardrt.device.program import HOST, Free, HostWait, Record, Wait
from shardrt.simulate.races import without_values
from tests.races.mutations import FILES, REMOVED, SHARDRT, SITES, Recording, sites_of
from tests.races.recorded import Case, recorded
from tests.races.runs import RUNS
from tests.races.scripts import SCRIPTS
from tests.ranks import ROOT

CASES = [
    Case(("offload all", "bf16", "clip norm")),
    Case(("offload activations", "late", "clip norm")),
    Case(("step on host", "in backward")),
    Case(("offload optimizer", "clip norm")),
    Case(("offload gradients", "accumulate")),
    Case(("bf16",), CPUDevice),
    Case(("bf16", "NO_SHARD", "SGD"), CPUDevice),
    Case(("fp16, scaled",), CPUDevice),  # which is widened where it is gathered, bfloat16 only without oneDNN
    Case(("fp16, scaled", "NO_SHARD", "SGD"), CPUDevice),
    Case(("unused units", "in backward")),
    Case(("offload parameters",)),
    Case(("late", "pipeline")),
    Case(("context parallel",)),
    Case(("expert parallel",)),
    Case(("sequence parallel", "tensor-invariant")),
    Case(("quantised", "accumulate", "clip norm")),
    Case(("quantised", "bf16", "Muon")),
    Case(("DiLoCo", "clip norm")),
    Case(("offload parameters", "offload gradients"), fails=("gather",), turn=16),
    Case(("NO_SHARD", "accumulate"), fails=("reduce",), turn=8),
    Case(("bf16",), fails=("reduce",), turn=2),
    Case(("offload gradients", "accumulate", "bf16"), fails=("reduce",), turn=7),
]
ROWS = tomllib.loads((ROOT / "tests" / "races" / "waits.toml").read_text())["row"]


@pytest.fixture(scope="module")
def recordings(tmp_path_factory):
    """Without the values that the host asks for, whose waits hide others; ops are in a stream everywhere.

    So they are on any device but a CPU, for which alone some of the code is: it is held to the same.
    """
    directory = tmp_path_factory.mktemp("files")
    made = {str(case): recorded(case, directory) for case in CASES}
    made |= {name: script() for name, script in SCRIPTS.items()}
    return {
        name: Recording([replace(without_values(program), by_host=()) for program in programs])
        for name, programs in made.items()
    }


@pytest.fixture(scope="module")
def lent_again(recordings):
    """A recording whose memory outside of the pool the host may be lent, and write, at once."""
    programs = [
        replace(program, items=[at_once(item) for item in program.items])
        for program in recordings["frozen later"].order.programs
    ]
    return {"frozen later": Recording(programs)}


def at_once(item):
    return replace(item, stream=HOST) if isinstance(item, Free) and not item.stream else item


@cache
def excused():
    """By site, the mutations that rows call harmless."""
    found = defaultdict(list)
    for row in ROWS:
        for site in row["sites"]:
            found[site].append(row)
    return found


def row_of(site, mutation):
    rows = excused().get(site.name, ())
    return next((row for row in rows if mutation in row.get("mutations", [mutation])), None)


def is_shown(how, recordings, site, mutation):
    """Whether a mutation is as its row says, see waits.toml."""
    of = [recording for recording in recordings.values() if mutation in recording.mutations(site)]
    if how == "run":
        return site.name in RUNS
    if how == "by the host":
        return all(recording.waits_for_the_host(site) for recording in of)
    how, _, but = how.partition(" but behind ")
    if how == "no less":
        return all(recording.waits_for_no_less((site.line, site.kind, mutation), but) for recording in of)
    return any(recording.races([(site.line, site.kind, how)]) for recording in of)


def reported(recordings, site, mutation, others=()):
    """Whether a recording has more races with a mutation, and `others` removed, than with these removed."""
    removed = [(SITES[name].line, SITES[name].kind, REMOVED) for name in others]
    for recording in recordings.values():
        if mutation in recording.mutations(site):
            more = recording.races([(site.line, site.kind, mutation), *removed])
            if len(more) > len(recording.races(removed)):
                return recording, more
    return None


def test_as_they_are_the_recordings_have_no_race(recordings):
    for name, recording in recordings.items():
        assert not [str(recording.described(race)) for race in recording.races()], name


def test_every_row_is_of_sites_that_are_there_and_says_one_thing():
    for row in ROWS:
        assert {*row["sites"], *row.get("covered_by", ())} <= SITES.keys()
        assert ("covered_by" in row) != ("reason" in row and "shown" in row), row["sites"]


def test_every_wait_and_record_in_these_files_is_known(recordings):
    """By its line; `new_event().synchronize()` and the like inside of device/ are their callers'."""
    known = {(site.line, site.kind) for site in SITES.values()}
    files = {f"shardrt/{path.relative_to(SHARDRT).as_posix()}" for path in FILES}
    for recording in recordings.values():
        for program in recording.order.programs:
            waited = {item.mark for item in program.items if isinstance(item, Wait | HostWait)}
            synchronized = {item.site for item in program.items if isinstance(item, HostWait)}
            for item in (item for item in program.items if getattr(item, "mark", 0) in waited):
                if isinstance(item, Wait | Record) and item.site.rpartition(":")[0] in files:
                    kind = "record" if isinstance(item, Record) else "wait"
                    assert (item.site, kind) in known or item.site in synchronized, item


@pytest.mark.parametrize("name", SITES)
def test_what_is_wrong_with_a_site_is_told_or_a_row_says_why_not(name, recordings, lent_again):
    site = SITES[name]
    mutations = dict.fromkeys(m for recording in recordings.values() for m in recording.mutations(site))
    never = (row_of(site, REMOVED) or {}).get("shown") == "not recorded"
    assert bool(mutations) != never, "whether a recording comes to it"
    for mutation in mutations:
        found, row = reported(recordings, site, mutation), row_of(site, mutation)
        if row is None:
            assert found, f"{mutation}: no race, and no row that says what covers it"
            recording, races = found
            race = recording.described(races[0])
            assert "let " in race.repair and race.first.item.site and race.second.item.site
        elif "mutations" in row or mutation == REMOVED:
            assert not found, f"{mutation}: its row is of no use, {found and found[0].described(found[1][0])}"
            if "covered_by" in row:
                among, described = recordings, f"{mutation}: {row['covered_by']} do not cover it"
                if row.get("lent_again"):
                    among = lent_again
                    assert not reported(among, site, mutation), f"{mutation}: it is not covered"
                assert reported(among, site, mutation, row["covered_by"]), described
            else:
                assert is_shown(row["shown"], recordings, site, mutation), f"{mutation}: {row['reason']}"


def test_every_site_is_found_in_the_source_once():
    sites = [site for path in FILES for site in sites_of(path)]
    assert len(sites) == len(SITES) and len({(site.line, site.kind) for site in sites}) == len(sites)


# --- what changes the source itself -----------------------------------------------------------------------


def leave_out(patch, name):
    """Have the source run without a site."""
    place, _, source = name.partition(": ")
    file, function = place.split()
    owner = module = importlib.import_module(f"shardrt.{file.removesuffix('.py').replace('/', '.')}")
    *classes, last = function.split(".")
    for part in classes:
        owner = getattr(owner, part)
    tree = ast.parse((SHARDRT / file).read_text())
    node = next(n for where, n in _functions(tree, ()) if ".".join(where) == function)
    removed = 0
    for each in list(ast.walk(node)):
        block = getattr(each, "body", None)
        for n, statement in enumerate(block if isinstance(block, list) else ()):
            if ast.unparse(statement) == source:
                block[n] = ast.copy_location(ast.Pass(), statement)
                removed += 1
    assert removed == 1, name
    made = {}
    exec(compile(ast.Module([node], []), str(SHARDRT / file), "exec"), module.__dict__, made)
    patch.setattr(owner, last, made[last])


def _functions(node, where):
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.ClassDef):
            yield (*where, child.name), child
            yield from _functions(child, (*where, child.name))


def issued(programs):
    """All but what puts streams in order."""
    left_out = Wait | HostWait | Record
    return [
        [(type(item), getattr(item, "stream", ""), getattr(item, "site", "")) for item in program.items]
        for program in (
            replace(p, items=[i for i in p.items if not isinstance(i, left_out)]) for p in programs
        )
    ]


def test_a_source_without_a_site_issues_all_else_as_it_was(tmp_path):
    whole = recorded(CASES[0], tmp_path)
    for name in (
        "fsdp/gathers.py Gathers._await_writes: streams.gather.wait(self._shards_ready)",
        "fsdp/options/low_precision.py _cast: streams.gather.record(staged.free)",
        "optim/offload.py Updates.wait: self.device.current_stream.wait(route.updated)",
    ):
        with pytest.MonkeyPatch.context() as patch:
            leave_out(patch, name)
            less = recorded(CASES[0], tmp_path)
        assert issued(less) == issued(whole), name
        assert len(less[0].items) < len(whole[0].items), name


@pytest.mark.parametrize("name", RUNS)
def test_a_run_goes_right_and_without_a_site_it_does_not(name, monkeypatch):
    assert RUNS[name]()
    leave_out(monkeypatch, name)
    assert not RUNS[name]()
