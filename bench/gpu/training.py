"""Training GPT-2: against PyTorch, sharded against unsharded, optimizer state on the host or not."""

import statistics
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from . import needs
from .contestant import Course, race
from .job import SIZES, Job
from .report import PEAK_TFLOPS, agreement, of_peak
from .state import Run

OURS, PEER = "bench.gpu.ours", "bench.gpu.torch_peer"
AIMS = {"gpt2": (1.0, 1.15, 0.42, 0.50), "gpt2-xl": (1.0, 1.08, 0.50, 0.57)}  # of torch, of the peak
CLOSE = 2e-2  # relative difference of losses in bfloat16


def beside_torch(run: Run, size: str = "gpt2", job: Job | None = None) -> None:
    """Tokens a second, MFU and memory of both, from the same weights on the same tokens.

    GPT-2 124M also beside FSDP2 at world size 1.
    """
    job = job or SIZES[size]
    with tempfile.TemporaryDirectory(prefix="bench-gpu-") as folder:
        weights = str(Path(folder) / "weights.npz")
        entrants = {
            "shardrt": (OURS, job.settings(save=weights)),
            "torch": (PEER, job.settings(weights=weights)),
        }
        if size == "gpt2":
            sharded = {"fsdp": True, "compiled": job.compiled and "blocks"}
            entrants["FSDP2"] = (PEER, job.settings(weights=weights, **sharded))
        if not needs.there("torch"):
            entrants = {"shardrt": entrants["shardrt"]}
            run.add("torch", check=needs.not_run("torch"))
        rounds, steps = (2, 3) if run.quick else (5, 8)
        courses = race(
            entrants,
            warmup=2 if run.quick else 4,
            rounds=rounds,
            steps=steps,
            entered=lambda name, course: alone(run, job, name, course),
        )
    for name, course in courses.items():
        if course.error:
            run.add(name, error=course.error)
    compare(run, job, courses, AIMS[size])


def ours_alone(run: Run, job: Job | None = None) -> None:
    """Our own row without the time that PyTorch takes to compile."""
    job = job or SIZES["gpt2"]
    course = race({"shardrt": (OURS, job.settings())}, warmup=4, rounds=0, steps=4 if run.quick else 16)
    if not failed(run, "shardrt, alone", course):
        alone(run, job, "shardrt", course["shardrt"])


def alone(run: Run, job: Job, name: str, course: Course) -> None:
    """A row for each as soon as it can be: compiling the next may take all the time that is left."""
    rate = job.count / course.alone["seconds"]
    message = of_peak(rate * job.flops_per_token(course.about["parameters"]))
    taken = f"{course.about['warmup']['taken'] / 1e6:,.0f} MB taken"
    run.add(f"{name}, alone", rate, "tokens/s", check=f"{message}, {taken}, loss {course.alone['loss']:.4f}")


def compare(run: Run, job: Job, courses: dict[str, Course], aims: tuple[float, ...]) -> None:
    """The rows of a race of "shardrt", "torch" and perhaps "FSDP2", as far as each came."""
    least, goal, least_mfu, goal_mfu = aims
    done = {name: course for name, course in courses.items() if course.seconds}
    rates = {name: job.count / course.median for name, course in done.items()}
    for peer in ("torch", "FSDP2"):
        if not {"shardrt", peer} <= done.keys():
            continue
        ours, theirs = done["shardrt"], done[peer]
        check = losses_agree(ours.losses, theirs.losses, CLOSE) + apart(ours, theirs)
        how = {"model": "compiled", "blocks": "blocks compiled", "": "NOT COMPILED"}
        compiled = how[theirs.answers[-1]["compiled"]]
        run.add(
            f"training step, {job.count} tokens" if peer == "torch" else "the same step",
            rates["shardrt"],
            "tokens/s",
            beside=f"{peer}, {compiled}, {theirs.about['attention']} attention",
            theirs=rates[peer],
            at_least=least,
            goal=goal,
            check=check,
        )
        taken = [course.about["warmup"]["taken"] / 1e6 for course in (ours, theirs)]
        held = theirs.answers[-1]["held"] / 1e6
        run.add(
            "GPU memory taken",
            taken[0],
            "MB",
            beside=peer,
            theirs=taken[1],
            at_most=1.0,
            check=f"{peer}'s tensors alone {held:,.0f} MB at their peak",
        )
    for name, course in done.items():
        mfu(
            run,
            name,
            rates[name] * job.flops_per_token(course.about["parameters"]) / 1e12,
            least_mfu,
            goal_mfu,
        )


