"""The house: who may import whom. DESIGN in one list; a module may import only from rooms below its own."""

import ast
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# From the bottom up. A module belongs to the room with the longest name that begins its own.
ROOMS = (
    "shardrt.kernels",  # of NumPy's arrays alone: no tensor, no rank
    "shardrt._environment",
    "shardrt.untrusted",
    "shardrt._kernel_cache",
    "shardrt.dtypes",
    "shardrt.device",
    "shardrt.comm",
    "shardrt.faults",
    "shardrt.random",
    "shardrt.hooks",
    "shardrt.tape",
    "shardrt.autograd",
    "shardrt.deferred_gradients",
    "shardrt.pytree",
    "shardrt.stand_ins",
    "shardrt.functional",
    "shardrt.tensor",
    "shardrt.nn",
    "shardrt.recompute",
    "shardrt.activation_offload",
    "shardrt.optim",
    "shardrt.fsdp",
    "shardrt.parallel",
    "shardrt.checkpoint",
    "shardrt.train",
    "shardrt.simulate",
    "shardrt.tools",
    "shardrt.learn",
    "shardrt._backends",
    "shardrt",  # the package itself: the public names
    "models",
    "bench",
)
LEVEL = {room: level for level, room in enumerate(ROOMS)}

FOLDERS = {"shardrt": "shardrt", "kernels": "shardrt.kernels", "models": "models", "bench": "bench"}


def sources():
    """(module name, path) of every source file; the links in shardrt are not followed."""
    for folder, package in FOLDERS.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            relative = path.relative_to(ROOT / folder)
            if folder == "shardrt" and relative.parts[0] in ("bench", "kernels", "models"):
                continue
            parts = [package, *relative.with_suffix("").parts]
            yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


MODULES = dict(sources())


@cache
def tree_of(name):
    return ast.parse(MODULES[name].read_text())


def full_names(name, node):
    """What a statement imports."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    base = node.module or ""
    if node.level:
        package = name if MODULES[name].name == "__init__.py" else name.rpartition(".")[0]
        above = package.split(".")[: len(package.split(".")) - node.level + 1]
        base = ".".join([*above, base]).rstrip(".")
    return [f"{base}.{alias.name}" for alias in node.names]


@cache
def imports_of(name, inside=True):
    """Full names of what a file imports, anywhere in it, or at its top alone."""
    nodes = ast.walk(tree_of(name)) if inside else tree_of(name).body
    imports = [node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]
    return {full for node in imports for full in full_names(name, node)}


def module_of(name):
    """The module that a dotted name of an import lies in, or None for other packages."""
    while name and name not in MODULES:
        name = name.rpartition(".")[0]
    return name or None


def modules_of(name, inside=True):
    """The modules of this project that a file imports."""
    return {module_of(imported) for imported in imports_of(name, inside)} - {None, name}


def room_of(name):
    while name not in LEVEL:
        name = name.rpartition(".")[0]
    return name


def closure(*start, without=()):
    """All modules that these import, lazily and for types too."""
    seen, todo = set(), set(start)
    while todo:
        name = todo.pop()
        if name not in seen and not name.startswith(without):
            seen.add(name)
            todo |= modules_of(name)
    return seen


def type_checking_only(name):
    """Names imported under `if TYPE_CHECKING:`, which never run."""
    names = set()
    for node in ast.walk(tree_of(name)):
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            imports = [inner for inner in ast.walk(node) if isinstance(inner, ast.ImportFrom)]
            names |= {full for inner in imports for full in full_names(name, inner)}
    return names


def test_imports_go_down():
    wrong = [
        f"{name} imports {imported}"
        for name in MODULES
        for imported in imports_of(name) - type_checking_only(name)
        if module_of(imported) and room_of(imported) != room_of(name)
        if LEVEL[room_of(imported)] > LEVEL[room_of(name)]
    ]
    assert not wrong


def test_the_runtime_of_fsdp_knows_no_option():
    """Not even lazily or for types: options enter at seams (docs/explanation/schedule.md)."""
    for name in MODULES:
        if name.startswith("shardrt.fsdp.") and not name.startswith("shardrt.fsdp.options"):
            assert not [other for other in imports_of(name) if other.startswith("shardrt.fsdp.options")], name


def test_no_circle_when_modules_are_imported():
    """A package's own __init__ gathers its modules; importing one of these loads it first: no circle."""
    graph = {
        name: {below for below in modules_of(name, inside=False) if not name.startswith(below + ".")}
        for name in MODULES
    }
    TopologicalSorter(graph).prepare()


@pytest.mark.parametrize("room", ["shardrt.nn", "shardrt.parallel"])
def test_no_circle_in_a_room_not_even_lazily_or_for_types(room):
    names = {name for name in MODULES if name.startswith(room + ".")}
    TopologicalSorter({name: modules_of(name) & names for name in names}).prepare()


