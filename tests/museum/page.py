"""The page of the museum: its table and its reports, as the exhibits give them."""

import re

from tests.museum.bug import Bug
from tests.museum.checks import said_with
from tests.museum.exhibits import EXHIBITS
from tests.ranks import ROOT

__all__ = ["ANSWERS", "PAGE", "renewed"]

PAGE = ROOT / "docs" / "explanation" / "museum.md"
ANSWERS = ROOT / "tests" / "museum" / "answers.md"
ROWS = re.compile(r"(?<=\|---\|---\|---\|---\|\n)(\|.*\n)+")
REPORT = re.compile(r"(?<=^```text\n).*?(?=^```)", re.DOTALL | re.MULTILINE)
NAMED = re.compile(r"\[(\S+#\d+)\]")


def renewed(text: str) -> str:
    """The page with the table and the reports of now. Each report is of the bug that was linked last."""
    named = {bug.name: bug for bug in EXHIBITS}
    text = ROWS.sub(lambda _: "".join(map(_row, EXHIBITS)), text)

    def report(found: re.Match) -> str:
        bug = named[NAMED.findall(text, 0, found.start())[-1]]
        return f"{said_with(bug).found}\n"

    return REPORT.sub(report, text)


def _row(bug: Bug) -> str:
    where = bug.operation or f"none: {bug.why}"
    return f"| [{bug.name}]({bug.link}) | {bug.did.removesuffix('.')} | {bug.check or '-'} | {where} |\n"
