# SPDX-License-Identifier: Apache-2.0
"""save_state() and load_state() over worlds of several sizes and layouts, on real daemons; see
torch_worlds.py."""

from __future__ import annotations

import ast
import pathlib
import re
import subprocess
import sys

import pytest
from harness import WAIT_S, environment

pytest.importorskip("torch", reason="torch is not installed")
WORKER = pathlib.Path(__file__).with_name("torch_worlds.py")


def run(case: str, ranks: int, cluster) -> str:
    sockets = [node.socket for node in cluster.nodes]
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc-per-node={ranks}",
            str(WORKER),
            case,
        ]
        + sockets,
        env=environment(GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1"),
        capture_output=True,
        text=True,
        timeout=3 * WAIT_S,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_a_step_loads_on_any_number_of_ranks_and_any_mesh(cluster):
    printed = run("reshard", 6, cluster(2))
    assert printed.count("good") == 12


def test_what_several_ranks_have_is_stored_once_and_compared(cluster):
    printed = run("replicas,differ", 4, cluster(2))
    lines = re.findall(r"stored (\w+) (\d+) (\d+) (\d+) (\d+) whole (\d+)", printed)
    assert [line[0] for line in lines] == ["ddp", "hsdp", "tp", "ddp"], printed
    for layout, *numbers in lines:
        *sizes, whole = map(int, numbers)
        if layout == "ddp":
            assert sum(sizes) == whole
            assert max(sizes) < 1.3 * min(sizes), "spread evenly"
        # A parameter's step is where each of its shards is: 4 bytes, of 7 parameters, at most 3 times more.
        assert whole <= sum(sizes) <= whole + 3 * 7 * 4, printed

    # Of a pair, the rank that did not save what differs finds it, once the step is committed.
    pairs = re.search(r"differ hsdp (.*)", printed)
    assert pairs, printed
    said = ast.literal_eval(pairs[1])
    assert [committed for committed, _ in said] == [[101, 102, 103]] * 4
    assert sorted(warned for _, warned in said) == [0, 0, 0, 1] and said[1][1] == said[3][1] == 0
