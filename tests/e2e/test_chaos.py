# SPDX-License-Identifier: Apache-2.0
"""Runs scripts/chaos for some rounds of one schedule: once each fault that takes only a second or two."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import pytest
from harness import BUILD, ROOT, clean_environment

LIMIT_S = 240
STANDALONE = ["kill-daemon", "kill-all-daemons", "lose-two-nodes", "full-memory", "throttle", "flip-bit"]
ETCD = ["kill-rank", "lose-coordinator", "partition", "cut-leader-link", "spares", "etcd-cut-leader", "etcd-wipe"]


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
    """Why network namespaces do not work; "" if they do."""
    if os.geteuid() != 0:
        return "network namespaces take root"
    name = f"rt{os.getpid()}-probe"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, timeout=30, check=False)
    subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=30, check=False)
    return "" if made.returncode == 0 else f"no network namespace: {made.stderr.strip()}"


@pytest.mark.parametrize(("membership", "faults"), [("standalone", STANDALONE), ("etcd", ETCD)])
def test_a_round_of_each_fault_loses_nothing(tmp_path, membership, faults):
    if why := namespaces_work():
        pytest.skip(why)
    if membership == "etcd" and not (shutil.which("etcd") and shutil.which("etcdctl")):
        pytest.skip("no etcd and etcdctl (Debian: etcd-server, etcd-client)")
    words = ["--membership", membership, "--in-turn", "--only", ",".join(faults), "--seed", "3"]
    done = chaos(*words, "--out", str(tmp_path))
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["membership"] == membership
    assert sorted(report["faults"]) == sorted(faults)
    for name, tally in report["faults"].items():
        assert (tally["rounds"], tally["lost"], tally["wrong"], tally["stuck"]) == (1, 0, 0, 0), name
    assert report["committed"] >= len(faults), "a step before each fault"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--membership", "standalone", "--only", "kill-rank,etcd-wipe"], "--only etcd-wipe: the faults over standalone are kill-"),
        (["--without", "kill-rnak"], "--without kill-rnak: the faults over "),
        (["--only", "pause", "--without", "pause"], "--without leaves no fault"),
        (["--rounds", "0"], "--rounds 0: at least 1"),
        (["--rounds", "many"], "invalid int value: 'many'"),
    ],
)
def test_chaos_refuses_what_it_cannot_do(words, says):
    done = chaos(*words)
    assert done.returncode == 2
    assert says in done.stderr
