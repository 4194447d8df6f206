"""The emulator, for every test of this folder."""

from tests.cuda.emulator import emulated

__all__ = ["emulated"]
