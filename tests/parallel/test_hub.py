"""Hosts that meet at a hub: as in one job, to the bit. Hosts that are late or gone are left out."""

import re
import socket
import threading
import time
from contextlib import contextmanager, suppress

import numpy as np
import pytest

from shardrt.__main__ import main
from shardrt.comm import init_device_mesh, thread
from shardrt.parallel import DiLoCo, HubExchange, HubLost, LeftBehind
from shardrt.parallel import hub as hub_of
from shardrt.parallel.hub import BODY, EXCHANGE, HEAD, JOIN, MARK, REFUSED, WAIT, Hub, Message, receive, send
from tests import lab
from tests.parallel.test_diloco import Run

LONG = 200.0  # seconds that no test waits


@contextmanager
def serving(hosts=2, deadline=LONG):
    """The address of a hub, and the hub."""
    hub = Hub(hosts, deadline)
    address = f"127.0.0.1:{hub.listen('127.0.0.1', 0)}"
    thread_of = threading.Thread(target=hub.serve, daemon=True)
    thread_of.start()
    try:
        yield address, hub
    finally:
        hub.close()
        thread_of.join(10)


class Apart(Run):
    """One rank of a host that meets the others at a hub; the test has all hosts in one world."""

    def link(self, address):
        return HubExchange(address, self.host, self.mesh.size_of("diloco"), self.mesh["dp_shard"])

    def begin(self, done=0):
        """As after a checkpoint of step `done`; catches up if need be. Gives the first step."""
        first, behind = self.outer.join(done)
        return self.outer.catch_up() if behind else first


def trained(address, steps, **settings):
    run = Apart(address=address, **settings)
    if address:
        run.begin()
    run.train(0, steps)
    return run.weights()


SETTINGS = {
    "whole": {"sync_every": 2},
    "4 bits": {"sync_every": 2, "should_quantize": True},
    "3 hosts": {"sync_every": 2, "hosts": 3, "each": 1, "should_quantize": True},
    "delay": {"sync_every": 4, "fragments": 2, "fragment_sync_delay": 1, "fragment_update_alpha": 0.5},
}


@pytest.mark.parametrize("case", SETTINGS)
def test_through_a_hub_as_in_one_job(case):
    settings = SETTINGS[case]
    ranks = settings.get("hosts", 2) * settings.get("each", 2)
    with serving(settings.get("hosts", 2)) as (address, _):
        through = thread.run(ranks, trained, address, 8, **settings)
    lab.assert_equal(through, thread.run(ranks, trained, None, 8, **settings))


def outer_of(run):
    return {
        piece.inner.name: np.array(piece.outer["outer_parameter"]) for piece in run.outer.fragments[0].pieces
    }


def late(address, passed, back):
    """Host 1 comes to the second of three outer steps when host 0 has left it, and before its next."""
    run = Apart(address=address, sync_every=1, fragment_update_alpha=0.5, each=1)
    run.begin()
    found = []
    for step in range(3):
        run.inner_step(step)
        if step == 1 and run.host == 1:
            assert passed.wait(LONG)
        if step == 2 and run.host == 0:
            assert back.wait(LONG)
        without = run.outer.step(step + 1)
        assert without == (2 if (run.host, step) == (1, 1) else 0)
        (passed if run.host == 0 else back).set() if step == 1 else None
        found.append((run.outer.exchange.took_part(True), outer_of(run)))
    return found


def test_a_late_host_is_left_out_takes_the_outer_parameters_and_takes_part_again(capsys):
    with serving(deadline=0.3) as (address, _):
        first, second = thread.run(2, late, address, threading.Event(), threading.Event())
    assert [each[0] for each in second] == [True, False, True]
    said = capsys.readouterr().out
    assert "hub: host 1 joined at step 0\n" in said and "hub: outer step 2 without host 1\n" in said
    lab.assert_equal(first[0][1:], second[0][1:])
    lab.assert_equal(first[1][1:], second[1][1:])
    lab.assert_equal(first[2], second[2])


def until(condition):
    end = time.monotonic() + LONG
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def train_until_back(run, hub, first):
    """Host 0: when host 1 has asked for the state, one outer step gives it; two more are together."""
    group = hub._groups[run.mesh["dp_shard"].rank]
    until(lambda: group.fetching)
    run.train(first, first + 1)
    until(lambda: not (group.fetching or group.lagging))
    run.train(first + 1, first + 3)


def stopped(address, hub, passed):
    """Host 1 stops in its third step, until host 0 has made more."""
    run = Apart(address=address, sync_every=1)
    run.begin()
    run.train(0, 2)
    if run.host == 0:
        run.train(2, 4)
        run.mesh["dp_shard"].communicator("control").all_gather_bytes(b"")
        passed.set()
        train_until_back(run, hub, 4)
        return 7, run.weights(), outer_of(run)
    run.inner_step(2)
    assert passed.wait(LONG)
    with pytest.raises(LeftBehind):
        run.outer.step(3)
    step = run.outer.catch_up()
    run.train(step, 7)
    return step, run.weights(), outer_of(run)


