"""`pytest -p tests.longest_first`: long files first, so that processes that take one at a time end together.

Else one would go on alone with a long file that comes last.
"""

from pathlib import Path

HERE = Path(__file__).parent
LONGEST = (  # by the seconds of each
    *("test_comm.py", "softgpu/test_pairs.py", "softgpu/test_training.py", "cuda/test_functions.py"),
    *("cuda/test_compile.py", "bench/test_gpu.py", "test_wheel.py", "softgpu/test_collectives.py"),
    *("parity/test_features.py", "parity/test_tensor.py", "test_docs.py", "cuda/test_vision_training.py"),
    *("bench/test_step.py", "test_beyond_memory.py", "checkpoint/test_crash_points.py"),
    *("train/test_command.py", "train/test_resume.py", "functional/test_conv2d.py", "cuda/test_attention.py"),
    "train/test_tasks.py",
    *("gpu/test_kernels.py", "gpu/test_conv2d.py", "gpu/test_attention.py", "cuda/test_communicators.py"),
)


def pytest_collection_modifyitems(items):
    places = {HERE / name: place for place, name in enumerate(LONGEST)}
    assert all(path.exists() for path in places), "a file that has gone or been renamed"
    items.sort(key=lambda item: places.get(item.path, len(places)))
