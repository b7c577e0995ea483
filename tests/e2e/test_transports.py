# SPDX-License-Identifier: Apache-2.0
"""Which transport nodes choose, what they report about it, and which options they refuse."""

from __future__ import annotations

import json

import pytest
from harness import WAIT_S, ask, devices, fabrics, usable

from ropeteam import Level


def test_devices_lists_each_transport_or_says_what_is_missing():
    listed = fabrics()
    assert set(listed) == {"verbs", "ofi", "tcp", "ucx"}
    text = devices().stdout
    for name, fabric in listed.items():
        assert bool(fabric["library"]) != bool(fabric["missing"])
        assert (fabric["library"] or fabric["missing"]) in text
        for device in fabric["devices"]:
            assert device["name"] in text, name
    cuda = json.loads(devices("--json").stdout)["cuda"]
    assert bool(cuda["library"]) != bool(cuda["missing"])
    assert f"cuda  {cuda['library'] or 'missing: ' + cuda['missing']}" in text
    assert devices("--yaml").returncode == 2


def test_the_choice_is_in_the_log_and_in_the_status(cluster):
    (node,) = cluster(1).nodes
    daemon = node.status()["daemon"]
    assert daemon["transport"] == "tcp"
    assert daemon["devices"] == "lo"
    assert daemon["data_address"].startswith(node.address + ":")
    assert daemon["rdma"] is False
    assert daemon["rdma_fallback"] == "", "on loopback nothing was passed over"
    assert f"transport tcp devices lo address {daemon['data_address']}" in node.log_text()
    for local in ([], ["--local"]):
        status = ask("status", *local, "--socket", node.socket)
        assert "transport tcp   devices lo   link speed unknown   no RDMA\n" in status.stdout


def test_a_step_that_nobody_holds_is_not_found(cluster):
    (node,) = cluster(1).nodes
    with node.open(0, 1) as rope:
        rope.save(1, {"data": b"x"}, wait=Level.COMMITTED)
    assert ask("ls", "1", "--socket", node.socket).returncode == 0
    for command in (["ls", "5"], ["verify", "5"], ["ls", "5", "--json"]):
        found = ask(*command, "--socket", node.socket)
        assert (found.returncode, found.stdout) == (1, ""), command
        assert "not found: no node holds" in found.stderr


def test_a_node_with_another_transport_is_refused_with_both_named_and_disturbs_nobody(cluster):
    usable("ofi")
    nodes = cluster(2)
    ranks = [nodes[rank].open(rank, 2, "run") for rank in range(2)]
    nodes[1].options = ["--transport", "ofi", "--provider", "shm"]
    nodes[1].kill()
    nodes.wait_members(1)
    nodes[1].start(wait=False)
    assert nodes[1].process.wait(WAIT_S) == 3
    refused = nodes[1].log_text()
    nodes[1].process = None
    assert "node-1 has --transport ofi/shm" in refused
    assert "has tcp: all nodes of a job need the same" in refused
    nodes[1].options = []
    nodes[1].start()
    nodes.wait_members(2)
    for rope in ranks:
        rope.close()
    again = [nodes[rank].open(rank, 2, "next") for rank in range(2)]
    for rope in again:
        rope.save(1, {"data": b"x" * 100_000})
    for rope in again:
        rope.wait(1, Level.COMMITTED)
        rope.close()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--transport", "pigeon"], "pigeon"),
        (["--transport", "verbs", "--device", "pigeon_0"], "verbs"),
        (["--transport", "ucx", "--device", "pigeon0"], "ucx"),
        (["--transport", "ofi", "--insecure", "--device", "pigeon0"], "pigeon0"),
        (["--transport", "ofi", "--insecure", "--provider", "pigeon"], "pigeon"),
    ],
)
def test_what_is_not_there_is_an_error_that_names_it(run_ropeteam, options, says):
    done = run_ropeteam("true", options=["--job", "test", *options])
    assert done.returncode != 0
    assert says in done.stderr or "this build is without" in done.stderr


@pytest.mark.parametrize(
    ("flags", "variables"),
    [(["--require-rdma"], {}), ([], {"ROPETEAM_REQUIRE_RDMA": "1"})],
    ids=["flag", "variable"],
)
def test_require_rdma_does_not_start_where_bytes_would_go_over_tcp(run_ropeteam, flags, variables):
    cards = [d for fabric in fabrics().values() for d in fabric["devices"] if d["rdma"] and not d["unusable"]]
    if cards:
        pytest.skip(f"this machine has RDMA: {cards[0]['name']}")
    done = run_ropeteam("true", options=["--job", "test", *flags], **variables)
    assert done.returncode != 0
    assert "RDMA is required" in done.stderr
    assert "verbs" in done.stderr


def test_a_job_over_ucx_survives_a_node(cluster):
    usable("ucx")
    nodes = cluster(4, options=["--transport", "ucx"])
    daemon = nodes[0].status()["daemon"]
    assert (daemon["transport"], daemon["devices"]) == ("ucx", "lo"), "and nothing that others could reach"
    ranks = [nodes[rank].open(rank, 4, "first") for rank in range(4)]
    contents = [bytes([rank]) * (3_000_000 + rank) for rank in range(4)]
    for rope, content in zip(ranks, contents):
        rope.save(1, {"data": content})
    for rope in ranks:
        rope.wait(1, Level.COMMITTED)
        rope.close()
    nodes[2].kill(drop_memory=True)
    nodes.wait_members(3)
    nodes[2].start()
    nodes.wait_members(4)
    again = [nodes[rank].open(rank, 4, "second") for rank in range(4)]
    for rope, content in zip(again, contents):
        assert rope.latest().step == 1
        assert rope.load()["data"] == content
    for rope in again:
        rope.close()


def test_registrations_do_not_grow_with_saves(cluster):
    nodes = cluster(2)
    ranks = [nodes[rank].open(rank, 2, "run") for rank in range(2)]

    def registrations() -> list[int]:
        return [
            json.loads(ask("status", "--json", "--local", "--socket", node.socket).stdout)["transport"]["registrations"]
            for node in nodes.nodes
        ]

    before = registrations()
    assert before == [2, 2], "the arena, and the bytes that a lost peer is probed into"
    for step in range(1, 6):
        for rope in ranks:
            rope.save(step, {"data": bytes([step]) * 2_000_000})
        for rope in ranks:
            rope.wait(step, Level.COMMITTED)
    assert registrations() == before
    for rope in ranks:
        rope.close()
