"""Hosts, made once for the tests of a file that change nothing of them."""

import pytest

from tests.hosts.hosts import Hosts


@pytest.fixture(scope="module")
def hosts():
    """Two of two ranks; tests.ranks starts jobs on them."""
    with Hosts() as made, made.launching():
        yield made
