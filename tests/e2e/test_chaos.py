# SPDX-License-Identifier: Apache-2.0
"""Runs scripts/chaos for some rounds of one schedule: once each fault that takes a few seconds, and three that take ten or
twenty."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

from types import SimpleNamespace

import pytest
from harness import BUILD, ROOT, clean_environment

sys.path.insert(0, str(ROOT / "scripts" / "lib"))

import chaos_faults  # noqa: E402
import chaos_rounds  # noqa: E402
from chaos_host import Stuck  # noqa: E402
from chaos_nodes import Cluster, Node  # noqa: E402
from chaos_storage import View  # noqa: E402

LIMIT_S = 240
STANDALONE = ["kill-daemon", "kill-all-daemons", "lose-two-nodes", "full-memory", "throttle", "flip-bit"]
STANDALONE += ["storage-refused", "away"]
ETCD = ["kill-rank", "lose-coordinator", "partition", "cut-leader-link", "spares", "etcd-cut-leader", "etcd-wipe"]
ETCD += ["replace-key"]


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


DENIED, EMPTY = "/store.denied", "/store.empty"


@pytest.mark.parametrize(
    ("source", "status", "words", "excused"),
    [
        (DENIED, 1, "open /store: Permission denied", True),
        (DENIED, -6, "check failed in /store", False),
        (DENIED, 0, "open /store: Permission denied", False),
        (DENIED, 1, "no space for the arena", False),
        (EMPTY, 1, "open /store: Permission denied", False),
        (None, 1, "open /store: Permission denied", False),
    ],
)
def test_a_daemon_may_end_only_because_its_storage_is_refused(source, status, words, excused):
    process = SimpleNamespace(returncode=status, poll=lambda: status)
    node = SimpleNamespace(name="n", view=View(source) if source else None, process=process)
    node.start, node.last_words = (lambda wait: None), (lambda: words)
    cluster = SimpleNamespace(nodes=[node], store=SimpleNamespace(path="/store", denied=DENIED))
    try:
        chaos_faults.start_where_storage_allows(SimpleNamespace(cluster=cluster))
        assert excused and node.process is None
    except Stuck:
        assert not excused


@pytest.mark.parametrize("died", [True, False])
def test_an_unavailable_step_is_lost_unless_a_node_was_declared_dead(monkeypatch, died):
    monkeypatch.setattr(chaos_rounds, "CALL_S", 0.0)
    views = [(5.0, 5), (20.0, 5 if died else 6)]  # the first one is of the fault
    node = SimpleNamespace(views_since=lambda when: [view for view in views if view[0] >= when])
    store = SimpleNamespace(trouble_with=lambda *of: "")
    cluster = SimpleNamespace(nodes=[node], committed=lambda: [1], store=store)
    round_of = chaos_rounds.Chaos(cluster, None, 1)
    rank = SimpleNamespace(number=0, order=lambda do, **of: None)
    rank.answer = iter([{"error": "Unavailable: wait"}, {"value": ["run"]}]).__next__
    round_of.ranks, round_of.struck, round_of.safe = [rank], 4.0, 1
    round_of.attempts[1].add("run")
    monkeypatch.setattr(round_of, "redundant", lambda: True)
    monkeypatch.setattr(round_of, "open_world", lambda: None)
    round_of.compare(since=10.0)
    assert (round_of.tally.disturbed, round_of.tally.lost) == ((1, 0) if died else (0, 1))


def test_what_does_not_end_or_is_not_there_is_stuck(monkeypatch, tmp_path):
    """Any other exception would end the program before it has written its report."""
    monkeypatch.setattr("chaos_nodes.READY_S", 0.0)
    cluster = SimpleNamespace(prefix="test", directory=tmp_path, arenas=tmp_path, out=tmp_path, first_key="")
    cluster.store = SimpleNamespace(path=tmp_path / "absent")
    node = Node(cluster, 0)
    node.log.write_text("")
    with subprocess.Popen(["sh", "-c", "trap '' TERM; echo; read line"], stdin=-1, stdout=-1) as node.process:
        node.process.stdout.readline()  # the signal is ignored from now on
        with pytest.raises(Stuck, match="does not end"):
            node.stop()
        with pytest.raises(Stuck, match="cannot be changed"):
            node.see(View(tmp_path / "absent"))
        node.process.stdin.close()
    others = SimpleNamespace(running=lambda: [node])
    for status in ({"leader": "node-9"}, None):
        monkeypatch.setattr(node, "status", lambda status=status: status)
        with pytest.raises(Stuck, match="a leader"):
            Cluster.leader(others)
