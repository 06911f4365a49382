"""What the pages claim has the test that they name."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = ("docs/security.md", "docs/cases.md")
NAMED = re.compile(r"`(tests/[\w/]+\.py)(?:::(test_\w+))?`")


def names_in(path: Path) -> set[str]:
    return {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("page", PAGES)
def test_every_test_that_a_page_names_is_there(page):
    named = NAMED.findall((ROOT / page).read_text())

    assert len(named) > 30
    assert not [f"{file}::{test}" for file, test in named if not (ROOT / file).exists()]
    assert not [f"{file}::{test}" for file, test in named if test and test not in names_in(ROOT / file)]


@pytest.mark.parametrize("page", PAGES)
def test_a_page_names_nothing_outside_of_the_repository(page):
    """Links and paths lead to files that whoever reads the page has."""
    text = (ROOT / page).read_text()

    assert not re.findall(r"(?<![\w.])/(?:home|root|work|mnt|opt|tmp)/", text)
    for link in re.findall(r"\]\((?!https?:)([^)#]+)\)", text):
        assert ((ROOT / page).parent / link).exists(), link


def test_every_case_is_listed_once_and_in_order():
    cases = re.findall(r"^\| (A\d\d) ", (ROOT / "docs/cases.md").read_text(), re.MULTILINE)

    assert cases == sorted(set(cases))
    assert set(cases) >= {f"A{number:02}" for number in range(1, 40)} - {"A33", "A34", "A35", "A36"}
