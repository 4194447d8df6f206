"""`pytest -p tests.longest_first`: long files first, so that processes that take one at a time end together.

Else one would go on alone with a long file that comes last.
"""

from pathlib import Path

HERE = Path(__file__).parent
# The first compiles most kernels, if nobody has yet, and the next two need none: else all would compile them.
FIRST = ("test_docs.py", "races/test_pairs.py", "cuda/test_compile.py")
LONGEST = (  # by the seconds of a processor that each takes with its processes
    *FIRST,
    *("test_comm.py", "softgpu/test_training.py", "parity/test_features.py", "fsdp/test_pairs.py"),
    *("softgpu/test_pairs.py", "test_beyond_memory.py", "simulate/test_plan.py", "test_simulated_world.py"),
    *("train/test_resume.py", "train/test_command.py", "train/test_folds.py", "bench/test_step.py"),
    *("train/test_pipeline.py", "train/test_parallel.py", "test_wheel.py", "train/test_context.py"),
    *("softgpu/test_collectives.py", "parallel/test_invariant.py"),
    *("models/test_hub.py", "cuda/test_functions.py", "checkpoint/test_crash_points.py"),
    *("bench/test_compare.py", "parallel/test_context.py", "train/test_tasks.py"),
    *("cuda/test_reduce.py", "cuda/test_vision_training.py", "bench/test_gpu.py"),
    *("parallel/test_schedules.py", "parallel/test_pipeline.py"),
    *("train/test_world_invariant.py", "functional/test_conv2d.py", "parity/test_axes.py"),
    *("cuda/test_contracts.py", "cuda/test_moe.py", "models/test_transformers.py"),
    *("parallel/test_experts.py", "cuda/test_norms.py", "test_untrusted.py"),
    *("parallel/test_meshes.py", "softgpu/test_processes.py"),
    *("test_failure.py", "test_watching.py", "train/test_stop.py"),
    *("gpu/test_kernels.py", "gpu/test_conv2d.py", "gpu/test_attention.py"),
)


def pytest_collection_modifyitems(items):
    places = {HERE / name: place for place, name in enumerate(LONGEST)}
    assert all(path.exists() for path in places), "a file that has gone or been renamed"
    items.sort(key=lambda item: places.get(item.path, len(places)))
