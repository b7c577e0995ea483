# SPDX-License-Identifier: Apache-2.0
"""Daemons with the distribution's etcd of three members. Any member may be killed or stopped."""

from __future__ import annotations

import os
import pathlib
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator

import pytest
from harness import Cluster, free_port, open_again, save_everywhere, saved, undisturbed, wait_until

from ropeteam import DeadlineExceeded, Level


class Etcd:
    """Three members, each on its own loopback address; their data is in memory."""

    def __init__(self) -> None:
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="ropeteam-etcd-", dir="/dev/shm"))
        self.hosts = [f"127.0.0.{41 + i}" for i in range(3)]
        self.client = [f"{host}:{free_port(host)}" for host in self.hosts]
        self.peer = [f"{host}:{free_port(host)}" for host in self.hosts]
        self.processes: list[subprocess.Popen[bytes] | None] = [None] * 3
        for member in range(3):
            self.start(member)
        wait_until(lambda: self.control("get", "none") == 0, "an answer of etcd's")

    def start(self, member: int) -> None:
        cluster = ",".join(f"m{i}=http://{peer}" for i, peer in enumerate(self.peer))
        with open(self.folder / f"{member}.log", "ab") as log:
            self.processes[member] = subprocess.Popen(
                [
                    "etcd",
                    f"--name=m{member}",
                    f"--data-dir={self.folder}/{member}",
                    f"--listen-client-urls=http://{self.client[member]}",
                    f"--advertise-client-urls=http://{self.client[member]}",
                    f"--listen-peer-urls=http://{self.peer[member]}",
                    f"--initial-advertise-peer-urls=http://{self.peer[member]}",
                    f"--initial-cluster={cluster}",
                ],
                stdout=log,
                stderr=log,
            )

    def control(self, *words: str) -> int:
        command = ["etcdctl", "--command-timeout=1s", "--endpoints", ",".join(self.client), *words]
        environment = {**os.environ, "ETCDCTL_API": "3"}
        return subprocess.run(command, env=environment, capture_output=True, timeout=30, check=False).returncode

    def leader(self) -> int:
        """The index of the etcd leader. A line of etcdctl: address, id, version, size, whether it leads, …"""
        command = ["etcdctl", "--endpoints", ",".join(self.client), "endpoint", "status"]
        environment = {**os.environ, "ETCDCTL_API": "3"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=30, check=False)
        lines = [line.split(", ") for line in done.stdout.splitlines()]
        return next(self.client.index(line[0]) for line in lines if line[4] == "true")

    def kill(self, member: int) -> None:
        process = self.processes[member]
        if process is not None:
            process.kill()
            process.wait()
        self.processes[member] = None

    def signal(self, number: int) -> None:
        for process in self.processes:
            if process is not None:
                process.send_signal(number)

    def url(self, prefix: str) -> str:
        return f"etcd://{','.join(self.client)}/{prefix}"


@pytest.fixture(scope="module")
def etcd() -> Iterator[Etcd]:
    if shutil.which("etcd") is None or shutil.which("etcdctl") is None:
        pytest.skip("no etcd and etcdctl (Debian: etcd-server, etcd-client)")
    made = Etcd()
    yield made
    for member in range(3):
        made.kill(member)
    shutil.rmtree(made.folder, ignore_errors=True)


def coordinators(nodes: Cluster) -> list[int]:
    """The running nodes whose coordinator has begun and not ended."""
    found = []
    for node in nodes.nodes:
        text = node.log_text() if node.process is not None else ""
        if text.rfind("membership coordinator begins on ") > text.rfind("membership coordinator on "):
            found.append(node.ordinal)
    return found


def test_node_0_and_the_coordinator_are_lost_and_the_job_goes_on(cluster, etcd):
    nodes = cluster(3, options=["--membership", etcd.url("lost")])
    ranks = [nodes[rank].open(rank, 3, "run") for rank in range(3)]
    save_everywhere(ranks, 1)
    first = wait_until(lambda: coordinators(nodes), "a coordinator")[0]
    # Node 0 is lost with its memory. If another node is the coordinator, that one is lost first.
    for lost in [0] if first == 0 else [first, 0]:
        others = [nodes[rank] for rank in range(3) if rank != lost]
        processes = [node.process for node in others]
        ranks[lost].close()
        nodes[lost].kill(drop_memory=True)
        wait_until(lambda: all(node.members() == 2 for node in others), "a view without it")
        nodes[lost].moved_to = f"127.0.0.{lost + 71}"
        nodes[lost].start()
        nodes.wait_members(3)
        ranks = open_again(nodes.nodes, ranks)
        for rank, rope in enumerate(ranks):
            assert rope.latest().step == 1
            assert rope.load(1)["data"] == saved(1, rank)
        undisturbed(others, processes)
    save_everywhere(ranks, 2)
    for rope in ranks:
        rope.close()


def test_with_etcd_away_saves_stay_local_and_nobody_is_declared_dead(cluster, etcd):
    nodes = cluster(2, options=["--membership", etcd.url("away")])
    ranks = [nodes[rank].open(rank, 2, "run") for rank in range(2)]
    save_everywhere(ranks, 1)
    etcd.signal(signal.SIGSTOP)
    try:
        wait_until(lambda: "saves stay local, no node is declared dead" in nodes[0].log_text() + nodes[1].log_text(), "a word")
        wait_until(lambda: all("the lease has expired" in node.log_text() for node in nodes.nodes), "leases to end")
        for rank, rope in enumerate(ranks):
            rope.save(2, {"data": saved(2, rank)}, wait=Level.LOCAL)
        with pytest.raises(DeadlineExceeded):
            ranks[0].wait(2, Level.COMMITTED, timeout=0.5)
        assert ranks[0].load(1)["data"] == saved(1, 0)
        assert [node.members() for node in nodes.nodes] == [2, 2]
    finally:
        etcd.signal(signal.SIGCONT)
    for rope in ranks:
        rope.wait(2, Level.COMMITTED)
        rope.close()
    assert [node.members() for node in nodes.nodes] == [2, 2]
    undisturbed(nodes.nodes, [node.process for node in nodes.nodes])


def test_the_leader_of_etcd_is_killed_and_the_others_are_asked(cluster, etcd):
    nodes = cluster(2, options=["--membership", etcd.url("leader")])
    ranks = [nodes[rank].open(rank, 2, "run") for rank in range(2)]
    save_everywhere(ranks, 1)
    member = etcd.leader()
    etcd.kill(member)
    save_everywhere(ranks, 2)
    etcd.start(member)
    save_everywhere(ranks, 3)
    for rope in ranks:
        rope.close()
    assert [node.members() for node in nodes.nodes] == [2, 2]
    undisturbed(nodes.nodes, [node.process for node in nodes.nodes])


def test_a_daemon_that_starts_while_etcd_is_away_says_so_and_ends_when_told(cluster, etcd):
    nodes = cluster(1, options=["--membership", etcd.url("start")])
    nodes[0].stop()
    etcd.signal(signal.SIGSTOP)
    try:
        nodes[0].start()

        def membership() -> dict[str, object]:
            return dict(nodes[0].local_status()["daemon"]["membership"])

        wait_until(lambda: "does not answer" in str(membership()["blocked"]) and membership()["for_s"] >= 2, "a word")
        said = membership()
        assert (said["kind"], said["coordinator"], said["registered"]) == ("etcd", "", False)
        assert said["for_s"] < 60, "since its start, not since the machine's"
        began = time.monotonic()
        assert nodes[0].stop() == 0
        assert time.monotonic() - began < 3
    finally:
        etcd.signal(signal.SIGCONT)
