"""Every problem that the field reported is either stood for by a marked test, or listed with a reason.

Three lists of reports: B (hosts and clusters), T (TensorFold native on two Sparks) and E (other engines on
Sparks). Where one report is the problem of another list too, ``SAME`` says so and one marker is enough.
"""

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


SAME = {
    # TensorFold native
    **{"T01": "B48", "T02": "B35", "T04": "B24", "T05": "B23", "T09": "B87", "T12": "B38", "T17": "B63"},
    **{"T27": "B82", "T28": "B60", "T29": "B28", "T32": "B84", "T33": "B69", "T36": "B66", "T42": "B44"},
    **{"T47": "B35"},
    # other engines
    **{"E02": "B22", "E06": "B48", "E07": "B35", "E11": "B44", "E17": "B78", "E19": "B80", "E21": "B59"},
    **{"E23": "B69", "E24": "B70", "E26": "B63", "E29": "B60", "E31": "B43", "E32": "B31", "E33": "B16"},
    **{"E34": "B10"},
}
PROBLEMS |= {f"T{number:02d}" for number in range(1, 48)} | {f"E{number:02d}" for number in range(1, 35)}

# What recorded outputs of real nodes say against the reports, as far as it concerns the network.
CORRECTIONS = {f"C{number:02d}" for number in (5, 6, 7, 8, 9, 10, 11, 12, 19)}


def marked() -> set[str]:
    """Ids that stand in a field marker of any test."""
    found: set[str] = set()
    for path in (ROOT / "tests").glob("**/test_*.py"):
        for call in re.findall(r"mark\.field\(([^)]*)\)", path.read_text()):
            found.update(re.findall(r"[BCTE]\d+", call))
    return found | {mine for mine, other in SAME.items() if other in found}


def listed() -> set[str]:
    """Ids that have a row in the table of what no test stands for yet."""
    return set(re.findall(r"^\| ([BTE]\d+) \|", PAGE.read_text(), re.M))


def test_no_problem_is_forgotten() -> None:
    assert sorted(PROBLEMS - marked() - listed()) == []


def test_every_correction_of_the_network_has_a_test_and_a_row() -> None:
    assert sorted(CORRECTIONS - marked()) == []
    assert set(re.findall(r"^\| (C\d+) \|", PAGE.read_text(), re.M)) == CORRECTIONS
    assert {item for item in marked() if item.startswith("C")} <= CORRECTIONS


def test_the_list_only_shrinks() -> None:
    """A problem that a test stands for leaves the list; an id that nobody reported is a slip of the pen."""
    assert sorted(listed() & marked()) == []
    assert sorted(listed() - PROBLEMS) == []
    assert sorted(set(SAME.values()) - PROBLEMS) == []


def test_markers_name_problems_that_were_reported() -> None:
    """A slip of the pen in a marker would stand for nothing. P2 problems may be marked, too."""
    assert (
        sorted(
            name
            for name in marked() - PROBLEMS - CORRECTIONS
            if not re.fullmatch(r"B(0\d|[1-9]\d|100)", name)
        )
        == []
    )
