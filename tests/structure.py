"""Counts of the package's structure: `make structure` prints them, test_structure holds them.

A room is a folder or a module at the top of the package; an edge is one room that imports another,
inside of functions and under TYPE_CHECKING too.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import grimp

import fedopt_flwr

PACKAGE = Path(fedopt_flwr.__file__).parent
APPS = [PACKAGE.parent / "server_app", PACKAGE.parent / "client_app"]
FILES = sorted(PACKAGE.rglob("*.py"))
LIMITS = {
    "names at the top": 22,
    "edges between rooms": 103,
    "import circles": 0,
    "source lines": 27_000,
    "longest function body": 35,
}


def rooms() -> set[str]:
    """Names at the top of the package, but for __init__ and __main__."""
    names = {path.relative_to(PACKAGE).parts[0].removesuffix(".py") for path in FILES}
    return names - {"__init__", "__main__"}


def edges() -> set[tuple[str, str]]:
    """Pairs of rooms of which the first imports the second."""
    graph = grimp.build_graph("fedopt_flwr", cache_dir=None)
    found = set()
    for importer in graph.modules:
        for imported in graph.find_modules_directly_imported_by(importer):
            pair = (room_of(importer), room_of(imported))
            if pair[0] != pair[1] and set(pair) <= rooms():
                found.add(pair)
    return found


def room_of(module: str) -> str:
    return [*module.split("."), ""][1]


def circles() -> list[list[str]]:
    """Groups of modules that import each other, in any number of steps."""
    graph = grimp.build_graph("fedopt_flwr", cache_dir=None)
    return groups_in_a_circle(
        {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    )


def groups_in_a_circle(imports: dict[str, set[str]]) -> list[list[str]]:
    reachable = {module: reach(imports, module) for module in imports}
    groups = {
        frozenset(other for other in reachable[module] if module in reachable[other])
        for module in imports
        if module in reachable[module]
    }
    return [sorted(group) for group in groups]


def reach(graph: dict[str, set[str]], start: str) -> set[str]:
    found: set[str] = set()
    todo = list(graph[start])
    while todo:
        node = todo.pop()
        if node not in found:
            found.add(node)
            todo += graph[node]
    return found


def functions() -> Iterator[tuple[int, str]]:
    """Lines of each function's body without its docstring, and where it is."""
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef):
                body = node.body[1:] if ast.get_docstring(node) else node.body
                length = node.body[-1].end_lineno - body[0].lineno + 1 if body else 0
                yield length, f"{path.relative_to(PACKAGE)}: {node.name}"


def source_lines() -> int:
    files = [*FILES, *(file for app in APPS for file in app.rglob("*.py"))]
    return sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files)


def counts() -> dict[str, int]:
    return {
        "names at the top": len(rooms()),
        "edges between rooms": len(edges()),
        "import circles": len(circles()),
        "source lines": source_lines(),
        "longest function body": max(functions())[0],
    }


if __name__ == "__main__":
    for name, number in counts().items():
        print(f"{name}: {number} (at most {LIMITS[name]})")
    print(*(f"circle: {', '.join(group)}" for group in circles()), sep="\n")
    print("longest functions:", *sorted(functions(), reverse=True)[:8], sep="\n  ")
