"""`pytest -p tests.longest_first`: long files first, so that processes that take one at a time end together.

Else one would go on alone with a long file that comes last.
"""

from pathlib import Path

HERE = Path(__file__).parent
LONGEST = (  # by the seconds of each
    *("softgpu/test_training.py", "test_comm.py", "cuda/test_compile.py", "softgpu/test_pairs.py"),
    *("test_docs.py", "parity/test_features.py", "fsdp/test_pairs.py", "test_wheel.py", "test_failure.py"),
    *("bench/test_step.py", "train/test_parallel.py", "train/test_pipeline.py", "train/test_context.py"),
    *("test_beyond_memory.py", "softgpu/test_collectives.py", "cuda/test_functions.py", "test_untrusted.py"),
    *("bench/test_compare.py", "bench/test_gpu.py", "train/test_resume.py", "train/test_command.py"),
    *("parallel/test_pipeline_runs.py", "parallel/test_invariant.py", "checkpoint/test_crash_points.py"),
    *("train/test_tasks.py", "parallel/test_processes.py", "parity/test_tensor.py", "cuda/test_attention.py"),
    *("cuda/test_vision_training.py", "functional/test_conv2d.py", "parity/test_pipeline.py"),
    *("gpu/test_kernels.py", "gpu/test_conv2d.py", "gpu/test_attention.py", "cuda/test_communicators.py"),
)


def pytest_collection_modifyitems(items):
    places = {HERE / name: place for place, name in enumerate(LONGEST)}
    assert all(path.exists() for path in places), "a file that has gone or been renamed"
    items.sort(key=lambda item: places.get(item.path, len(places)))