def test_a_host_that_was_stopped_catches_up():
    with serving(deadline=0.3) as (address, hub):
        results = thread.run(4, stopped, address, hub, threading.Event())
    assert [step for step, *_ in results] == [7, 7, 5, 5]
    lab.assert_equal([each[1:] for each in results[:2]], [each[1:] for each in results[2:]])


def gone(address, hub):
    """Host 1 leaves after two outer steps; it comes back without its outer state."""
    run = Apart(address=address, sync_every=1, each=1)
    run.begin()
    run.train(0, 2)
    if run.host == 0:
        run.train(2, 5)
        train_until_back(run, hub, 5)
        return 8, run.weights()
    run.outer.exchange.close()
    until(lambda: hub._groups[0].closed == 5)
    run.outer = DiLoCo(run.inner, run.link(address), sync_every=1)
    step = run.begin()
    run.train(step, 8)
    return step, run.weights()


def test_hosts_do_not_wait_for_one_that_is_gone_and_it_comes_back():
    with serving() as (address, hub):
        (_, weights), (step, others) = thread.run(2, gone, address, hub)
    assert step == 6
    lab.assert_equal(weights, others)


def test_what_is_no_rank_of_these_hosts_is_refused_and_harms_no_other():
    settings = {"sync_every": 1, "each": 1}
    with serving() as (address, _):
        name, port = address.split(":")
        for words in (b"GET / HTTP/1.1\r\n\r\n" + bytes(40), HEAD.pack(MARK, JOIN, 0, 0, 1 << 60), b""):
            with socket.create_connection((name, int(port))) as stranger:
                stranger.sendall(words)
        with pytest.raises(HubLost, match="the hub serves 2 hosts, this is host [0-2] of 3"):
            thread.run(3, trained, address, 1, hosts=3, **settings)
        thread.run(2, trained, address, 2, **settings)
    with pytest.raises(HubLost, match="no hub at 127.0.0.1"):
        thread.run(2, trained, address, 2, **settings)


class Bare:
    """A rank of one host that speaks to the hub, and learns nothing."""

    def __init__(self, address, host, hosts=3, sizes=(8, 8), layout=0):
        name, port = address.split(":")
        self.socket = socket.create_connection((name, int(port)), LONG)
        send(self.socket, JOIN, 0, 0, BODY.pack(host, hosts, 0, *sizes, layout))

    def asks(self, number, body):
        send(self.socket, EXCHANGE, number, 0, body)

    def hears(self):
        while (answer := receive(self.socket, 1 << 10)).kind == WAIT:
            pass
        return answer


def test_a_late_message_of_another_size_than_the_open_rounds_is_answered():
    with serving(3, deadline=0.2) as (address, hub):
        ranks = [Bare(address, host) for host in range(3)]
        assert [rank.hears().kind for rank in ranks] == [JOIN] * 3
        ranks[0].asks(1, b"four")
        ranks[2].asks(1, b"FOUR")
        assert [rank.hears().hosts for rank in ranks[::2]] == [0b101] * 2
        hub.deadline = LONG
        ranks[0].asks(2, b"of eight")
        until(lambda: hub._groups[0].open)
        ranks[1].asks(1, b"late")
        late = ranks[1].hears()
        assert (late.kind, late.hosts, late.body) == (EXCHANGE, 0b101, b"fourFOUR")


def layout(settings):
    run = Run(hosts=1, each=1, **settings)
    return run.outer._layout()


OTHERS = [{"sync_every": 8}, {"lr": 0.5}, {"momentum": 0.8}, {"fragments": 1}]


def test_hosts_with_other_settings_are_refused():
    alike = {"sync_every": 4, "fragments": 2}
    found = [thread.run(1, layout, alike | other)[0] for other in ({}, {}, *OTHERS)]
    assert found[0] == found[1] and len(set(found)) == 1 + len(OTHERS)
    with serving() as (address, hub):
        first = Bare(address, 0, hosts=2, layout=1)
        until(lambda: 0 in hub._groups)
        refused = Bare(address, 1, hosts=2, layout=2).hears()
        assert refused.kind == REFUSED and b"host 1 has other parameters" in refused.body
        second = Bare(address, 1, hosts=2, layout=1)
        assert first.hears().kind == second.hears().kind == JOIN


def test_a_hub_that_cannot_take_a_connection_goes_on(monkeypatch, capsys):
    monkeypatch.setattr(hub_of, "_PAUSE", 0.01)
    start, failures = threading.Thread.start, [RuntimeError("can't start new thread")]

    def failing(self):
        if self._target.__name__ == "_serve" and failures:
            raise failures.pop()
        start(self)

    with serving() as (address, _):
        monkeypatch.setattr(threading.Thread, "start", failing)
        with pytest.raises(ConnectionError):
            Bare(address, 0).hears()
        assert Bare(address, 0).hears().kind == REFUSED  # of 3 hosts
    assert "hub: warning: cannot take a connection: can't start new thread" in capsys.readouterr().out


