"""The house: who may import whom. DESIGN in one list; a module may import only from rooms below its own."""

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from tests.ranks import python

ROOT = Path(__file__).parent.parent

# From the bottom up. A module belongs to the room with the longest name that begins its own.
ROOMS = [
    ["shardrt._environment"],
    ["shardrt.untrusted"],
    ["shardrt._kernel_cache"],
    ["shardrt.dtypes"],
    ["shardrt.kernels"],
    ["shardrt.device"],
    ["shardrt.comm"],
    ["shardrt.faults"],
    ["shardrt.random"],
    ["shardrt.hooks"],
    ["shardrt.tape"],
    ["shardrt.autograd"],
    ["shardrt.deferred_gradients"],
    ["shardrt.pytree"],
    ["shardrt.stand_ins"],
    ["shardrt.functional"],
    ["shardrt.tensor"],
    ["shardrt.nn"],
    ["shardrt.recompute"],
    ["shardrt.activation_offload"],
    ["shardrt.optim"],
    ["shardrt.fsdp"],
    ["shardrt.parallel"],
    ["shardrt.checkpoint"],
    ["shardrt.train"],
    ["shardrt.simulate"],
    ["shardrt.tools"],
    ["shardrt._backends"],
    ["shardrt"],  # the package itself: the public names
    ["models"],
    ["bench"],
]
LEVEL = {room: level for level, rooms in enumerate(ROOMS) for room in rooms}

FOLDERS = {"shardrt": "shardrt", "kernels": "shardrt.kernels", "models": "models", "bench": "bench"}


def sources():
    """(module name, path) of every source file; the links kernels and models inside shardrt not followed."""
    for folder, package in FOLDERS.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            relative = path.relative_to(ROOT / folder)
            if folder == "shardrt" and relative.parts[0] in ("kernels", "models"):
                continue
            parts = [package, *relative.with_suffix("").parts]
            yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


def imports_of(name, path):
    """Full names of the modules of this project that a file imports, anywhere in it."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, base]).rstrip(".")
            for alias in node.names:
                yield f"{base}.{alias.name}"


def room_of(name):
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        if ".".join(parts[:length]) in LEVEL:
            return ".".join(parts[:length])
    return None


MODULES = dict(sources())


def module_of(name):
    """The module that a dotted name of an import lies in, or None for other packages."""
    while name and name not in MODULES:
        name = name.rpartition(".")[0]
    return name or None


def type_checking_only(path):
    """Names imported under `if TYPE_CHECKING:`, which never run."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            for inner in ast.walk(node):
                if isinstance(inner, ast.ImportFrom):
                    names |= {f"{inner.module}.{alias.name}" for alias in inner.names}
    return names


@pytest.mark.parametrize("name", MODULES)
def test_imports_go_down(name):
    path = MODULES[name]
    own = room_of(name)
    for imported in set(imports_of(name, path)) - type_checking_only(path):
        room = room_of(imported)
        if room is None or room == own or imported.partition(".")[0] not in ("shardrt", "models", "bench"):
            continue
        assert LEVEL[room] < LEVEL[own], f"{name} ({own}) imports {imported} ({room}), which is above it"


def test_the_runtime_of_fsdp_knows_no_option():
    """Not even lazily or for types: options enter at seams (docs/fsdp.md)."""
    for name, path in MODULES.items():
        if name.startswith("shardrt.fsdp.") and not name.startswith("shardrt.fsdp.options"):
            found = [other for other in imports_of(name, path) if other.startswith("shardrt.fsdp.options")]
            assert not found, f"{name} imports {found}"


def test_no_circle_when_modules_are_imported():
    graph = {}
    for name, path in MODULES.items():
        top = ast.parse(path.read_text()).body
        edges = set()
        for node in top:
            if isinstance(node, ast.Import | ast.ImportFrom):
                small = ast.Module([node], [])
                edges |= set(_names(name, path, small))
        graph[name] = {module_of(e) for e in edges} - {None, name}
    state = {}

    def visit(name, trail):
        state[name] = "open"
        for below in graph[name]:
            # A package's own __init__ gathers its modules; importing a module loads it first: no circle.
            if name.startswith(below + "."):
                continue
            assert state.get(below) != "open", f"circle: {' -> '.join([*trail, name, below])}"
            if below not in state:
                visit(below, [*trail, name])
        state[name] = "done"

    for name in graph:
        if name not in state:
            visit(name, [])


