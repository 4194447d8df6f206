"""All contracts: of each file of this folder."""

from importlib import import_module
from pathlib import Path

from tests.contracts import CONTRACTS

__all__ = ["CONTRACTS"]

for _path in sorted(Path(__file__).parent.glob("[a-z]*.py")):
    import_module(f"tests.contracts.{_path.stem}")
