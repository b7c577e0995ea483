# SPDX-License-Identifier: Apache-2.0
"""Training programs with real libraries, ranks and daemons; `scripts/test --frameworks` runs these tests.

A test starts daemons with `cluster` (tests/e2e), and a program of tests/frameworks/programs or examples with
`train`. A program writes results to the directory REPORT (report.py): a file of JSON lines for each rank.
"""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

E2E = pathlib.Path(__file__).resolve().parents[1] / "e2e"
PROGRAMS = pathlib.Path(__file__).resolve().parent / "programs"
sys.path.insert(0, str(E2E))

from harness import WAIT_S, Cluster, e2e_fixture, environment  # noqa: E402


cluster = e2e_fixture("cluster")
own_store = e2e_fixture("own_store")


@dataclass
class Run:
    """The result of a program."""

    status: int  # its exit status, or torchrun's; negative: the signal that ended it
    output: str
    reports: list[list[dict[str, Any]]]  # by rank, in the order of report()

    def ok(self) -> Run:
        assert self.status == 0, self.output[-8000:]
        return self

    def killed(self) -> Run:
        """Checks that a rank was killed, so the program did not end normally."""
        by_torchrun = self.status == 1 and "SIGKILL" in self.output
        assert self.status == -9 or by_torchrun, self.output[-8000:]
        return self

    def losses(self, rank: int = 0) -> dict[int, str]:
        """The exact loss of each step; of a step that was computed twice, the last one."""
        return {each["step"]: each["loss"] for each in self.reports[rank] if "loss" in each}

    def one(self, key: str, rank: int = 0) -> Any:
        """The last value that was reported under this name."""
        return [each[key] for each in self.reports[rank] if key in each][-1]


@pytest.fixture
def train(tmp_path: pathlib.Path) -> Callable[..., Run]:
    """train(nodes, "hf.py", "--option", ranks=2, MY_VARIABLE="1") runs a program to its end: rank r on node
    r modulo the number of nodes.

    All runs of a test have the same working directory, so that they find the files that a library left there.
    nodes=None: without daemons, for the library alone."""
    runs = 0

    def run(
        nodes: Cluster | None, program: str | pathlib.Path, *options: str, ranks: int = 1, **env: str
    ) -> Run:
        nonlocal runs
        runs += 1
        reports = tmp_path / f"report-{runs}"
        reports.mkdir()
        more = {"REPORT": str(reports), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        more.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", CUDA_VISIBLE_DEVICES="")
        if nodes is not None:
            more["SOCKETS"] = ",".join(node.socket for node in nodes.nodes)
        command = [sys.executable]
        if ranks > 1:
            command += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        made = environment(**{**more, **env})
        made["PYTHONPATH"] += os.pathsep + str(PROGRAMS)
        done = subprocess.run(
            [*command, str(PROGRAMS / program), *options],
            env=made,
            cwd=tmp_path,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=3 * WAIT_S,
        )
        lines = []
        for rank in range(ranks):
            path = reports / f"{rank}.jsonl"
            text = path.read_text() if path.exists() else ""
            lines.append([json.loads(line) for line in text.splitlines()])
        return Run(done.returncode, done.stdout, lines)

    return run
