"""Captures: what streams would have done, with the order that events give it; and its replay."""


class Node:
    """Work, and the nodes that come before it."""

    def __init__(self, work, before: frozenset) -> None:
        self.work, self.before = work, before


class Capture:
    """What is captured from one stream, and from those that wait for events recorded in it."""

    def __init__(self, origin) -> None:
        self.origin, self.ended = origin, False
        self.nodes: list[Node] = []
        self._last: dict = {origin: frozenset()}  # stream -> what its next node comes after
        origin.capture = self

    def add(self, stream, work) -> None:
        node = Node(work, self._last[stream])
        self._last[stream] = frozenset([node])
        self.nodes.append(node)

    def before(self, stream) -> frozenset:
        """The work that an event recorded now in `stream` comes after."""
        return self._last[stream]

    def join(self, stream, before: frozenset) -> None:
        """`stream` waits for an event, and so is a part of the capture."""
        if stream.capture is None:
            stream.capture = self
            self._last[stream] = frozenset()
        self._last[stream] |= before

    def end(self) -> None:
        """Raises RuntimeError if some stream's work was not waited for by the one where it began."""
        self.ended = True
        for stream in self._last:
            stream.capture = None
        reached, stack = set(), list(self._last[self.origin])
        while stack:
            node = stack.pop()
            if node not in reached:
                reached.add(node)
                stack += node.before
        if set(self.nodes) - reached:
            raise RuntimeError("cudaErrorStreamCaptureUnjoined")


class Launch:
    """A replay: the nodes in any order that they allow."""

    def __init__(self, capture: Capture, random) -> None:
        self._left, self._done, self._random = list(capture.nodes), set(), random

    def _able(self) -> list[Node]:
        return [node for node in self._left if node.before <= self._done and node.work.ready()]

    def ready(self) -> bool:
        return not self._left or bool(self._able())

    def blockers(self) -> list:
        return [stream for node in self._left for stream in node.work.blockers()]

    def step(self) -> bool:
        if self._left:
            node = self._random.choice(self._able())
            if node.work.step():
                self._left.remove(node)
                self._done.add(node)
        return not self._left
