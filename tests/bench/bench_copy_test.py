#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""`ropeteam-bench copy` runs and prints what it measured. The test does not judge the figures.

    bench_copy_test.py PATH_OF_ROPETEAM_BENCH
"""

import json
import math
import subprocess
import sys
import unittest

BENCH = None
FIELDS = ["name", "unit", "median", "min", "max", "runs", "baseline_name", "baseline_median", "ratio"]
RUNS = 3
SMALL = ["--size", "3MiB", "--chunk", "1MiB", "--runs", str(RUNS)]


def bench(*arguments):
    return subprocess.run([BENCH, *arguments], capture_output=True, text=True, timeout=60, check=False)


USAGE = 2  # as of ropeteam and ropeteamd


class BenchCopy(unittest.TestCase):
    def test_json_has_the_promised_rows_each_beside_its_baseline(self):
        result = bench("copy", "--json", *SMALL)
        self.assertEqual(result.returncode, 0, result.stderr)
        rows = {}
        for line in result.stdout.splitlines():
            row = json.loads(line)
            self.assertEqual(list(row), FIELDS)
            self.assertNotIn(row["name"], rows)
            rows[row["name"]] = row
        for name, baselines in [("copy/fused_vs_memcpy", ["memcpy"]),
                                ("copy/fused_vs_memcpy_then_crc", ["memcpy_then_crc32c", "memcpy_then_crc32c_isal"]),
                                ("copy/fused_vs_nontemporal", ["nontemporal"])]:
            row = rows[name]
            self.assertIn(row["baseline_name"], baselines)
            baseline = rows["copy/" + row["baseline_name"]]
            self.assertEqual(row["baseline_median"], baseline["median"])
            self.assertEqual(row["median"], rows["copy/fused"]["median"])
            # The median of the paired ratios is between the smallest and the largest possible ratio.
            self.assertGreaterEqual(row["ratio"], row["min"] / baseline["max"])
            self.assertLessEqual(row["ratio"], row["max"] / baseline["min"])
        for row in rows.values():
            self.assertEqual(row["unit"], "GB/s")
            self.assertEqual(row["runs"], RUNS)
            self.assertTrue(0 < row["min"] <= row["median"] <= row["max"] < math.inf)
            self.assertEqual(row["baseline_name"] is None, row["ratio"] is None)
            self.assertEqual(row["baseline_name"] is None, row["baseline_median"] is None)

    def test_the_header_names_machine_and_settings_and_stays_out_of_the_json(self):
        result = bench("copy", "--json", *SMALL)
        for part in ["cpu ", "cores ", "kernel ", "date ", "3145728 bytes", "chunk 1048576", f"runs {RUNS}"]:
            self.assertIn(part, result.stderr)
        self.assertEqual(bench("copy", *SMALL).stderr, "")

    def test_the_table_has_titles_and_the_same_rows(self):
        lines = bench("copy", *SMALL).stdout.splitlines()
        self.assertTrue(lines[0].startswith("cpu "))
        self.assertTrue(lines[1].startswith("name "))
        names = [line.split()[0] for line in lines[2:]]
        json_rows = bench("copy", "--json", *SMALL).stdout.splitlines()
        self.assertEqual(names, [json.loads(line)["name"] for line in json_rows])

    def test_what_cannot_be_measured_is_an_error_in_words(self):
        for arguments, code in [([], USAGE), (["copie"], USAGE), (["copy", "--size", "many"], USAGE),
                                (["copy", "--runs", "0"], USAGE), (["copy", "--bogus"], USAGE),
                                (["idle", "--seconds", "0"], USAGE), (["save", "--size", "-1"], USAGE),
                                (["copy", "--size", "0"], USAGE), (["copy", "--chunk", "0", "--size", "1MiB"], USAGE),
                                (["copy", "--size", "1000000TiB"], 1)]:
            result = bench(*arguments)
            self.assertEqual(result.returncode, code, (arguments, result.stderr))
            self.assertNotEqual(result.stderr, "", arguments)
            self.assertNotIn("{", result.stdout, arguments)
        self.assertIn('"copie" is not a command', bench("copie").stderr)

    def test_help_is_no_mistake(self):
        for arguments in [["--help"], ["copy", "--help"]]:
            self.assertEqual(bench(*arguments).returncode, 0)


if __name__ == "__main__":
    BENCH = sys.argv.pop(1)
    unittest.main()
