# SPDX-License-Identifier: Apache-2.0
"""The daemon's start and end: how it is stopped, what it refuses at once, and how it returns after it was declared
dead."""

from __future__ import annotations

import json
import os
import pathlib
import signal
import subprocess

import pytest
from harness import ROPETEAM, ROPETEAMD, WAIT_S, environment, wait_until
from ropeteam import Level


def missing_transports() -> list[str]:
    listed = subprocess.run([str(ROPETEAM), "devices", "--json"], env=environment(), capture_output=True, text=True)
    return [each["transport"] for each in json.loads(listed.stdout)["transports"] if each["missing"]]


def arena_address(node) -> str:
    maps = pathlib.Path(f"/proc/{node.process.pid}/maps").read_text()
    return next(line for line in maps.splitlines() if line.endswith(".arena"))


def test_signalled_twice_at_once_it_still_ends_cleanly(cluster):
    """Some launchers signal a process and its group, or a parent forwards a signal that its child already has."""
    node = cluster(1)[0]
    node.process.send_signal(signal.SIGTERM)
    os.killpg(node.process.pid, signal.SIGTERM)
    assert node.stop() == 0
    assert "stopped, arena" in node.log_text()
    assert not os.path.exists(node.socket)


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("--listen", "192.0.2.1", "192.0.2.1"),
        ("--device", "nosuch0", "nosuch0"),
    ],
)
def test_what_cannot_work_is_refused_before_memory_is_taken(tmp_path, option, value, said):
    """On a large host, pre-faulting an arena takes minutes, and its file would remain."""
    options = {"--listen": "127.0.0.1", "--socket": str(tmp_path / "r.sock"), "--arena-path": str(tmp_path), option: value}
    command = [str(ROPETEAMD), "--job", "test", "--memory", "64M"]
    command += [word for pair in options.items() for word in pair]
    own = environment(ROPETEAM_JOB_KEY="5a" * 32)  # required if an address is not loopback
    refused = subprocess.run(command, env=own, capture_output=True, text=True, timeout=WAIT_S)
    assert refused.returncode == 1, refused.stderr
    assert said in refused.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("transport", ["tcp", "ofi", "ucx"])
def test_declared_dead_while_alive_it_begins_again_with_all_that_it_sealed(cluster, transport):
    if transport in missing_transports():
        pytest.skip(f"this build is without {transport}")
    # Without EFA, ofi is permitted only by --insecure.
    nodes = cluster(2, options=["--transport", transport, *(["--insecure"] if transport == "ofi" else [])])
    data = os.urandom(5_000_000)
    with nodes[0].open(0, 1, "first") as rope:
        rope.save(1, {"data": data}, wait=Level.COMMITTED)
        before = arena_address(nodes[1])
        os.kill(nodes[1].process.pid, signal.SIGSTOP)
        try:
            wait_until(lambda: nodes[0].members() == 1, "a view without the stopped node")
            rope.save(2, {"data": data})  # its copy waits for a holder
        finally:
            os.kill(nodes[1].process.pid, signal.SIGCONT)
        wait_until(lambda: "it starts again" in nodes[1].log_text(), "the node that was declared dead")
        wait_until(lambda: nodes[0].members() == 2, "a view with both")
        rope.wait(2, Level.COMMITTED)
        assert arena_address(nodes[1]) != before  # a peer that still writes to the old address harms nothing
        rope.save(3, {"data": data}, wait=Level.COMMITTED)
    # All data that it holds now is intact.
    nodes[0].kill(drop_memory=True)
    nodes[0].start()
    nodes.wait_members(2)
    with nodes[1].open(0, 1, "second") as rope:
        assert rope.latest().step == 3
        assert rope.load(3)["data"] == data
        assert rope.load(2)["data"] == data