@pytest.mark.parametrize("room", ["shardrt.nn", "shardrt.parallel"])
def test_no_circle_in_a_room_not_even_lazily_or_for_types(room):
    files = {name: path for name, path in MODULES.items() if name.startswith(room + ".")}
    graph = {name: {module_of(each) for each in imports_of(name, path)} for name, path in files.items()}
    TopologicalSorter({name: below & graph.keys() - {name} for name, below in graph.items()}).prepare()


PLUGS_IN = (  # into device and comm; shardrt/_backends.py registers them
    "shardrt._backends",
    "shardrt.faults",
    *(f"shardrt.device.{name}" for name in ("cuda", "capture", "upload", "simulated", "program", "shapes")),
    *(f"shardrt.comm.{name}" for name in ("shm", "flags", "futex", "segments", "mailbox", "hierarchical")),
    *(f"shardrt.comm.{name}" for name in ("staged", "nccl", "nccl_watchdog", "ipc", "links", "simulated")),
)


def test_the_runtime_imports_nothing_that_plugs_into_device_and_comm_not_even_lazily_or_for_types():
    todo = ["shardrt.fsdp.api", "shardrt.comm.mesh", "shardrt.comm.mpi", "shardrt.comm.thread"]
    seen = set(todo)
    while todo:
        name = todo.pop()
        found = {module_of(imported) for imported in imports_of(name, MODULES[name])} - {None}
        wrong = [other for other in found if other.startswith(PLUGS_IN)]
        assert not wrong, f"{name} imports {wrong}"
        todo += found - seen
        seen |= found


WITHOUT = ("shardrt.functional", "shardrt.kernels", "shardrt.nn.layers")  # what the band is read without
LIMIT = 7_000  # lines


def band():
    """The runtime band: all modules that fsdp.api imports, lazily and for types too, except WITHOUT."""
    seen, todo = set(), ["shardrt.fsdp.api"]
    while todo:
        name = todo.pop()
        if name not in seen and not name.startswith(WITHOUT):
            seen.add(name)
            todo += {module_of(imported) for imported in imports_of(name, MODULES[name])} - {None}
    return seen


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
    functions = {name: path for name, path in MODULES.items() if name.startswith("shardrt.functional.")}
    naming = {
        name for name, path in functions.items() if "shardrt.tensor.Tensor" in set(imports_of(name, path))
    }
    assert naming == {"shardrt.functional._types"}


OPTIONAL = (  # enters by shardrt/_backends.py or shardrt/fsdp/options
    *PLUGS_IN,
    *(f"shardrt.device.{name}" for name in ("cpu", "memory", "pages", "timeline", "threads", "host")),
    *(f"shardrt.comm.{name}" for name in ("mesh", "thread", "mpi", "mpi_world", "contexts")),
    *(f"shardrt.comm.{name}" for name in ("calls", "counts", "notices", "outbox", "patience", "supervision")),
    *(f"shardrt.comm.{name}" for name in ("recording", "counter", "delay")),
    *(f"shardrt.fsdp.{name}" for name in ("options", "memory", "scratch", "dry_run", "replicas", "trained")),
)


def test_the_runtime_band_imports_no_backend_and_no_option():
    assert not {name for name in band() if name in OPTIONAL or name.startswith("shardrt.fsdp.options")}


PRODUCT = (
    *(f"shardrt.{room}" for room in ("checkpoint", "faults", "simulate", "tools", "train")),
    "models",
    "bench",
)


