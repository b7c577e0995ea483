# SPDX-License-Identifier: Apache-2.0
"""Adds up JUnit files: prints "P passed, F failed, S skipped", and exits with 1 if F > 0 or nothing passed.

A file that is missing or broken counts as one failure, since a suite that died must not look like one that
passed. What was skipped is listed with its reason, and what failed by name.
"""

from __future__ import annotations

import sys
import xml.etree.ElementTree as tree

# What ctest says of a test that it could not start: not a skip, though it is written like one.
NEVER_RAN = ("Unable to find executable", "Unable to find required file", "Fixture dependency failed")


def reason(case: tree.Element, skipped: tree.Element) -> str:
    """pytest gives it as the message; ctest has only the output, where GTEST_SKIP() printed it."""
    message = skipped.get("message", "")
    if message and not message.startswith("SKIP_"):
        return message
    output = case.findtext("system-out") or ""
    lines = [line.strip() for line in output.splitlines()]
    for index, line in enumerate(lines):
        if line.endswith(": Skipped") and index + 1 < len(lines):
            return lines[index + 1]
    return message or "no reason given"


def name(case: tree.Element) -> str:
    suite = case.get("classname", "")
    return case.get("name", "?") if suite in ("", case.get("name")) else f"{suite}.{case.get('name', '?')}"


def add_up(paths: list[str]) -> tuple[int, int, int]:
    passed = failed = skipped = 0
    for path in paths:
        try:
            cases = list(tree.parse(path).getroot().iter("testcase"))
        except (OSError, tree.ParseError) as error:
            print(f"  failed: {path}: {error}")
            failed += 1
            continue
        for case in cases:
            skip = case.find("skipped")
            bad = case.find("failure") is not None or case.find("error") is not None
            if skip is not None and skip.get("message", "") in NEVER_RAN:
                bad = True
            if bad or case.get("status") == "fail":
                failed += 1
                print(f"  failed: {name(case)}")
            elif skip is not None or case.get("status") in ("notrun", "disabled"):
                skipped += 1
                print(f"  skipped: {name(case)}: {'disabled' if skip is None else reason(case, skip)}")
            else:
                passed += 1
    return passed, failed, skipped


def main() -> int:
    passed, failed, skipped = add_up(sys.argv[1:])
    print(f"{passed} passed, {failed} failed, {skipped} skipped")
    return 0 if failed == 0 and passed > 0 else 1


if __name__ == "__main__":
    sys.exit(main())
