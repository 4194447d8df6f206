"""bench.longest_context: what it finds fits, a little more does not, and it is what the page says."""

from bench import longest_context as bench
from tests.ranks import ROOT


def test_the_longest_fits_and_the_next_does_not_and_the_page_says_so():
    limit = 2 * 10**9
    none, found = bench.longest("llama-100m", 2, [10**8, limit])
    fits, too_much = (bench.bytes_of("llama-100m", 2, found + more) for more in (0, bench.STEP))
    assert none == 0 and fits <= limit < too_much
    page = (ROOT / "docs/context_parallel.md").read_text().splitlines()
    (first,) = (number for number, line in enumerate(page) if line.startswith("| `llama-100m` | 1 |"))
    assert page[first + 1].startswith(f"| | 2 | {found:,} |")
