"""All exhibits, in the order of the page."""

from tests.museum.explained import EXPLAINED
from tests.museum.memory import MEMORY
from tests.museum.order import ORDER
from tests.museum.races import RACES
from tests.museum.sums import MORE, SUMS

__all__ = ["EXHIBITS", "MORE"]

EXHIBITS = [*RACES, *ORDER, *MEMORY, *SUMS, *EXPLAINED]
