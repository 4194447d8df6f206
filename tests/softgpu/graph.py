"""Captures: what streams would have done, with the order that events give it; and its replay."""

from tests.softgpu import errors
from tests.softgpu.errors import failed


class Node:
    """Work, and the nodes that come before it."""

    def __init__(self, work, before: frozenset) -> None:
        self.work, self.before = work, before


class Capture:
    """What is captured from one stream, and from those that wait for events recorded in it.

    invalid: something was called that must not be, after which everything is refused.
    """

    def __init__(self, origin) -> None:
        self.origin, self.invalid, self.ended = origin, False, False
        self.nodes: list[Node] = []
        self._last: dict = {origin: frozenset()}  # stream -> what its next node comes after
        origin.capture = self

    def add(self, stream, work) -> None:
        self._check()
        node = Node(work, self._last[stream])
        self._last[stream] = frozenset([node])
        self.nodes.append(node)

    def before(self, stream) -> frozenset:
        """The work that an event recorded now in `stream` comes after."""
        self._check()
        return self._last[stream]

    def join(self, stream, before: frozenset) -> None:
        """`stream` waits for an event, and so is a part of the capture."""
        if self.ended:
            raise failed(errors.CAPTURED_EVENT)
        self._check()
        if stream.capture is None:
            stream.capture = self
            self._last[stream] = frozenset()
        if stream.capture is not self:
            self.invalid = stream.capture.invalid = True
            raise failed(errors.CAPTURE_MERGE)
        self._last[stream] |= before

    def works(self) -> list:
        """All work in it."""
        return [node.work for node in self.nodes]

    def end(self) -> None:
        """Raises CUDARuntimeError if some stream's work was not waited for by the one where it began."""
        self.ended = True
        for stream in self._last:
            stream.capture = None
        self._check()
        reached, stack = set(), list(self._last[self.origin])
        while stack:
            node = stack.pop()
            if node not in reached:
                reached.add(node)
                stack += node.before
        if set(self.nodes) - reached:
            raise failed(errors.CAPTURE_UNJOINED)

    def _check(self) -> None:
        if self.invalid:
            raise failed(errors.CAPTURE_INVALIDATED)


class Executable:
    """A captured graph that can be launched: one launch after the other, whatever the streams."""

    def __init__(self, capture: Capture) -> None:
        self.capture = capture
        self._latest: Launch | None = None

    def launch(self, random, stream) -> "Launch":
        self._latest = Launch(self.capture, random, stream, self._latest)
        return self._latest


class Launch:
    """A replay: the nodes in any order that they allow. before: the launch of this graph that it follows."""

    def __init__(self, capture: Capture, random, stream, before: "Launch | None") -> None:
        self.capture, self._random, self._stream, self._before = capture, random, stream, before
        self._left: dict | None = None  # node -> its work, this time
        self._done: set[Node] = set()
        self.groups = [group for node in capture.nodes for group in node.work.groups]

    def _waits_for_another(self) -> bool:
        if self._before is not None and self._before.finished:
            self._before = None
        return self._before is not None

    @property
    def finished(self) -> bool:
        return self._left is not None and not self._left

    def _next(self) -> list[Node]:
        """Those of which all is done that comes before them."""
        if self._left is None:
            self._left = {node: node.work.fresh() for node in self.capture.nodes}
        return [node for node in self._left if node.before <= self._done]

    def _able(self) -> list[Node]:
        return [node for node in self._next() if self._left[node].ready()]

    def ready(self) -> bool:
        return not self._waits_for_another() and (bool(self._able()) or self.finished)

    def blockers(self) -> list:
        if self._waits_for_another():
            return [self._before._stream]
        return [stream for node in self._next() for stream in self._left[node].blockers()]

    def step(self) -> bool:
        if self._left:
            node = self._random.choice(self._able())
            if self._left[node].step():
                del self._left[node]
                self._done.add(node)
        return self.finished
