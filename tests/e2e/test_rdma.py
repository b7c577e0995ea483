# SPDX-License-Identifier: Apache-2.0
"""Daemons that use RDMA devices: four nodes, a lost node, a cut cable, and a cable that loses packets.

scripts/soft-roce creates software devices; scripts/test runs this file in its virtual machine.
"""

from __future__ import annotations

import os
import pathlib
import re
import subprocess

import pytest
from harness import Cluster, saves_commit_again

from ropeteam import DeadlineExceeded, Level

# The virtual machine is emulated, and its nodes share two slow processors, so this timeout is long.
PATIENT = ["--dead-after-ms", "10000"]
DEVICES = pathlib.Path("/sys/class/infiniband")
# Both ends of two cables, as `scripts/soft-roce --setup cables` makes them.
CABLE_ENDS = [["rxa", "rxc"], ["rxb", "rxd"]]
CABLE_OPTIONS = [["--device", ",".join(ends)] for ends in CABLE_ENDS]


def network(*words: str) -> None:
    subprocess.run([os.environ["SOFT_ROCE"], *words], check=True, timeout=30)


@pytest.fixture
def device() -> str:
    names = sorted(entry.name for entry in DEVICES.iterdir()) if DEVICES.exists() else []
    if not names or names[0] != "rxe0":
        pytest.skip("no rxe0 here: it is for the guest of scripts/soft-roce --setup one")
    return names[0]


@pytest.fixture
def cables():
    if "SOFT_ROCE" not in os.environ or not (DEVICES / "rxa").exists():
        pytest.skip("no cables here: it is for the guest of scripts/soft-roce --setup cables")
    yield
    for cable in ("1", "2"):
        network("netem", cable)
        network("repair", cable)


def take_rdma(monkeypatch, transport: str, device: str) -> list[str]:
    """The options for daemons that use the device. All processes are on one host, where UCX would use shared memory, so
    UCX_TLS excludes that. Over rxe, UCX connects only by the link-local GID."""
    if transport != "ucx":
        return ["--transport", transport, "--device", device, "--gid-index", "1"]
    monkeypatch.setenv("UCX_TLS", "rc,self")
    return ["--transport", "ucx", "--device", f"{device}:1", "--gid-index", "0"]


def save_everywhere(nodes: Cluster, token: str, step: int, contents: list[bytes]) -> list:
    ranks = [nodes[rank].open(rank, nodes.size, token) for rank in range(nodes.size)]
    for rope, content in zip(ranks, contents):
        rope.save(step, {"data": content})
    return ranks


def check_lanes(nodes: Cluster, transport: str) -> None:
    """Checks that UCX used the device and not the shared memory of the host."""
    if transport == "ucx":
        lanes = re.findall(r"lanes (.*)", nodes[0].log_text())
        assert lanes and all("rc_" in lane and "memory" not in lane for lane in lanes), lanes


def check_everywhere(nodes: Cluster, token: str, step: int, contents: list[bytes]) -> None:
    ranks = [nodes[rank].open(rank, nodes.size, token) for rank in range(nodes.size)]
    for rope, content in zip(ranks, contents):
        assert rope.latest().step == step
        assert rope.load()["data"] == content
    for rope in ranks:
        rope.close()


def contents_of(nodes: int, length: int) -> list[bytes]:
    return [bytes((rank * 31 + at) % 251 for at in range(997)) * (length // 997) for rank in range(nodes)]


@pytest.mark.parametrize("transport", ["verbs", "ucx"])
def test_four_nodes_lose_one_and_no_committed_step(cluster, device, transport, monkeypatch):
    fabric = take_rdma(monkeypatch, transport, device)
    nodes = cluster(4, options=[*fabric, "--require-rdma", *PATIENT])
    daemon = nodes[0].status()["daemon"]
    assert daemon["transport"].startswith(transport)
    assert device in daemon["devices"]
    assert daemon["rdma"] is True
    contents = contents_of(4, 4_000_000)
    ranks = save_everywhere(nodes, "first", 1, contents)
    for rope in ranks:
        rope.wait(1, Level.COMMITTED)
        rope.close()
    check_lanes(nodes, transport)
    nodes[2].kill(drop_memory=True)
    nodes.wait_members(3)
    nodes[2].start()
    nodes.wait_members(4)
    check_everywhere(nodes, "second", 1, contents)


def test_a_cable_cut_in_the_middle_of_a_save_costs_no_save(cluster, cables):
    nodes = cluster(2, options=["--transport", "verbs", *PATIENT], node_options=CABLE_OPTIONS)
    assert all(name in nodes[0].status()["daemon"]["devices"] for name in CABLE_ENDS[0])
    contents = contents_of(2, 12_000_000)
    ranks = [nodes[rank].open(rank, 2, "first") for rank in range(2)]
    # At this rate replicating takes 5 s, so the cut is in the middle.
    network("netem", "1", "rate", "10mbit")
    network("netem", "2", "rate", "10mbit")
    for rope, content in zip(ranks, contents):
        rope.save(1, {"data": content})
    with pytest.raises(DeadlineExceeded):  # replication has not ended before the cut
        ranks[0].wait(1, Level.REPLICATED, timeout=0)
    network("cut", "1")
    network("netem", "2")
    for rope in ranks:
        rope.wait(1, Level.COMMITTED)
        rope.close()
    check_everywhere(nodes, "second", 1, contents)


# verbs uses both cables, UCX the first. libfabric is not tested: over verbs it connects by rdma_cm, which treats the
# other end of a cable in the same kernel as a local address.
@pytest.mark.parametrize("transport", ["verbs", "ucx"])
def test_loss_and_delay_cost_time_and_nothing_else(cluster, cables, transport, monkeypatch):
    for cable in ("1", "2"):
        network("netem", cable, "loss", "1%", "delay", "1ms")
    node_options = [
        take_rdma(monkeypatch, transport, ",".join(ends) if transport == "verbs" else ends[0])
        for ends in CABLE_ENDS
    ]
    nodes = cluster(2, options=["--require-rdma", *PATIENT], node_options=node_options)
    contents = contents_of(2, 2_000_000)
    ranks = save_everywhere(nodes, "first", 1, contents)
    for rope in ranks:
        rope.wait(1, Level.COMMITTED)
        rope.close()
    check_lanes(nodes, transport)
    check_everywhere(nodes, "second", 1, contents)


# Both ends lose all packets for ten seconds; the control plane uses loopback and works. The interface stays up: if it
# was down, a process that uses UCX would end (docs/soft-roce.md).
@pytest.mark.parametrize("transport", ["verbs", "ucx"])
def test_saves_commit_again_after_a_cable_was_cut_and_healed(
    cluster, cables, transport, monkeypatch, record_testsuite_property
):
    node_options = [take_rdma(monkeypatch, transport, ends[0]) for ends in CABLE_ENDS]
    nodes = cluster(2, options=["--require-rdma", *PATIENT], node_options=node_options)
    seconds = saves_commit_again(
        nodes, lambda: network("netem", "1", "loss", "100%"), lambda: network("netem", "1"), 1_000_000
    )
    record_testsuite_property(f"committed_again_s_{transport}", round(seconds, 2))
