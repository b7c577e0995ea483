# SPDX-License-Identifier: Apache-2.0
"""Adds up JUnit files: prints "P passed, F failed, S skipped", and exits with 1 if F > 0 or nothing passed.

A file that is missing or broken counts as one failure, since a suite that died must not look like one that
passed. What was skipped is listed with its reason, and what failed by name. The cases of the transports'
conformance suite are counted once more by transport; those in files named guest-* ran in the RDMA guest. A
case that was skipped in one file and ran in another, for want of a device here and with one there, is counted
as what it was where it ran.
"""

from __future__ import annotations

import pathlib
import re
import sys
import xml.etree.ElementTree as tree
from collections import Counter

# What ctest says of a test that it could not start: not a skip, though it is written like one.
NEVER_RAN = ("Unable to find executable", "Unable to find required file", "Fixture dependency failed")
# A case of the conformance suite, and the transport that it ran over.
CONFORMANCE = re.compile(r"^Every/(?:TransportTest|PeerTest)\.\w+/(\w+)$")


def reason(case: tree.Element, skipped: tree.Element) -> str:
    """pytest gives it as the message, gtest behind the place in the source; ctest has only the output, where
    GTEST_SKIP() printed it."""
    message = skipped.get("message", "")
    if message and not message.startswith("SKIP_"):
        return message.splitlines()[-1]
    output = case.findtext("system-out") or ""
    lines = [line.strip() for line in output.splitlines()]
    for index, line in enumerate(lines):
        if line.endswith(": Skipped") and index + 1 < len(lines):
            return lines[index + 1]
    return message or "no reason given"


def name(case: tree.Element) -> str:
    # gtest writes a parameter's value behind the names of its cases, and only ctest's files have that.
    own, suite = (case.get(key, "").partition("  # GetParam()")[0] for key in ("name", "classname"))
    return own if suite in ("", own) else f"{suite}.{own}"


def outcome(case: tree.Element) -> str:
    skip = case.find("skipped")
    bad = case.find("failure") is not None or case.find("error") is not None
    if skip is not None and skip.get("message", "") in NEVER_RAN:
        bad = True
    if bad or case.get("status") == "fail":
        return "failed"
    if skip is not None or case.get("status") in ("notrun", "disabled"):
        return "skipped"
    return "passed"


class Sum:
    """What the files hold: cases by outcome, and those of the conformance suite by transport and place."""

    def __init__(self) -> None:
        self.outcomes: Counter[str] = Counter()
        self.transports: dict[tuple[str, str], Counter[str]] = {}
        self.ran: set[str] = set()
        self.skipped: list[tuple[str, str]] = []  # a case and why

    def add(self, path: str) -> None:
        try:
            cases = list(tree.parse(path).getroot().iter("testcase"))
        except (OSError, tree.ParseError) as error:
            print(f"  failed: {path}: {error}")
            self.outcomes["failed"] += 1
            return
        place = "guest" if pathlib.Path(path).name.startswith("guest-") else "host"
        for case in cases:
            result = outcome(case)
            if match := CONFORMANCE.match(name(case)):
                self.transports.setdefault((match[1], place), Counter())[result] += 1
            if result == "skipped":
                skip = case.find("skipped")
                self.skipped.append((name(case), "disabled" if skip is None else reason(case, skip)))
                continue
            self.ran.add(name(case))
            self.outcomes[result] += 1
            if result == "failed":
                print(f"  failed: {name(case)}")

    def print(self) -> None:
        once = {each: why for each, why in self.skipped if each not in self.ran}
        self.outcomes["skipped"] = len(once)
        for each, why in once.items():
            print(f"  skipped: {each}: {why}")
        if self.transports:
            print("conformance suite by transport:")
        for (transport, place), counts in sorted(self.transports.items()):
            counted = ", ".join(f"{counts[each]} {each}" for each in ("passed", "failed", "skipped"))
            print(f"  {transport:<24} {place:<5}  {counted}")
        print(", ".join(f"{self.outcomes[each]} {each}" for each in ("passed", "failed", "skipped")))


def main() -> int:
    total = Sum()
    for path in sys.argv[1:]:
        total.add(path)
    total.print()
    return 0 if total.outcomes["failed"] == 0 and total.outcomes["passed"] > 0 else 1


if __name__ == "__main__":
    sys.exit(main())
