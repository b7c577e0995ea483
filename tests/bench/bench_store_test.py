#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""`ropeteam-bench save`, `read`, `recover`, `failover` and `idle` run with real daemons and print each row that the
docs name. The test does not judge figures.

    bench_store_test.py PATH_OF_ROPETEAM_BENCH
"""

import json
import math
import subprocess
import sys
import unittest

BENCH = None
# With a sanitizer a daemon takes seconds to be ready, and a recovery starts five.
TIMEOUT_S = 120
# For each row: its unit, and the name of its baseline.
ROWS = {
    "save": {
        "save/local": ("GB/s", "fused_copy"),
        "save/local_one_thread": ("GB/s", "fused_copy"),
        "save/local_in_parts": ("GB/s", "fused_copy"),
        "save/replicated_vs_fi_write": ("GB/s", "fi_write"),
        "save/steady_page_faults": ("per save", None),
        "save/steady_page_faults_of_daemons": ("per save", None),
        "save/steady_allocations": ("per save", None),
        "save/steady_registrations": ("per save", None),
    },
    "read": {
        "read/fetch_vs_fi_read": ("GB/s", "fi_read"),
        "read/remote_vs_fi_read": ("GB/s", "fi_read"),
    },
    "recover": {
        "recover/pull_vs_fi_read": ("GB/s", "fi_read"),
        "recover/pull_ms": ("ms", None),
        "recover/pull_two_holders_vs_fi_read": ("GB/s", "fi_read"),
    },
    "failover": {
        "failover/first_read_ms": ("ms", None),
        "failover/view_ms": ("ms", None),
        "failover/latest_ms": ("ms", None),
        "failover/full_redundancy_ms": ("ms", None),
    },
    "idle": {
        "idle/cpu_percent": ("% of a core", None),
        "idle/memory_beyond_arena_mib": ("MiB", None),
    },
}
SMALL = {
    "save": ["--size", "2", "--objects", "3", "--runs", "1"],
    "read": ["--size", "2", "--objects", "3", "--runs", "1"],
    "recover": ["--size", "2", "--objects", "3", "--runs", "1"],
    "failover": ["--size", "2", "--objects", "3", "--runs", "1"],
    "idle": ["--size", "1", "--seconds", "1"],
}


class BenchStore(unittest.TestCase):
    def check(self, command):
        result = subprocess.run([BENCH, command, "--json", *SMALL[command]], capture_output=True, text=True,
                                timeout=TIMEOUT_S, check=False)
        if "without libfabric" in result.stderr:
            self.skipTest(result.stderr)
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertIn("cpu ", result.stderr, "the header")
        rows = [json.loads(line) for line in result.stdout.splitlines()]
        self.assertEqual({row["name"]: (row["unit"], row["baseline_name"]) for row in rows}, ROWS[command])
        for row in rows:
            self.assertTrue(0 <= row["min"] <= row["median"] <= row["max"] < math.inf, row)
            if row["unit"] in ("GB/s", "ms", "MiB"):
                self.assertGreater(row["median"], 0, row)
            if row["baseline_name"] is not None:
                self.assertTrue(0 < row["baseline_median"] < math.inf and 0 < row["ratio"] < math.inf, row)
        return {row["name"]: row for row in rows}

    def test_save(self):
        rows = self.check("save")
        self.assertEqual(rows["save/steady_registrations"]["max"], 0, "counted, not measured")

    def test_read(self):
        self.check("read")

    def test_recover(self):
        self.check("recover")

    def test_failover(self):
        rows = self.check("failover")
        self.assertLessEqual(rows["failover/view_ms"]["min"], rows["failover/full_redundancy_ms"]["max"])

    def test_idle(self):
        self.check("idle")


if __name__ == "__main__":
    BENCH = sys.argv.pop(1)
    unittest.main()
