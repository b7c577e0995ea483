# SPDX-License-Identifier: Apache-2.0
"""The table of attackers in docs/security.md: each cell names tests, and they exist."""

from __future__ import annotations

import pathlib
import re

ROOT = pathlib.Path(__file__).resolve().parents[2]
NAME = re.compile(r"`(test_\w+\.py::test_\w+|fuzz_replay_\w+|[A-Z]\w+\.[A-Z]\w+)`")


PAGE = (ROOT / "docs" / "security.md").read_text()


def existing() -> set[str]:
    """The names of all tests, as the page has them."""
    found = set()
    for path in (ROOT / "tests").rglob("test_*.py"):
        names = re.findall(r"^def (test_\w+)", path.read_text(), re.M)
        found.update(f"{path.name}::{name}" for name in names)
    for path in (ROOT / "tests").rglob("*.cc"):
        names = re.findall(r"^TEST(?:_[FP])?\((\w+),\s*(\w+)\)", path.read_text(), re.M)
        found.update(".".join(each) for each in names)
    fuzzed = (ROOT / "tests" / "fuzz" / "CMakeLists.txt").read_text()
    targets = re.search(r"foreach\(target ([\w\s]+)\)", fuzzed)
    assert targets is not None
    found.update(f"fuzz_replay_{name}" for name in targets[1].split())
    return found


def test_every_test_that_the_page_names_exists():
    named = set(NAME.findall(PAGE))
    assert len(named) > 30
    assert named - existing() == set()


def test_every_cell_of_the_table_of_attackers_names_a_test():
    rows = [line.strip("|").split("|") for line in PAGE.splitlines() if line.startswith("| **")]
    assert len(rows) == 8
    for attacker, cannot, can in rows:
        assert NAME.search(cannot), attacker
        assert NAME.search(can) or "the same test" in can, attacker
