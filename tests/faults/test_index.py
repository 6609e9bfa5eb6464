"""docs/faults.md: every reported fault has tests that exist and name it, and no test names one that nobody reported."""

import ast
import re
from functools import lru_cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests"
ROW = re.compile(r"^\| (F\d+) \| ([^|]+) \|.*\| ([^|]+) \|$", re.MULTILINE)
FAULT = re.compile(r"\bF\d{1,2}\b")

OPEN: dict[str, str] = {}
"""Rows without a test, and why."""


def rows() -> dict[str, tuple[str, list[str]]]:
    """Where each fault was, and its tests as `file::name` below tests/."""
    page = (ROOT / "docs" / "faults.md").read_text()
    return {fault: (where, re.findall(r"`([^`]+)`", tests)) for fault, where, tests in ROW.findall(page)}


@lru_cache
def docstrings(file: Path) -> tuple[str, dict[str, str]]:
    """A module's docstring, and those of its tests."""
    tree = ast.parse(file.read_text())
    tests = {
        node.name: ast.get_docstring(node) or ""
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_")
    }
    return ast.get_docstring(tree) or "", tests


def test_every_fault_has_tests_or_a_reason() -> None:
    found = rows()
    assert len(found) > 30
    assert {fault for fault, (_, tests) in found.items() if not tests} == OPEN.keys()


def test_the_named_tests_exist_and_name_the_fault() -> None:
    wrong = []
    for fault, (_, tests) in rows().items():
        for test in tests:
            file, _, name = test.partition("::")
            module, found = docstrings(TESTS / file)
            if name not in found or fault not in FAULT.findall(f"{module} {found[name]}"):
                wrong.append(f"{fault}: {test}")
    assert not wrong


def test_no_test_names_a_fault_that_nobody_reported() -> None:
    known = rows().keys()
    unknown = []
    for file in sorted(TESTS.rglob("test_*.py")):
        module, tests = docstrings(file)
        named = set(FAULT.findall(" ".join((module, *tests.values()))))
        unknown += [f"{file.relative_to(TESTS)}: {fault}" for fault in sorted(named - known)]
    assert not unknown
