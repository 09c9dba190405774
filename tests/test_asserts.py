"""Asserts in the source tell mypy a type, and nothing else: Python omits them with -O (ruff's S101 forbids all)."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src"
FOR_TESTS = SOURCE / "chronik" / "testing"


def narrows_a_type(condition: ast.expr) -> bool:
    """Return whether the condition is `x is not None`, `isinstance(x, ...)`, or several of these."""
    if isinstance(condition, ast.BoolOp):
        return isinstance(condition.op, ast.And) and all(map(narrows_a_type, condition.values))
    if isinstance(condition, ast.Compare):
        right = condition.comparators[0]
        return isinstance(condition.ops[0], ast.IsNot) and isinstance(right, ast.Constant) and right.value is None
    if isinstance(condition, ast.Call):
        return isinstance(condition.func, ast.Name) and condition.func.id == "isinstance"
    return False


def test_asserts_outside_of_the_test_tools_only_narrow_types() -> None:
    others: list[str] = []
    asserts = 0
    for path in sorted(SOURCE.rglob("*.py")):
        if path.is_relative_to(FOR_TESTS):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Assert):
                asserts += 1
                if not narrows_a_type(node.test):
                    others.append(f"{path.relative_to(SOURCE)}:{node.lineno}")
    assert others == [], f"raise an exception instead: {others}"
    assert asserts > 0


@pytest.mark.parametrize(
    ("condition", "narrows"),
    [
        ("a is not None", True),
        ("isinstance(a, int) and b is not None", True),
        ("a", False),
        ("a is not None or b", False),
        ("a.allows(b)", False),
        ("len(a) < 4", False),
        ("a is not b", False),
    ],
)
def test_only_comparisons_with_none_and_isinstance_narrow_types(condition: str, narrows: bool) -> None:
    assert narrows_a_type(ast.parse(condition, mode="eval").body) is narrows