def names_taken(name):
    """(module, name in it) of everything that a module takes from others, by import or as `module.name`."""
    path, modules, taken = MODULES[name], {}, set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            for alias, full in zip(node.names, _names(name, path, ast.Module([node], [])), strict=True):
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
    for node in ast.parse(MODULES[name].read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return set(ast.literal_eval(node.value))
    return set()


@pytest.mark.parametrize("name", [name for name in MODULES if name.startswith(PRODUCT)])
def test_the_product_takes_public_names_only(name):
    def room(module):
        return next((each for each in PRODUCT if module.startswith(each)), module)

    private = {
        f"{module}.{taken}"
        for module, taken in names_taken(name)
        if room(module) != room(name) and taken not in exported(module) and f"{module}.{taken}" not in MODULES
    }
    assert private <= {"shardrt.__version__"}


def _names(name, path, tree):
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in tree.body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        else:
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, base]).rstrip(".")
            yield from (f"{base}.{alias.name}" for alias in node.names)


def test_nobody_imports_the_bare_name_kernels():
    """It belongs to another package on PyPI; ours is shardrt.kernels."""
    for path in [*MODULES.values(), *(ROOT / "tests").rglob("*.py"), *(ROOT / "docs").rglob("*.py")]:
        text = path.read_text()
        for node in ast.walk(ast.parse(text)) if "kernels" in text else ():
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module]
            assert not any(n.split(".")[0] == "kernels" for n in names), f"{path}:{node.lineno}"


def test_kernels_and_models_are_links_and_kernels_is_no_package():
    assert (ROOT / "shardrt" / "kernels").readlink() == Path("../kernels")
    assert (ROOT / "shardrt" / "models").readlink() == Path("../models")
    assert not (ROOT / "kernels" / "__init__.py").exists()


ASK_THE_WORLD = {"shardrt.functional.dropout"}


def test_nobody_above_comm_asks_for_the_rank_in_the_world():
    """It is that on a mesh, or on an axis of one; comm.world.first and alone are for what is on no mesh."""
    above = LEVEL["shardrt.comm"]
    asking = {
        name
        for name, path in MODULES.items()
        if name.startswith("shardrt.") and LEVEL[room_of(name)] > above
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and node.attr == "current" and isinstance(node.value, ast.Name)
        if node.value.id in ("world", "worlds")
    }
    assert asking == ASK_THE_WORLD


def test_cupy_is_imported_in_no_place_that_runs_without_a_gpu():
    allowed = {"shardrt.device.cuda", "shardrt.comm.nccl", "shardrt.kernels.cuda", "bench.gpu"}
    for name, path in MODULES.items():
        if any(name == place or name.startswith(place + ".") for place in allowed):
            continue
        for imported in imports_of(name, path):
            assert imported.split(".")[0] not in ("cupy", "cupyx"), f"{name} imports {imported}"


def test_kernels_know_no_tensor_and_no_rank():
    for name, path in MODULES.items():
        if name.startswith("shardrt.kernels"):
            for imported in imports_of(name, path):
                assert not imported.startswith("shardrt") or imported.startswith("shardrt.kernels"), name


def _python(code):
    done = python("-c", code)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_loads_neither_numba_nor_mpi_nor_what_simulates():
    loaded = set(_python("import shardrt, sys; print(*sys.modules)").split())
    assert "numpy" in loaded
    assert not {"numba", "mpi4py", "matplotlib", "safetensors", "torch"} & loaded
    rooms = "shardrt.simulate", "shardrt.tools", "shardrt.device.simulated", "shardrt.comm.simulated"
    assert not [name for name in loaded if name.startswith((*rooms, "shardrt.kernels.cost"))]


@pytest.mark.serial
def test_import_takes_no_longer_than_a_few_of_numpy():
    code = "import time; t = time.process_time(); import {}; print(time.process_time() - t)"
    numpy, ours = (min(float(_python(code.format(name))) for _ in range(5)) for name in ("numpy", "shardrt"))
    assert ours < 5 * numpy, f"import shardrt took {ours:.3f} s, that of NumPy alone {numpy:.3f} s"


def test_the_models_have_one_name_in_a_process():
    _python("from shardrt.models.gpt import GPT, GPTConfig")
    twice = "import models.gpt\ntry: import shardrt.models.gpt\nexcept ImportError as error: print(error)"
    assert "are the same files: import them under one of the two names" in _python(twice)
