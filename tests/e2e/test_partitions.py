# SPDX-License-Identifier: Apache-2.0
"""Daemons over TCP whose data path is cut while their control plane works, and a node that is declared dead.

nftables drops only the packets of the data ports. This needs root and does not affect other programs.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator

import pytest
from harness import Cluster, Daemon, free_port, payload, saves_commit_again, verify, wait_until

from ropeteam import Level

LAST = 8


def nft(*words: str) -> None:
    subprocess.run(["nft", *words], check=True, timeout=30)


class DataPath:
    """Drops packets from and to the data ports of some nodes on the loopback interface, until it is healed."""

    def __init__(self) -> None:
        self.table = f"ropeteam_test_{os.getpid()}"
        self.is_cut = False

    def cut(self, nodes: list[Daemon]) -> None:
        ports = "{" + ",".join(data_port(node) for node in nodes) + "}"
        nft("add", "table", "inet", self.table)
        self.is_cut = True
        chain = "{ type filter hook input priority 0 ; }"
        nft("add", "chain", "inet", self.table, "input", chain)
        for side in ("dport", "sport"):
            nft("add", "rule", "inet", self.table, "input", "iif", "lo", "tcp", side, ports, "drop")

    def heal(self) -> None:
        if self.is_cut:
            nft("delete", "table", "inet", self.table)
        self.is_cut = False


@pytest.fixture
def data_path() -> Iterator[DataPath]:
    if os.geteuid() != 0 or shutil.which("nft") is None:
        pytest.skip("dropping packets takes root and nft (Debian: nftables)")
    probe = subprocess.run(["nft", "list", "tables"], capture_output=True, text=True, timeout=30, check=False)
    if probe.returncode != 0:
        pytest.skip(f"nft does not work here: {probe.stderr.strip()}")
    path = DataPath()
    yield path
    path.heal()


def own_data_ports(nodes: int) -> list[list[str]]:
    """Options for each node: ports that no other connection uses, since their packets are dropped."""
    return [["--data-port", str(free_port(f"127.0.0.{node + 1}"))] for node in range(nodes)]


def data_port(node: Daemon) -> str:
    found = re.search(r":(\d+)$", str(node.status()["daemon"]["data"]))
    assert found, node.status()["daemon"]
    return found.group(1)


def test_saves_commit_again_after_the_data_path_was_cut_and_healed(cluster, data_path, record_property):
    nodes: Cluster = cluster(2, node_options=own_data_ports(2))
    seconds = saves_commit_again(nodes, lambda: data_path.cut(nodes.nodes), data_path.heal, 2_000_000)
    record_property("committed_again_s", round(seconds, 2))


# In the middle of a save the node is declared dead, and the memory that it was writing to is used for other saves. Then
# it continues: the kernel's buffers still hold bytes that it had sent, and its program puts more.
def test_late_puts_of_a_node_that_was_paused_change_nothing(cluster, data_path):
    nodes: Cluster = cluster(3, memory="128M", node_options=own_data_ports(3))
    ranks = [nodes[rank].open(rank, 3, "first") for rank in range(3)]
    for rank, rope in enumerate(ranks):
        rope.save(1, {"data": payload(rank, 4_000_000)})
    for rope in ranks:
        rope.wait(1, Level.COMMITTED)
    leave_puts_on_the_way(data_path, nodes, ranks[2])
    sleeper = nodes[2].process
    sleeper.send_signal(signal.SIGSTOP)
    try:
        wait_until(lambda: nodes[0].members() == 2 and nodes[1].members() == 2, "the view without node 2")
        data_path.heal()
        # Together these saves are larger than the arenas, so they reuse the memory that node 2 was writing to.
        with nodes[0].open(0, 2, "second") as first, nodes[1].open(1, 2, "second") as second:
            for step in range(2, LAST + 1):
                for rank, rope in enumerate((first, second)):
                    rope.save(step, {"data": payload(step * 10 + rank, 12_000_000)})
                for rope in (first, second):
                    rope.wait(step, Level.COMMITTED)
            sleeper.send_signal(signal.SIGCONT)
            nodes.wait_members(3)
            assert all(verify(node).returncode == 0 for node in nodes.nodes[:2])
            assert first.load(LAST)["data"] == payload(LAST * 10, 12_000_000)
            assert second.load(LAST)["data"] == payload(LAST * 10 + 1, 12_000_000)
    finally:
        sleeper.send_signal(signal.SIGCONT)
    for rope in ranks:
        rope.close()


def leave_puts_on_the_way(data_path: DataPath, nodes: Cluster, rope) -> None:
    """Lets the last node's rank save while the data path is cut, until its puts are in the kernel's buffers.

    Without a connection to the holder there are no puts. Then the path is healed, so that they connect, and the next
    step tries again."""
    for step in range(2, 12):
        data_path.cut(nodes.nodes)
        rope.save(step, {"data": payload(9, 16_000_000)})
        until = time.monotonic() + 0.5
        while time.monotonic() < until:
            if puts_begun(nodes[2]):
                return
        data_path.heal()
        rope.wait(step, Level.REPLICATED)
    pytest.fail("no save's puts began")


def puts_begun(node: Daemon) -> bool:
    """Whether the node's kernel holds unacknowledged bytes of a put."""
    done = subprocess.run(
        ["ss", "-tnpH", "state", "established"], capture_output=True, text=True, timeout=30, check=True
    )
    mine = [line.split() for line in done.stdout.splitlines() if f"pid={node.process.pid}," in line]
    return any(int(words[1]) > 100_000 for words in mine)
