# SPDX-License-Identifier: Apache-2.0
"""Filters ctest's output: a line every few seconds for passed tests, and everything about failed ones.

With hundreds of tests the whole output would hide the failures. It is in the log beside the results.
"""

from __future__ import annotations

import re
import sys
import time

EVERY_S = 10.0
PASSED = re.compile(r"^\s*(\d+)/(\d+) Test\s+#\d+: .*\bPassed\b")
START = re.compile(r"^\s+Start\s+\d+: ")


def main() -> None:
    begun = shown = time.monotonic()
    for line in sys.stdin:
        passed = PASSED.match(line)
        now = time.monotonic()
        if passed and now - shown < EVERY_S and passed[1] != passed[2]:
            continue
        if START.match(line) or not line.strip():
            continue
        if passed:
            shown = now
            print(f"  {passed[1]}/{passed[2]} after {now - begun:.0f} s", flush=True)
        else:
            print(line, end="", flush=True)


if __name__ == "__main__":
    main()
