"""Data flows one way, modules keep their private names to themselves, and no two have one name."""

import ast
import functools
import graphlib
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(path): path for path in (ROOT / "torchloo").rglob("*.py")}


class _Imports(ast.NodeVisitor):
    """Modules of the package that a module imports, also within functions.

    Attributes:
        modules: those imported when the program runs.
        for_types: those imported under TYPE_CHECKING.
        names: all that is imported by name, in full.
    """

    def __init__(self) -> None:
        self.modules: set[str] = set()
        self.for_types: set[str] = set()
        self.names: list[str] = []
        self._found = self.modules

    def visit_If(self, node: ast.If) -> None:
        if "TYPE_CHECKING" in ast.dump(node.test):
            self._found = self.for_types
        self.generic_visit(node)
        self._found = self.modules

    def visit_Import(self, node: ast.Import) -> None:
        self._found |= {alias.name for alias in node.names} & MODULES.keys()

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        if node.module not in MODULES:
            return
        for alias in node.names:
            whole = f"{node.module}.{alias.name}"
            self._found.add(whole if whole in MODULES else node.module)
            self.names.append(whole)


@functools.cache
def imports() -> list[tuple[str, _Imports]]:
    every = []
    for name, path in MODULES.items():
        found = _Imports()
        found.visit(ast.parse(path.read_text(encoding="utf-8")))
        every.append((name, found))
    return every


def test_no_module_imports_itself_through_others():
    order = graphlib.TopologicalSorter({name: found.modules for name, found in imports()})
    order.prepare()  # CycleError names a cycle


def test_no_module_takes_a_private_name_of_another():
    taken = [(name, one) for name, found in imports() for one in found.names]
    assert [pair for pair in taken if pair[1].rpartition(".")[2].startswith("_")] == []


OF_NAMED_TUPLES = {"_replace", "_asdict", "_fields", "_make"}


def is_own(node: ast.Attribute) -> bool:
    """Whether an attribute is one of self, cls or super()."""
    if isinstance(node.value, ast.Call):
        return getattr(node.value.func, "id", "") == "super"
    return getattr(node.value, "id", "") in ("self", "cls")


def defined_names(tree: ast.Module) -> set[str]:
    """Names of functions, classes, variables and attributes that a module defines."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names.add(node.attr)
    return names


def test_no_package_reads_a_private_attribute_that_only_another_defines():
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in MODULES.values()}
    defined = defaultdict(set)
    for path, tree in trees.items():
        names = defined_names(tree)
        defined[path.parent] |= {name for name in names if name.startswith("_") and not name.endswith("__")}
    anywhere = set().union(*defined.values()) - OF_NAMED_TUPLES
    taken = set()
    for path, tree in trees.items():
        foreign = anywhere - defined[path.parent]
        read = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and not is_own(node)]
        where = path.relative_to(ROOT).as_posix()
        taken |= {(where, node.attr) for node in read if node.attr in foreign}
    assert taken == set()


def test_every_file_has_a_name_of_its_own():
    count = Counter(path.name for path in MODULES.values() if path.name != "__init__.py")
    assert [name for name, times in count.items() if times > 1] == []


IMPORT_EACH = """
import importlib, sys, types
for name in {names}:
    for known in [known for known in sys.modules if known.partition(".")[0] == "torchloo"]:
        del sys.modules[known]
    if not name.startswith("torchloo.cli"):  # which uses the public names
        sys.modules["torchloo"] = types.ModuleType("torchloo")
        sys.modules["torchloo"].__path__ = ["torchloo"]
    importlib.import_module(name)
"""


@pytest.mark.slow
def test_every_module_can_be_imported_first():
    names = sorted(MODULES.keys() - {"torchloo", "torchloo.__main__"})
    subprocess.run([sys.executable, "-c", IMPORT_EACH.format(names=names)], check=True, cwd=ROOT)


def room_of(module: str) -> str:
    """The package or the file below torchloo that a module belongs to."""
    return module.split(".")[1] if "." in module else module


def rooms() -> dict[str, set[str]]:
    """Which other rooms each room imports when the program runs."""
    found = defaultdict(set)
    for name, imported in imports():
        found[room_of(name)] |= set(map(room_of, imported.modules)) - {room_of(name)}
    return found


def test_no_package_imports_itself_through_others():
    graphlib.TopologicalSorter(rooms()).prepare()


BASICS = {
    "guards",
    "autograd",
    "precision",
    "memory",
    "csr",
    "positive",
    "classes",
    "clusters",
    "text_table",
    "datasets",
}
KERNELS = {"kernels"}
ROWS = {"problem", "panels", "blocks", "factors", "leave_out_sets"}
SMOOTHERS = {"dual", "quick", "primal", "streaming", "representation", "smoothers", "spectral"}
CRITERIA = {"criteria", "sampling_error", "thresholds", "calibration", "splits"}
MACHINES = {"machine", "basis", "rls", "lssvm", "sparse", "fisher", "svm", "functional"}
OF_MACHINES = {"intervals", "diagnosis"}
SEARCHES = {"search", "selection", "validation"}
FRONTS = {"sklearn", "probing", "probe_result", "distributed"}
ORDER = (
    BASICS, {"held_out"}, KERNELS, ROWS, SMOOTHERS, CRITERIA, MACHINES, OF_MACHINES, SEARCHES, FRONTS,
    {"torchloo"}, {"cli"}, {"__main__"},
)  # fmt: skip
"""A room imports itself, its neighbours and what is to the left of it."""

STRANGERS = (
    (ROWS | SMOOTHERS, KERNELS, "smoothers take matrices and features, whatever their kernel"),
    (CRITERIA, KERNELS | ROWS | SMOOTHERS, "criteria take a HeldOut, wherever it comes from"),
    (MACHINES | OF_MACHINES | SEARCHES, {"streaming"}, "rows may come in blocks, from any source"),
    ({"svm"}, ROWS | SMOOTHERS, "the SVM shares nothing with least squares but the base class of machines"),
)


def test_data_flows_one_way():
    layer = {room: k for k, layer in enumerate(ORDER) for room in layer}
    for room, below in rooms().items():
        assert room in layer, f"{room}: give it its place in ORDER"
        assert {other for other in below if layer[other] > layer[room]} == set(), room


def test_rooms_that_must_not_know_each_other_do_not():
    for some, others, reason in STRANGERS:
        for room in some:
            assert rooms()[room] & others == set(), f"{room}: {reason}"


# Names of a class for annotations only, to the right of where they are used.
TYPES_FROM_THE_RIGHT = {
    ("torchloo.smoothers", "torchloo.spectral.path"),
}


def test_imports_for_types_stay_within_a_package():
    taken = {(name, module) for name, found in imports() for module in found.for_types}
    foreign = {(name, module) for name, module in taken if room_of(name) != room_of(module)}
    assert foreign <= TYPES_FROM_THE_RIGHT
