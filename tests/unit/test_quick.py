"""scripts/test --quick: its list names tests that exist, and leaves no operation out."""

import ast
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
LINES = [line for line in (TESTS / "quick.txt").read_text().splitlines() if not line.startswith("#")]


def functions_in(path):
    """{name: names of its arguments} of the tests in a file."""
    found = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)]
    return {node.name: [a.arg for a in node.args.args] for node in found if node.name.startswith("test_")}


@pytest.mark.parametrize("line", LINES)
def test_what_it_names_exists(line):
    path, _, test = line.partition("::")
    assert not test or test.partition("[")[0] in functions_in(TESTS.parent / path)


def test_no_operation_is_missing():
    missing = []
    for path in sorted((TESTS / "conformance").glob("test_*.py")):
        named = {
            line.partition("::")[2].partition("[")[0]
            for line in LINES
            if line.startswith(f"tests/conformance/{path.name}")
        }
        operations = {test for test, arguments in functions_in(path).items() if "conform" in arguments}
        missing += [f"{path.name}::{test}" for test in operations - named if "" not in named]
    assert not missing, f"they run an operation, and tests/quick.txt has no line for them: {missing}"
