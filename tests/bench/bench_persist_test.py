#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""`ropeteam-bench persist` runs with both sinks and prints each row that the docs name. The test does not judge
figures.

    bench_persist_test.py PATH_OF_ROPETEAM_BENCH SOURCE_TREE
"""

import json
import math
import os
import subprocess
import sys
import tempfile
import unittest

BENCH = SOURCE = None
# With a sanitizer a daemon takes seconds to be ready, and a run starts five.
TIMEOUT_S = 120
SMALL = ["--size", "2", "--objects", "3", "--runs", "1", "--json"]


def rows_beside(sink, yardstick):
    return {
        f"persist/{sink}": ("GB/s", yardstick),
        f"restore/{sink}": ("GB/s", yardstick),
        "persist/memory_beyond_arena_mib": ("MiB", None),
        "persist/save_stall_ratio": ("ms", "persisting_off"),
        "persist/saves_while_writing": ("count", None),
    }


class BenchPersist(unittest.TestCase):
    def run_bench(self, *options):
        return subprocess.run([BENCH, "persist", *SMALL, *options], capture_output=True, text=True,
                              timeout=TIMEOUT_S, check=False)

    def check(self, result, expected):
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertIn("cpu ", result.stderr, "the header")
        rows = [json.loads(line) for line in result.stdout.splitlines()]
        self.assertEqual({row["name"]: (row["unit"], row["baseline_name"]) for row in rows}, expected)
        for row in rows:
            self.assertTrue(0 <= row["min"] <= row["median"] <= row["max"] < math.inf, row)
            if row["unit"] != "count":
                self.assertGreater(row["median"], 0, row)
            if row["baseline_name"] is not None:
                self.assertTrue(0 < row["baseline_median"] < math.inf and 0 < row["ratio"] < math.inf, row)

    def test_posix(self):
        with tempfile.TemporaryDirectory() as directory:
            result = self.run_bench("--sink", "posix", "--directory", directory)
            self.assertEqual(os.listdir(directory), [], "what it wrote is gone")
        self.check(result, rows_beside("posix_vs_dd", "dd"))

    def test_s3(self):
        result = self.run_bench("--sink", "s3", "--source", SOURCE)
        if "skipped:" in result.stderr:
            self.skipTest(result.stderr)
        self.check(result, rows_beside("s3_vs_client", "awscrt"))

    def test_without_the_client_it_says_why_and_skips(self):
        with tempfile.TemporaryDirectory() as nothing:
            result = self.run_bench("--sink", "s3", "--source", nothing)
        self.assertEqual((result.returncode, result.stdout), (0, ""), result.stderr)
        self.assertIn("skipped: persist --sink s3: there is no " + nothing, result.stderr)

    def test_a_sink_that_is_none(self):
        self.assertEqual(self.run_bench("--sink", "tape").returncode, 2)


if __name__ == "__main__":
    SOURCE = sys.argv.pop(2)
    BENCH = sys.argv.pop(1)
    unittest.main()
