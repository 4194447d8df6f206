"""Which sizes a benchmark sweeps: nccl-tests' -b, -e and -f."""

import argparse
from collections.abc import Callable

from .command_line import check_least, nbytes


def add_sizes(add: Callable, least: str, most: str, factor: int) -> None:
    """Add -b, -e and -f, with what they are where they are not given."""
    add("-b", "--minbytes", type=nbytes, default=least, metavar="SIZE", help=f"smallest size ({least})")
    add("-e", "--maxbytes", type=nbytes, default=most, metavar="SIZE", help=f"largest size ({most})")
    add("-f", "--stepfactor", type=int, default=factor, metavar="N", help=f"between sizes ({factor})")


def sizes_of(options: argparse.Namespace) -> list[int]:
    """Bytes, from the smallest. Raises ValueError."""
    check_least({"-b": (options.minbytes, 1), "-f": (options.stepfactor, 2)})
    if options.maxbytes < options.minbytes:
        raise ValueError(f"-e: {options.maxbytes} bytes is less than -b, {options.minbytes}")
    return multiplied(options.minbytes, options.maxbytes, options.stepfactor)


def multiplied(least: int, most: int, factor: int) -> list[int]:
    """Sizes from `least` up to `most`, each `factor` times the one before."""
    sizes = [least]
    while sizes[-1] * factor <= most:
        sizes.append(sizes[-1] * factor)
    return sizes
