#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""`ropeteam-bench control` prints its rows, and its model nodes send the leader the same as real engines would.

    bench_control_test.py PATH_OF_ROPETEAM_BENCH PATH_OF_PLOT_CONTROL
"""

import json
import math
import subprocess
import sys
import unittest

from drawing import check_drawing

BENCH = PLOT = None
UNITS = {
    "leader_us_per_node_commit": "us",
    "bytes_per_node_commit": "bytes",
    "leader_us_per_node_commit_degraded": "us",
    "leader_us_per_node_view_change": "us",
    "leader_core_percent": "% of a core",
}
NODES = [16, 64, 128]


class BenchControl(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.result = subprocess.run([BENCH, "control", "--nodes", ",".join(map(str, NODES)), "--runs", "2", "--json"],
                                    capture_output=True, text=True, timeout=100, check=False)
        cls.rows = {row["name"]: row for row in map(json.loads, cls.result.stdout.splitlines())}

    def test_every_size_has_every_row(self):
        self.assertEqual(self.result.returncode, 0, self.result.stderr)
        self.assertEqual({name: row["unit"] for name, row in self.rows.items()},
                         {f"control/{what}@{nodes}": unit for what, unit in UNITS.items() for nodes in NODES})
        for row in self.rows.values():
            self.assertTrue(0 < row["min"] <= row["median"] <= row["max"] < math.inf, row)

    def test_the_models_send_what_real_engines_send(self):
        row = self.rows["control/bytes_per_node_commit@16"]
        self.assertEqual(row["baseline_name"], "real_engines")
        self.assertTrue(0.9 < row["ratio"] < 1.1, row)

    def test_the_bytes_of_a_node_do_not_grow_with_the_cluster(self):
        few, many = (self.rows[f"control/bytes_per_node_commit@{nodes}"]["median"] for nodes in (16, 128))
        self.assertTrue(0.8 < many / few < 1.2, (few, many))

    def test_the_rows_can_be_drawn(self):
        check_drawing(self, PLOT, self.result.stdout)

    def test_a_size_that_is_no_cluster_is_an_error_in_words(self):
        for nodes in ["1", "20000", "many"]:
            result = subprocess.run([BENCH, "control", "--nodes", nodes], capture_output=True, text=True, timeout=60,
                                    check=False)
            self.assertEqual(result.returncode, 2, nodes)
            self.assertIn("nodes", result.stderr)


if __name__ == "__main__":
    PLOT = sys.argv.pop(2)
    BENCH = sys.argv.pop(1)
    unittest.main()
