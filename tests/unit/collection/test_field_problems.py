"""Every problem that the field reported is either stood for by a marked test, or listed with a reason."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "field-problems.md"

# The P0 and P1 problems of the field list that the collection has to behave rightly for.
PROBLEMS = {
    f"B{number:02d}"
    for number in (
        *(1, 2, 3, 4, 5, 6, 7, 8, 10, 14, 15, 16, 18),
        *(19, 20, 22, 23, 24, 25),
        *(27, 28, 30, 31, 33),
        *(35, 36, 37, 38, 41, 42, 43, 44, 46, 47),
        *(48, 49, 50, 51, 52, 53, 54),
        *(56, 57, 59, 60, 61, 62, 63, 64, 65, 66, 67),
        *(68, 69, 70, 72, 73, 75),
        *(76, 77, 78, 80, 81, 82, 84, 86, 87),
        *(89, 90, 91, 92, 93, 94, 95, 97, 100),
    )
}


def marked() -> set[str]:
    """Ids that stand in a field marker of any test."""
    found: set[str] = set()
    for path in (ROOT / "tests").glob("**/test_*.py"):
        for call in re.findall(r"mark\.field\(([^)]*)\)", path.read_text()):
            found.update(re.findall(r"B\d+", call))
    return found


def listed() -> set[str]:
    """Ids that have a row in the table of what no test stands for yet."""
    return set(re.findall(r"^\| (B\d+) \|", PAGE.read_text(), re.M))


def test_no_problem_is_forgotten() -> None:
    assert sorted(PROBLEMS - marked() - listed()) == []


def test_the_list_only_shrinks() -> None:
    """A problem that a test stands for leaves the list; an id that nobody reported is a slip of the pen."""
    assert sorted(listed() & marked()) == []
    assert sorted(listed() - PROBLEMS) == []
