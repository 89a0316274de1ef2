"""Imports go one way, as ARCHITECTURE.md says, and what makes kernels knows nothing of torch."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from collections.abc import Collection, Mapping

import networkx as nx
import pytest

from tests.support.layout import FOLDERS, ROOT, package_sources

# The areas of the package; a module belongs to the longest of these names that it starts with.
DOOR, MAIN = "fusepass", "fusepass.__main__"
ERRORS, CONFIG = "fusepass.errors", "fusepass.config"
PROGRESS, BACKGROUND = "fusepass.progress", "fusepass.background"
PATTERNS = "fusepass.patterns"
CODEGEN = "fusepass.codegen"  # what has no area of its own: build, cache
SOURCE, DEVICE, MACHINE = "fusepass.codegen.source", "fusepass.codegen.device", "fusepass.codegen.machine"
IR = "fusepass.codegen.ir"
LOWERING = "fusepass.codegen.lowering"
PASSES = "fusepass.codegen.passes"
SCHEDULE, SCHEDULE_CPU = "fusepass.codegen.schedule", "fusepass.codegen.schedule_cpu"
SCHEDULE_CONVOLUTION = "fusepass.codegen.schedule_convolution"
SCHEDULE_PRODUCT = "fusepass.codegen.schedule_product"
SCHEDULE_GENERAL = "fusepass.codegen.schedule_general"
RENDER = "fusepass.codegen.render"
SEARCH = "fusepass.codegen.search"
TEMPLATES = "fusepass.templates"
COLLECTOR, MEASURE, STRUCTURE = "fusepass.garbage", "fusepass.measure", "fusepass.structure"
SUPPORTED = "fusepass.supported"
RUNTIME, ARTIFACT = "fusepass.runtime", "fusepass.artifact"
GUARDS, CAPTURE = "fusepass.guards", "fusepass.capture"
REPORT, NUMERICS, AUTOTUNE, COMPILE = "fusepass.report", "fusepass.numerics", "fusepass.autotune", "fusepass.compile"
TRAINING, PROFILING = "fusepass.training", "fusepass.profiling"
DISPATCH, API, CLI = "fusepass.dispatch", "fusepass.api", "fusepass.cli"

FROM_EVERYWHERE = frozenset({ERRORS, CONFIG, PROGRESS, BACKGROUND})
SCHEDULES = frozenset({SCHEDULE, SCHEDULE_CONVOLUTION, SCHEDULE_PRODUCT, SCHEDULE_CPU, SCHEDULE_GENERAL})
KERNELS = SCHEDULES | {CODEGEN, IR, DEVICE, MACHINE, SOURCE, LOWERING, PASSES, RENDER, TEMPLATES}
GRAPHS = KERNELS | {PATTERNS, SEARCH, COLLECTOR, MEASURE, STRUCTURE}
ALLOWED: Mapping[str, frozenset[str]] = {
    ERRORS: frozenset(),
    CONFIG: frozenset(),
    PROGRESS: frozenset(),
    BACKGROUND: frozenset(),
    COLLECTOR: frozenset(),
    MEASURE: frozenset(),
    STRUCTURE: frozenset(),
    SUPPORTED: frozenset(),
    TEMPLATES: frozenset(),
    IR: frozenset(),
    SOURCE: frozenset(),
    MACHINE: frozenset(),
    DEVICE: frozenset({MACHINE, SOURCE}),
    LOWERING: frozenset({IR}),
    PASSES: frozenset({IR, DEVICE}),
    SCHEDULE: frozenset({IR, DEVICE, SOURCE}),
    SCHEDULE_CPU: frozenset({IR, DEVICE}),
    SCHEDULE_CONVOLUTION: frozenset({IR, DEVICE}),
    SCHEDULE_PRODUCT: frozenset({IR, DEVICE, MACHINE}),
    SCHEDULE_GENERAL: frozenset({IR, SCHEDULE}),
    RENDER: SCHEDULES | {IR, DEVICE, SOURCE, TEMPLATES},
    CODEGEN: KERNELS - {LOWERING},
    PATTERNS: frozenset({LOWERING, IR}),
    SEARCH: KERNELS | {PATTERNS, MEASURE},
    RUNTIME: GRAPHS,
    ARTIFACT: GRAPHS | {RUNTIME},
    GUARDS: GRAPHS | {RUNTIME},
    CAPTURE: GRAPHS | {GUARDS, RUNTIME},
    REPORT: frozenset({RUNTIME, SEARCH, TEMPLATES}),
    NUMERICS: GRAPHS,
    AUTOTUNE: GRAPHS | {RUNTIME, REPORT, NUMERICS},
    COMPILE: GRAPHS | {RUNTIME, ARTIFACT, REPORT, AUTOTUNE},
    TRAINING: GRAPHS | {CAPTURE, RUNTIME, AUTOTUNE, COMPILE, SUPPORTED},
    PROFILING: GRAPHS | {RUNTIME, REPORT, NUMERICS, AUTOTUNE, COMPILE},
    DISPATCH: GRAPHS | {CAPTURE, GUARDS, RUNTIME, REPORT, AUTOTUNE, COMPILE, TRAINING, PROFILING},
    API: GRAPHS
    | {CAPTURE, GUARDS, RUNTIME, ARTIFACT, REPORT, NUMERICS, AUTOTUNE, COMPILE, PROFILING, DISPATCH, SUPPORTED},
    DOOR: frozenset({API, ARTIFACT, REPORT, PROFILING, COLLECTOR, SUPPORTED}),
    CLI: GRAPHS | {RUNTIME, ARTIFACT, REPORT, NUMERICS, DOOR},
    MAIN: frozenset({CLI}),
}
TORCH_FREE = (IR, PASSES, SCHEDULE, SCHEDULE_CONVOLUTION, SCHEDULE_PRODUCT, SCHEDULE_CPU, SCHEDULE_GENERAL, RENDER)


@functools.cache
def imported_names(text: str) -> tuple[str, ...]:
    """Every dotted name a module imports, inside functions too; `from a import b` is `a.b`."""
    names: list[str] = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names += (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            names += (f"{'.' * node.level}{node.module or ''}.{alias.name}" for alias in node.names)
    return tuple(names)


def longest_prefix(name: str, known: Collection[str]) -> str | None:
    """The longest of `known` that `name` is or lies in."""
    parts = name.split(".")
    prefixes = (".".join(parts[:end]) for end in range(len(parts), 0, -1))
    return next((prefix for prefix in prefixes if prefix in known), None)


def import_graph(sources: Mapping[str, str]) -> nx.DiGraph[str]:
    """Modules of `sources`, with an edge from each to those it imports."""
    graph: nx.DiGraph[str] = nx.DiGraph()
    graph.add_nodes_from(sources)
    for module, text in sources.items():
        found = (longest_prefix(name, sources) for name in imported_names(text))
        graph.add_edges_from((module, target) for target in found if target is not None)
    return graph


def forbidden_edges(sources: Mapping[str, str]) -> list[str]:
    """Imports that go against `ALLOWED`, as `importer -> imported`."""
    forbidden = []
    for module, target in import_graph(sources).edges:
        start, end = longest_prefix(module, ALLOWED), longest_prefix(target, ALLOWED)
        assert start is not None
        assert end is not None
        if start != end and end not in ALLOWED[start] | FROM_EVERYWHERE:
            forbidden.append(f"{module} -> {target}")
    return forbidden


def torch_importers(sources: Mapping[str, str]) -> list[str]:
    """Modules that import torch although an area of `TORCH_FREE` needs them.

    Left out is `fusepass/__init__`, which Python runs before any submodule and which is the user's door.
    """
    graph = import_graph(sources)
    for module in sources:  # importing a.b runs a's __init__ first
        parent = module.rpartition(".")[0]
        if parent and parent != DOOR:
            graph.add_edge(module, parent)
    roots = [module for module in sources if longest_prefix(module, ALLOWED) in TORCH_FREE]
    reached = set(roots).union(*(nx.descendants(graph, root) for root in roots))
    return sorted(
        module
        for module in reached
        if any(name.partition(".")[0] == "torch" for name in imported_names(sources[module]))
    )


@pytest.mark.invariant(1)
def test_the_package_imports_one_way() -> None:
    assert forbidden_edges(package_sources()) == []


def test_no_module_imports_itself_by_way_of_others() -> None:
    """Inside functions and for types alone are imports, too."""
    parts = nx.strongly_connected_components(import_graph(package_sources()))
    assert [sorted(part) for part in parts if len(part) > 1] == []


def test_kernels_are_made_without_torch() -> None:
    assert torch_importers(package_sources()) == []


@pytest.mark.invariant(1)
def test_torch_free_modules_load_where_torch_cannot() -> None:
    """The same as above by running it: an empty `fusepass` stands for the door, importing torch raises."""
    modules = [name for name in package_sources() if longest_prefix(name, ALLOWED) in TORCH_FREE]
    program = f"""
