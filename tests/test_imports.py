"""Data flows one way, modules keep their private names to themselves, and no two have one name."""

import ast
import graphlib
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(path): path for path in (ROOT / "torchloo").rglob("*.py")}


class _Imports(ast.NodeVisitor):
    """Modules of the package that a module imports, also within functions, but not for types alone."""

    def __init__(self) -> None:
        self.modules: set[str] = set()
        self.names: list[str] = []

    def visit_If(self, node: ast.If) -> None:
        if "TYPE_CHECKING" not in ast.dump(node.test):
            self.generic_visit(node)

    def visit_Import(self, node: ast.Import) -> None:
        self.modules |= {alias.name for alias in node.names} & MODULES.keys()

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        if node.module not in MODULES:
            return
        for alias in node.names:
            whole = f"{node.module}.{alias.name}"
            self.modules.add(whole if whole in MODULES else node.module)
            self.names.append(whole)


def imports() -> Iterator[tuple[str, _Imports]]:
    for name, path in MODULES.items():
        found = _Imports()
        found.visit(ast.parse(path.read_text(encoding="utf-8")))
        yield name, found


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


def test_kernels_smoothers_and_criteria_know_no_machine_and_machines_no_search():
    below = {name: found.modules for name, found in imports()}

    def reached(start: str) -> set[str]:
        seen, todo = set(), [start]
        while todo:
            name = todo.pop()
            if name not in seen:
                seen.add(name)
                todo += below[name]
        return seen

    machines = ("torchloo.machine", "torchloo.rls", "torchloo.lssvm", "torchloo.sparse", "torchloo.fisher")
    searches = ("torchloo.search", "torchloo.selection", "torchloo.validation")
    commands = ("torchloo.cli",)
    borders = (
        (("torchloo.kernels", "torchloo.smoothers", "torchloo.criteria"), machines + searches + commands),
        ((*machines, "torchloo.svm"), searches + commands),
        (searches, commands),
    )
    for rooms, unknown in borders:
        for name in MODULES:
            if name.startswith(rooms):
                assert not {one for one in reached(name) if one.startswith(unknown)}, name
