"""Hides oneDNN's package from each Python that has this folder on its path, as where it is not installed."""

from importlib import metadata

_found = metadata.distribution


def distribution(name: str) -> metadata.Distribution:
    """As metadata.distribution. Raises PackageNotFoundError for oneDNN's package, too."""
    if name == "onednn-cpu-gomp":
        raise metadata.PackageNotFoundError(name)
    return _found(name)


metadata.distribution = distribution
