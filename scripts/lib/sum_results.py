# SPDX-License-Identifier: Apache-2.0
"""Adds up JUnit files: prints "P passed, F failed, S skipped", and exits with 1 if F > 0 or nothing passed.

A missing or broken file counts as one failure, because a suite that died must not look like one that passed.
Skipped cases are listed with their reasons, failed cases by name. The cases of the transports' conformance
suite are also counted by transport; those in files named guest-* ran in the RDMA guest. A case may be skipped
in one file, for lack of a device, and run in another. Then only the result of the run counts.
"""

from __future__ import annotations

import pathlib
import re
import sys
import xml.etree.ElementTree as tree
from collections import Counter

# ctest writes a test that it could not start like a skip, with one of these messages. It counts as failed.
NEVER_RAN = ("Unable to find executable", "Unable to find required file", "Fixture dependency failed")
# A case of the conformance suite, and the transport that it ran over.
CONFORMANCE = re.compile(r"^Every/(?:TransportTest|PeerTest)\.\w+/(\w+)$")


def reason(case: tree.Element, skipped: tree.Element) -> str:
    """pytest has the reason as the message, gtest has it after the place in the source. ctest has only the
    output, in which GTEST_SKIP() printed it."""
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
    # Only in ctest's files, the names of gtest's cases are followed by the parameter's value.
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
    """Cases of the files by outcome, and those of the conformance suite by transport and place."""

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