def mfu(run: Run, name: str, rate: float, least: float, goal: float) -> None:
    """A step's operations per second beside the data sheet's peak and the product measured here."""
    aims = {"at_least": least, "goal": goal} if name == "shardrt" else {}
    title = f"{name}: model FLOP/s"
    run.add(title, rate, "TFLOP/s", beside="data sheet", theirs=PEAK_TFLOPS, **aims)
    if "matmul" in run.ceilings:
        run.add(title, rate, "TFLOP/s", beside="matmul 8192^3", theirs=run.ceilings["matmul"])


def sharded(run: Run, job: Job | None = None) -> None:
    """FSDP on one GPU, where nothing need be sent: what the machinery itself costs."""
    job = job or SIZES["gpt2"]
    exact = replace(job, dtype="float32", batch=max(1, job.batch // 4))
    pairs = {
        "FULL_SHARD, float32": (exact, "NONE", "not sharded"),
        "FULL_SHARD, bfloat16": (job, "NO_SHARD", "NO_SHARD"),
    }
    rounds, steps = (2, 2) if run.quick else (5, 4)
    for name, (how, base, beside) in pairs.items():
        entrants = {
            "base": (OURS, how.settings(strategy=base)),
            "FULL_SHARD": (OURS, how.settings(strategy="FULL_SHARD")),
        }
        courses = race(entrants, warmup=2, rounds=rounds, steps=steps)
        if not failed(run, name, courses):
            by_turns(run, name, courses, beside, 1.03, 1.01, losses_agree)


def offloaded(run: Run, job: Job | None = None) -> None:
    """The moments in pinned memory, streamed through the GPU at each update; half a million tokens a step."""
    job = job or replace(SIZES["gpt2"], batch=128 if run.quick else 512, micro_batches=4 if run.quick else 16)
    job = replace(job, deterministic=True)  # the two are compared to the bit
    entrants = {
        "base": (OURS, job.settings()),
        "offloaded": (OURS, job.settings(offload=True)),
    }
    courses = race(
        entrants, warmup=1, rounds=2 if run.quick else 3, steps=1, last=("digest", "update")
    )  # the digest first: `update` trains on
    name = f"optimizer state on the host, {job.count} tokens a step"
    if failed(run, name, courses):
        return
    same = len({course.about["digest"] for course in courses.values()}) == 1
    bits = "parameters have the same bits" if same else "parameters DIFFER"
    by_turns(run, name, courses, "on the GPU", 1.10, 1.05, lambda *_: bits)
    about = courses["offloaded"].about
    moved = 16 * about["parameters"] / about["update"] / 1e9  # two float32 arrays, each way
    aims = {"at_least": 0.90, "goal": 0.95}
    run.add(
        "an update alone, moments there and back",
        moved,
        "GB/s",
        beside="pinned, both at once",
        theirs=run.ceilings.get("both at once"),
        **aims,
    )
    taken = [courses[key].about["warmup"]["taken"] / 1e6 for key in ("offloaded", "base")]
    run.add("GPU memory taken", taken[0], "MB", beside="on the GPU", theirs=taken[1], at_most=1.0)


def by_turns(
    run: Run,
    name: str,
    courses: dict[str, Course],
    beside: str,
    at_most: float,
    goal: float,
    check: Callable[[list, list, float], str],
) -> None:
    """The second course's step beside the first's, by the median of the rounds' ratios."""
    first, second = courses.values()
    ratios = [b / a for a, b in zip(first.seconds, second.seconds, strict=True)]
    spread = f"{100 * min(ratios):.1f} to {100 * max(ratios):.1f} %"
    run.add(
        name,
        1e3 * statistics.median(first.seconds) * statistics.median(ratios),
        "ms/step",
        beside=beside,
        theirs=1e3 * first.median,
        at_most=at_most,
        goal=goal,
        check=f"{check(second.losses, first.losses, 1e-6)}; rounds {spread}{apart(first, second)}",
    )


def apart(first: Course, second: Course) -> str:
    """A word for the check where two did not take turns."""
    return "" if first.heat == second.heat else "; one after the other: no memory for both"


def failed(run: Run, name: str, courses: dict[str, Course]) -> bool:
    """Whether one is out: rows that say so."""
    errors = [course.error for course in courses.values() if course.error]
    for error in errors:
        run.add(name, error=error)
    return bool(errors)


def losses_agree(losses: list[float], others: list[float], tolerance: float) -> str:
    """The largest relative difference in words, loud where it is more than the tolerance."""
    off = max(abs(a - b) / abs(b) for a, b in zip(losses, others, strict=False))
    return agreement(off, tolerance, "losses ")
