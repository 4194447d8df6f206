"""The GPU in software, for tests of training on it."""

from tests.softgpu.fixtures import gpu, kernels_of_all_tests, software

__all__ = ["gpu", "kernels_of_all_tests", "software"]