PLUGS_IN = (  # into device and comm; shardrt/_backends.py registers them
    "shardrt._backends",
    "shardrt.faults",
    *(f"shardrt.device.{name}" for name in ("cuda", "capture", "upload", "simulated", "program", "shapes")),
    *(f"shardrt.comm.{name}" for name in ("shm", "flags", "futex", "segments", "mailbox", "hierarchical")),
    *(f"shardrt.comm.{name}" for name in ("staged", "nccl", "nccl_watchdog", "ipc", "links", "simulated")),
)


def test_the_runtime_imports_nothing_that_plugs_into_device_and_comm_not_even_lazily_or_for_types():
    start = ("shardrt.fsdp.api", "shardrt.comm.mesh", "shardrt.comm.mpi", "shardrt.comm.thread")
    assert not [name for name in closure(*start) if name.startswith(PLUGS_IN)]


WITHOUT = ("shardrt.functional", "shardrt.kernels", "shardrt.nn.layers")  # what the band is read without
LIMIT = 7_000  # lines


def band():
    """The runtime band: all modules that fsdp.api imports, lazily and for types too, except WITHOUT."""
    return closure("shardrt.fsdp.api", without=WITHOUT)


def test_the_runtime_band_can_be_read_in_a_day():
    lines = {name: len(MODULES[name].read_text().splitlines()) for name in band()}
    assert sum(lines.values()) <= LIMIT, sorted(lines.items(), key=lambda item: -item[1])


def test_the_runtime_band_knows_no_feature_of_modules_and_of_the_tape():
    rooms = ("shardrt.fsdp", "shardrt.comm", "shardrt.device")
    assert {name for name in band() if not name.startswith(rooms)} <= {
        "shardrt._environment",
        "shardrt.autograd",
        "shardrt.dtypes",
        "shardrt.nn.collect",
        "shardrt.nn.module",
        "shardrt.nn.parameter",
        "shardrt.nn.extents",
        "shardrt.nn.storage",
        "shardrt.pytree",
        "shardrt.tape",
    }


def test_one_file_of_functions_names_the_class_that_has_them_as_methods():
    """Tensor is above this room: a second file that imports it, even for types, would be a second circle."""
    functions = [name for name in MODULES if name.startswith("shardrt.functional.")]
    naming = {name for name in functions if "shardrt.tensor.Tensor" in imports_of(name)}
    assert naming == {"shardrt.functional._types"}


OPTIONAL = (  # enters by shardrt/_backends.py or shardrt/fsdp/options
    *PLUGS_IN,
    *(f"shardrt.device.{name}" for name in ("cpu", "memory", "pages", "timeline", "threads", "host")),
    *(f"shardrt.comm.{name}" for name in ("mesh", "thread", "mpi", "mpi_world", "contexts")),
    *(f"shardrt.comm.{name}" for name in ("calls", "counts", "notices", "outbox", "patience", "supervision")),
    *(f"shardrt.comm.{name}" for name in ("recording", "counter", "delay")),
    *(f"shardrt.fsdp.{name}" for name in ("options", "memory", "scratch", "dry_run", "replicas")),
)


def test_the_runtime_band_imports_no_backend_and_no_option():
    assert not {name for name in band() if name in OPTIONAL or name.startswith("shardrt.fsdp.options")}


PRODUCT = (
    *(f"shardrt.{room}" for room in ("checkpoint", "faults", "learn", "simulate", "tools", "train")),
    "models",
    "bench",
)


def names_taken(name):
    """(module, name in it) of everything that a module takes from others, by import or as `module.name`."""
    modules, taken = {}, set()
    for node in ast.walk(tree_of(name)):
        if isinstance(node, ast.ImportFrom):
            for alias, full in zip(node.names, full_names(name, node), strict=True):
                if full in MODULES:
                    modules[alias.asname or alias.name] = full
                elif module_of(full):
                    taken.add((module_of(full), alias.name))
        elif (
            isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules
        ):
            taken.add((modules[node.value.id], node.attr))
    return taken


def exported(name):
    """The names in __all__ of a module; a package's modules count as well."""
    for node in tree_of(name).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return set(ast.literal_eval(node.value))
    return set()


def test_the_product_takes_public_names_only():
    def room(module):
        return next((each for each in PRODUCT if module.startswith(each)), module)

    private = {
        f"{name} takes {module}.{taken}"
        for name in MODULES
        if name.startswith(PRODUCT)
        for module, taken in names_taken(name)
        if room(module) != room(name) and taken not in exported(module) and f"{module}.{taken}" not in MODULES
        if (module, taken) != ("shardrt", "__version__")
    }
    assert not private


WITH_A_GPU = ("shardrt.device.cuda", "shardrt.comm.nccl", "shardrt.kernels.cuda", "bench.gpu")


def test_no_module_imports_cupy_where_there_is_no_gpu_or_the_bare_name_kernels():
    """That name belongs to another package on PyPI; ours is shardrt.kernels."""
    for name in MODULES:
        packages = {imported.partition(".")[0] for imported in imports_of(name)}
        assert "kernels" not in packages, name
        assert name.startswith(WITH_A_GPU) or not packages & {"cupy", "cupyx"}, name
