"""Which of the algorithms that cublasLt proposes computes a matmul: the fastest, measured, and kept on disk.

As in Karpathy's llm.c and PyTorch's tuned GEMMs. A file holds the choice for one kind of matmul on one
type of GPU under one version of cublasLt. The first process that has measured a kind makes the file, and all
others take what it says: ranks that share a disk agree without talking, and a run that is repeated or resumed
has the same bits. A damaged file is measured again.
"""

from collections.abc import Callable, Sequence
from time import perf_counter

from shardrt.kernels import kept
from shardrt.kernels.cuda._compile import cache_directory
from shardrt.kernels.cuda._cublaslt_plan import Algorithm, NoSuchProduct, Plan, serialized

APART = "apart"  # other products and kernels do the same faster
FINALISTS = 4  # candidates that are measured more than once
ROUNDS = 3  # more, for these
LIMIT = 1.0  # seconds after which the rest of the candidates for one kind of matmul is left out
BUDGET = 20.0  # seconds of a process, after which kinds that are new take the first candidate

Choice = Algorithm | str
Work = Callable[[], None]
Run = Callable[[Algorithm], None]
Seconds = Callable[[Work, int], float | None]


class Chooser:
    """Chooses what computes the products of a plan. kept: where choices are on disk."""

    def __init__(self, kept: "Kept") -> None:
        self._kept = kept
        self._spent = 0.0  # seconds

    def choose(self, plan: Plan, run: Run, apart: Work | None, seconds: Seconds) -> Choice | None:
        """A candidate of the plan, what is kept, or APART; None if it can't be measured now.

        run: computes the product by an algorithm. apart: does the same with other products and kernels. Both
        are called again and again. Raises NoSuchProduct if no algorithm can run and there is no `apart`.
        """
        if len(plan.candidates) == 1 and apart is None:
            return plan.candidates[0]
        name = repr(plan.what)
        found = self._kept.read(name)
        choice = _meant(plan, found, apart)
        if choice is not None:
            return choice
        if found is not None:
            self._kept.complain(name)
        begin = perf_counter()
        measured = self._spent < BUDGET
        choice = fastest(plan.candidates, run, apart, seconds) if measured else plan.candidates[0]
        self._spent += perf_counter() - begin
        if choice is None:
            return None
        text = APART if choice is APART else serialized(choice)
        return _meant(plan, self._kept.write(name, text, instead_of=found), apart) or choice


def fastest(candidates: Sequence[Algorithm], run: Run, apart: Work | None, seconds: Seconds) -> Choice | None:
    """The candidate that takes the least time, or APART if that takes less; None if it can't be measured now.

    All are measured once, in their order, and the best of them again.
    """
    begin, times = perf_counter(), []
    for place, candidate in enumerate(candidates):
        if times and perf_counter() - begin > LIMIT:
            break
        try:
            taken = seconds(lambda c=candidate: run(c), 1)
        except NoSuchProduct:
            continue
        if taken is None:
            return None
        times.append((taken, place))
    if not times:
        if apart is None:
            raise NoSuchProduct("cublasLt: none of the algorithms that it proposed can compute this matmul")
        return APART
    finals = []
    for _, place in sorted(times)[:FINALISTS]:
        finals.append((seconds(lambda c=candidates[place]: run(c), ROUNDS), place))
    best, place = min(finals)
    return APART if apart is not None and seconds(apart, ROUNDS) < best else candidates[place]


class Kept(kept.Kept):
    """A folder with a file for each kind of product. identity: the GPU and the version of cublasLt."""

    def __init__(self, identity: Callable[[], tuple[str, int]]) -> None:
        def named() -> dict[str, str | int]:
            return dict(zip(("gpu", "cublasLt"), identity(), strict=True))

        super().__init__(lambda: cache_directory() / "products", named, "algorithm", "cublasLt")


def _meant(plan: Plan, text: str | None, apart: Work | None) -> Choice | None:
    """The choice that a kept text stands for; None for what the plan has no use for."""
    if text is None or (text == APART and apart is None):
        return None
    return APART if text == APART else plan.restored(text)