import importlib, sys, types
sys.modules["torch"] = None
door = sys.modules["fusepass"] = types.ModuleType("fusepass")
door.__path__ = [{str(FOLDERS[DOOR])!r}]
for name in {modules!r}:
    importlib.import_module(name)
    print(name)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == modules


def test_nothing_imports_the_source_folders_by_their_bare_names() -> None:
    """`import codegen` works only from the repository's root, and makes a second copy of each class."""
    bare = {folder.name for package, folder in FOLDERS.items() if package != DOOR}
    top_levels = (*FOLDERS.values(), *(ROOT / name for name in ("tests", "examples", "benchmarks")))
    offenders = [
        f"{path.relative_to(ROOT)} imports {name}"
        for folder in top_levels
        for path in sorted(folder.rglob("*.py"))
        for name in imported_names(path.read_text())
        if name.partition(".")[0] in bare
    ]
    assert offenders == []


EMPTY = dict.fromkeys(ALLOWED, "")  # a package of one empty module for each area


@pytest.mark.parametrize(
    ("module", "text", "target"),
    [
        (f"{IR}.probe", "from fusepass.codegen.lowering import lower", LOWERING),
        (f"{PASSES}.probe", "from fusepass.codegen import render", RENDER),
        (f"{LOWERING}.probe", "def late():\n    import fusepass.patterns", PATTERNS),
        (f"{PATTERNS}.probe", "import fusepass", DOOR),
        (ERRORS, "from fusepass.codegen.ir import dtype", IR),
    ],
)
def test_an_import_against_the_direction_is_found(module: str, text: str, target: str) -> None:
    assert forbidden_edges(EMPTY | {module: text}) == [f"{module} -> {target}"]


def test_an_import_of_the_foundation_and_of_a_later_stage_is_allowed() -> None:
    probe = "import fusepass.errors\nfrom fusepass.codegen.lowering import a\nimport fusepass.codegen.ir.dtype"
    assert forbidden_edges(EMPTY | {f"{PATTERNS}.probe": probe}) == []


@pytest.mark.parametrize(
    ("module", "text"),
    [
        (f"{IR}.probe", "import torch.fx"),
        (f"{RENDER}.probe", "def late():\n    from torch import nn"),
        (ERRORS, "import torch"),
        (CODEGEN, "import torch"),
    ],
)
def test_torch_in_what_makes_kernels_is_found(module: str, text: str) -> None:
    uses_errors = {SCHEDULE: "from fusepass.errors import ScheduleError"}
    assert torch_importers(EMPTY | uses_errors | {module: text}) == [module]


def test_torch_elsewhere_is_allowed() -> None:
    assert torch_importers(EMPTY | {DOOR: "import torch", f"{LOWERING}.probe": "import torch"}) == []
