"""Rows of figures, each beside its ceiling or peer, as a table, JSON and a picture. Measures nothing."""

from dataclasses import asdict, dataclass
from pathlib import Path

PEAK_TFLOPS = 989.4  # an H100's or H200's dense bfloat16, of NVIDIA's data sheet
_SHORT = 100  # characters of an error in the table
_NOT_RUN = "not run: "  # how the error or the check of a row begins that was not tried


@dataclass(frozen=True)
class Row:
    """One figure. `beside`, `theirs`: what it is compared with, and that one's figure in the same unit.

    at_least, at_most: what the ratio figure / theirs must reach, or must not exceed. goal: what we aim at.
    check: what shows that the work was done right. error: why there is no figure.
    """

    section: str
    name: str
    figure: float | None = None
    unit: str = ""
    beside: str = ""
    theirs: float | None = None
    at_least: float | None = None
    at_most: float | None = None
    goal: float | None = None
    check: str = ""
    error: str = ""

    @property
    def ratio(self) -> float | None:
        """The ratio figure / theirs, where both exist."""
        return self.figure / self.theirs if self.figure is not None and self.theirs else None

    @property
    def met(self) -> bool | None:
        """Whether the ratio is what it must be; None where nothing is demanded or known."""
        if self.ratio is None or (self.at_least is None and self.at_most is None):
            return None
        enough = self.at_least is None or self.ratio >= self.at_least
        return enough and (self.at_most is None or self.ratio <= self.at_most)

    @property
    def bad(self) -> bool:
        """Whether it failed, or its check says that the work was not done right."""
        return bool(self.error) or "WRONG" in self.check or "DIFFER" in self.check

    @property
    def not_run(self) -> str:
        """Why it was not tried; "" if it was."""
        texts = (self.error, self.check)
        return next((text.removeprefix(_NOT_RUN) for text in texts if text.startswith(_NOT_RUN)), "")

    def as_json(self) -> dict:
        """Its fields and what follows from them."""
        return asdict(self) | {"ratio": self.ratio, "met": self.met}


def agreement(off: float, close: float, what: str = "") -> str:
    """A check in words: how far results are apart, loud where that is more than `close`."""
    return f"{what}differ by {off:.0e}{'' if off <= close else ' WRONG'}"


def of_peak(flops: float) -> str:
    """Operations a second of one GPU, for a check."""
    return f"{flops / 1e10 / PEAK_TFLOPS:.1f} % of the data sheet's peak"


def table(rows: list[Row]) -> str:
    """For a reader, a section after the other."""
    head = ("", "figure", "unit", "beside", "theirs", "ratio", "aim", "check")
    lines, section = [], None
    texts = [_texts(row) for row in rows]
    widths = [max(map(len, column)) for column in zip(head, *texts, strict=True)]
    lines.append(_line(head, widths))
    for row, text in zip(rows, texts, strict=True):
        if row.section != section:
            section = row.section
            lines.append(f"-- {section}")
        lines.append(_line(text, widths))
    return "\n".join(line.rstrip() for line in lines)


def summary(rows: list[Row]) -> str:
    """One line: how many aims were met, how many rows failed or were not tried."""
    judged = [row.met for row in rows if row.met is not None]
    not_run = sum(bool(row.not_run) for row in rows)
    failed = sum(row.bad and not row.not_run for row in rows)
    return f"{sum(judged)} of {len(judged)} aims met, {failed} failed, {not_run} not run, {len(rows)} rows"


def draw(rows: list[Row], title: str, file: Path) -> bool:
    """A bar for each ratio, with its aim, into a PNG; False where matplotlib is missing."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return False
    shown = [row for row in rows if row.ratio is not None]
    figure = Figure(figsize=(9, 1.2 + 0.22 * len(shown)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    places = range(len(shown))
    axes.barh(places, [100 * row.ratio for row in shown], color=[_COLORS[row.met] for row in shown])
    for place, row in zip(places, shown, strict=True):
        aim = row.at_least if row.at_least is not None else row.at_most
        if aim is not None:
            axes.plot([100 * aim] * 2, [place - 0.45, place + 0.45], color="black", linewidth=1)
        axes.text(100 * row.ratio, place, f" {100 * row.ratio:.0f}", va="center", fontsize=6)
    axes.set_yticks(places, [f"{row.section}: {row.name}" for row in shown], fontsize=6)
    axes.axvline(100, color="gray", linewidth=0.5)
    axes.set_xlim(0, min(200, 110 * max([1.0, *(row.ratio for row in shown)])))
    axes.invert_yaxis()
    axes.set_xlabel("% of the ceiling or peer measured in the same run; a line is the aim")
    axes.set_title(title, fontsize=9)
    figure.savefig(file, dpi=150)
    return True


_COLORS = {True: "tab:green", False: "tab:red", None: "tab:gray"}


def _texts(row: Row) -> tuple[str, ...]:
    if row.not_run:
        return (row.name, "not run", "", "", "", "", "", row.not_run)
    if row.error:
        return (row.name, "failed", "", "", "", "", "", row.error.strip().splitlines()[-1][:_SHORT])
    ratio = "" if row.ratio is None else f"{100 * row.ratio:.1f} %"
    return (
        row.name,
        number(row.figure),
        row.unit,
        row.beside,
        number(row.theirs),
        ratio,
        _aim(row),
        row.check,
    )


def _aim(row: Row) -> str:
    if row.at_least is None and row.at_most is None:
        return ""
    limit = f">= {100 * row.at_least:.0f}" if row.at_least is not None else f"<= {100 * row.at_most:.0f}"
    goal = "" if row.goal is None else f" (goal {100 * row.goal:.0f})"
    verdict = {True: " met", False: " MISSED", None: ""}[row.met]
    return limit + goal + verdict


def number(value: float | None) -> str:
    """Four digits that count."""
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _line(texts: tuple[str, ...], widths: list[int]) -> str:
    """Numbers to the right, words to the left."""
    justify = (str.ljust, str.rjust, str.ljust, str.ljust, str.rjust, str.rjust, str.ljust, str.ljust)
    return "  ".join(put(text, width) for put, text, width in zip(justify, texts, widths, strict=True))