def test_strangers_that_say_nothing_make_room(monkeypatch):
    monkeypatch.setattr(hub_of, "_JOIN", 0.1)
    monkeypatch.setattr(hub_of, "_JOINING", 2)
    with serving() as (address, _):
        name, port = address.split(":")
        strangers = [socket.create_connection((name, int(port))) for _ in range(4)]
        assert Bare(address, 0).hears().kind == REFUSED  # of 3 hosts
        assert [stranger.recv(1) for stranger in strangers] == [b""] * 4


def test_a_job_learns_that_another_took_its_place():
    with serving() as (address, hub):
        for asks in (False, True):  # while it waits for all hosts, and where it has asked for a round
            hosts = [Bare(address, host, hosts=2) for host in range(2)]
            assert [host.hears().kind for host in hosts] == [JOIN] * 2
            if asks:
                hosts[0].asks(1, b"mine")
                until(lambda: hub._groups[0].open)
            second = Bare(address, 0, hosts=2)
            answer = hosts[0].hears()
            assert (answer.kind, answer.body) == (REFUSED, b"another job joined as host 0")
            for each in (second, hosts[1]):
                each.socket.close()
            until(lambda: not hub._groups[0].connections)
            hub._groups.clear()


@pytest.mark.parametrize("number", [1 << 63, 1 << 62, 1 << 40])
def test_a_round_that_cannot_be_ends_its_connection_alone(number):
    with serving() as (address, hub):
        hosts = [Bare(address, host, hosts=2) for host in range(2)]
        for host in hosts:
            host.asks(1, b"mine")
        assert [[host.hears().kind for host in hosts] for _ in range(2)] == [[JOIN] * 2, [EXCHANGE] * 2]
        hosts[1].asks(number, b"far")
        with pytest.raises(ConnectionError):
            hosts[1].hears()
        hosts[0].asks(2, b"next")
        assert hosts[0].hears().hosts == 1


def met(address, answers):
    """(first, last) on a rank whose group at the hub gave its part of `answers`."""
    mesh = init_device_mesh("cpu", (2,))
    link = HubExchange(address, 0, 2, mesh)
    assert link._socket.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)

    def ask(*_):
        first, last = answers[mesh.rank]
        if last is None:
            raise HubLost("no")
        return Message(JOIN, first, 0, last.to_bytes(8, "little", signed=True))

    link._ask = ask
    try:
        return link.join(4, 4, "", 9)
    except HubLost as error:
        return str(error)


def test_the_ranks_of_a_host_agree_where_they_join():
    with serving() as (address, _):
        assert thread.run(2, met, address, [(9, 3), (8, -1)]) == [(8, 3)] * 2
        assert thread.run(2, met, address, [(9, 3), (0, None)]) == ["no"] * 2


def cut_off(address, hub):
    run = Apart(address=address, sync_every=1, each=1, fragment_sync_delay=0)
    run.begin()
    run.train(0, 1)
    run.mesh.communicator("control").all_gather_bytes(b"")
    for connection in list(hub._groups[0].connections.values()):
        with suppress(OSError):  # the other rank was first
            connection.shutdown(socket.SHUT_RDWR)
    with pytest.raises(HubLost, match="is gone: .*; start all hosts with --resume auto"):
        run.train(1, 2)


def test_a_hub_that_is_gone_is_an_error_where_the_rank_waits():
    with serving() as (address, hub):
        thread.run(2, cut_off, address, hub)


def test_a_body_above_the_limit_is_not_read():
    ours, theirs = socket.socketpair()
    theirs.sendall(HEAD.pack(MARK, EXCHANGE, 1, 0, 1 << 40))
    with pytest.raises(ConnectionError, match="of at most 16"):
        receive(ours, 16)


def test_the_command_says_where_it_listens_or_what_is_wrong(monkeypatch, capsys):
    monkeypatch.setattr(Hub, "serve", Hub.close)
    assert main(["hub", "2", "--port", "0"]) == 0
    assert re.fullmatch(r"hub: 2 hosts, at 127\.0\.0\.1:\d+\n", capsys.readouterr().out)
    assert main(["hub", "2", "--deadline", "nan"]) == 2
    assert capsys.readouterr().err == "error: a hub's deadline must be above 0 seconds, got nan\n"


@pytest.mark.parametrize("hosts", [1, 65])
def test_refuses_numbers_of_hosts(hosts):
    with pytest.raises(ValueError, match=f"a hub needs 2 to 64 hosts, got {hosts}"):
        Hub(hosts, 1.0)
