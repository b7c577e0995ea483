# SPDX-License-Identifier: Apache-2.0
"""scripts/chaos for some rounds of one schedule: each kind of its faults that takes a second or two, once."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from harness import BUILD, ROOT, clean_environment

LIMIT_S = 240
FAULTS = ["kill-rank", "kill-daemon", "kill-all-daemons", "lose-two-nodes", "partition", "throttle", "full-memory", "flip-bit"]


def chaos(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "lib" / "chaos.py"), *words],
        env=clean_environment(ROPETEAM_BUILD=str(BUILD)),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


def namespaces_work() -> str:
    """Why not; "" if they do."""
    if os.geteuid() != 0:
        return "network namespaces take root"
    name = f"rt{os.getpid()}-probe"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, timeout=30, check=False)
    subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=30, check=False)
    return "" if made.returncode == 0 else f"no network namespace: {made.stderr.strip()}"


def test_a_round_of_each_fault_loses_nothing(tmp_path):
    if why := namespaces_work():
        pytest.skip(why)
    done = chaos("--in-turn", "--only", ",".join(FAULTS), "--seed", "1", "--out", str(tmp_path))
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    report = json.loads((tmp_path / "report.json").read_text())
    assert sorted(report["faults"]) == sorted(FAULTS)
    for name, tally in report["faults"].items():
        assert (tally["rounds"], tally["lost"], tally["wrong"], tally["stuck"]) == (1, 0, 0, 0), name
    assert report["committed"] >= len(FAULTS), "a step before each fault"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--only", "kill-rank,earthquake"], "--only earthquake: the faults are kill-rank, "),
        (["--rounds", "0"], "--rounds 0: at least 1"),
        (["--rounds", "many"], "invalid int value: 'many'"),
    ],
)
def test_chaos_refuses_what_it_cannot_do(words, says):
    done = chaos(*words)
    assert done.returncode == 2
    assert says in done.stderr
