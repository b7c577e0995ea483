#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Proves that include_rules.py finds what is against the rules, and only that.

In include_rules_fixture/ each line that breaks a rule says so with a comment `against the rules`; the messages must name
exactly those lines.
"""

import pathlib
import re
import subprocess
import sys
import unittest

HERE = pathlib.Path(__file__).resolve().parent
FIXTURE = HERE / "include_rules_fixture"


def run(root: pathlib.Path):
    return subprocess.run([sys.executable, str(HERE / "include_rules.py"), str(root)], capture_output=True, text=True,
                          check=False)


class IncludeRules(unittest.TestCase):
    def test_every_violation_is_named_by_file_and_line_and_nothing_else_is(self):
        expected = set()
        for file in FIXTURE.rglob("*"):
            if not file.is_file():
                continue
            for number, line in enumerate(file.read_text().splitlines(), start=1):
                if "against the rules" in line:
                    expected.add(f"{file.relative_to(FIXTURE).as_posix()}:{number}")
        result = run(FIXTURE)
        named = set(re.findall(r"^(\S+:\d+): ", result.stdout, re.MULTILINE))
        self.assertEqual(named, expected)
        self.assertGreater(len(expected), 10)
        self.assertEqual(result.returncode, 1)

    def test_a_tree_without_sources_is_an_error_and_not_a_pass(self):
        self.assertEqual(run(HERE / "no_such_folder").returncode, 2)


if __name__ == "__main__":
    unittest.main()
