# SPDX-License-Identifier: Apache-2.0
"""save_state() and load_state() over worlds of several sizes and layouts, on real daemons; see
torch_worlds.py."""

from __future__ import annotations

import pathlib
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
