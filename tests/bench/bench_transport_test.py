#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""`ropeteam-bench transport` runs over the build's fabrics and prints what it measured. The test does not judge
figures.

    bench_transport_test.py PATH_OF_ROPETEAM_BENCH PATH_OF_PLOT_TRANSPORT
"""

import functools
import json
import math
import subprocess
import sys
import unittest

from drawing import check_drawing

BENCH = PLOT = None
SMALL = ["--runs", "1", "--pass", "2", "--size", "64K", "--sizes", "4K,100,1M", "--peers", "1,2"]


def bench(*arguments):
    return subprocess.run([BENCH, "transport", *arguments], capture_output=True, text=True, timeout=60, check=False)


@functools.cache
def bench_over_tcp():
    return bench("--fabric", "ofi", "--provider", "tcp;ofi_rxm", "--json", *SMALL)


class BenchTransport(unittest.TestCase):
    def test_each_size_number_of_peers_latency_and_processor_time_has_its_row(self):
        result = bench_over_tcp()
        if "without libfabric" in result.stderr:
            self.skipTest(result.stderr)
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertIn("tcp;ofi_rxm on lo", result.stderr)
        rows = {row["name"]: row for row in map(json.loads, result.stdout.splitlines())}
        self.assertEqual(rows["transport/ofi_put_vs_fi_write"]["baseline_name"], "fi_write")
        self.assertGreater(rows["transport/ofi_put_vs_fi_write"]["ratio"], 0)
        self.assertEqual(rows["transport/ofi_put_vs_socket"]["baseline_name"], "socket")
        for what in ["put_4K", "put_100", "put_1M", "get_4K", "get_100", "get_1M", "put_peers_1", "put_peers_2"]:
            self.assertEqual(rows["transport/ofi_" + what]["unit"], "GB/s")
        for what in ["put_latency_8", "get_latency_8"]:
            self.assertEqual(rows["transport/ofi_" + what]["unit"], "us")
        self.assertEqual(rows["transport/ofi_put_cpu_seconds_per_gib"]["unit"], "s/GiB")
        for row in rows.values():
            self.assertTrue(0 <= row["median"] < math.inf, row)

    def test_the_rows_can_be_drawn(self):
        result = bench_over_tcp()
        if "without libfabric" in result.stderr:
            self.skipTest(result.stderr)
        check_drawing(self, PLOT, result.stdout)

    def test_quick_measures_the_comparison_only(self):
        result = bench("--fabric", "ofi", "--provider", "tcp;ofi_rxm", "--json", "--quick", *SMALL)
        if "without libfabric" in result.stderr:
            self.skipTest(result.stderr)
        self.assertEqual([json.loads(line)["name"] for line in result.stdout.splitlines()],
                         ["transport/ofi_put_vs_fi_write", "transport/ofi_put_vs_socket"])

    def test_the_other_end_runs_where_a_command_puts_it(self):
        # env is a simple command that runs another command; 127.0.0.2 represents the other machine.
        elsewhere = ["--on", "env ROPETEAM_TEST=elsewhere", "--on-address", "127.0.0.2", "--address", "127.0.0.1"]
        result = bench("--fabric", "ofi", "--provider", "tcp;ofi_rxm", "--json", *SMALL, *elsewhere)
        if "without libfabric" in result.stderr:
            self.skipTest(result.stderr)
        self.assertEqual(result.returncode, 0, result.stderr)
        rows = {row["name"]: row for row in map(json.loads, result.stdout.splitlines())}
        for name in ["ofi_put_vs_fi_write", "ofi_put_vs_socket", "ofi_get_1M", "ofi_put_peers_2"]:
            self.assertGreater(rows["transport/" + name]["median"], 0)
        failed = bench("--fabric", "ofi", "--quick", *SMALL, "--on", "false", "--on-address", "127.0.0.2")
        self.assertEqual(failed.returncode, 1)
        self.assertIn("the target process did not start", failed.stderr)

    def test_what_cannot_be_measured_is_an_error_in_words(self):
        for arguments, says in [(["--fabric", "pigeon"], "pigeon"), (["--size", "0"], "size"),
                                (["--provider", "pigeon", "--fabric", "ofi"], "pigeon"),
                                (["--fabric", "verbs", "--device", "pigeon_0"], "verbs"),
                                (["--on", "ssh b", "--on-address", "pigeon"], "pigeon")]:
            result = bench(*arguments, "--runs", "1")
            self.assertNotEqual(result.returncode, 0, arguments)
            self.assertIn(says, result.stderr)
            self.assertNotIn("{", result.stdout, arguments)


if __name__ == "__main__":
    PLOT = sys.argv.pop(2)
    BENCH = sys.argv.pop(1)
    unittest.main()
