# SPDX-License-Identifier: Apache-2.0
"""The coordinator's host is lost, and another host at another address replaces it. No other node is restarted."""

from __future__ import annotations

import signal

from harness import Daemon, ask, free_port, open_again, save_everywhere, saved, undisturbed, wait_until

from ropeteam import Level

ELSEWHERE = "127.0.0.9"


def goes_on(nodes, ranks) -> None:
    """All ranks, including the new rank 0, read what was committed, and a new step commits."""
    ranks = open_again(nodes.nodes, ranks)
    for rank, rope in enumerate(ranks):
        assert rope.latest().step == 1
        assert rope.load(1)["data"] == saved(1, rank)
    save_everywhere(ranks, 2)
    for rope in ranks:
        rope.close()


def membership(node: Daemon) -> dict:
    return node.local_status()["daemon"]["membership"]


def test_node_0_is_lost_with_its_memory_and_replaced_where_nobody_expects_it(cluster):
    nodes = cluster(3)
    processes = [node.process for node in nodes.nodes[1:]]
    ranks = [nodes[rank].open(rank, 3, "run") for rank in range(3)]
    save_everywhere(ranks, 1)
    ranks[0].close()
    nodes[0].kill(drop_memory=True)
    wait_until(lambda: not membership(nodes[1])["registered"], "the loss")

    # A surviving node reports what is wrong, what waits for it, and what to do.
    wait_until(lambda: [each["node"] for each in membership(nodes[1])["missing"]] == ["node-0"], "node-0 missing")
    told = ask("status", "--socket", nodes[1].socket)
    assert told.returncode == 1
    for words in (
        f"coordinator {nodes.coordinator}   NO ANSWER for",
        "missing node-0 for",
        "so new saves stay local, nothing is committed, and no node can join; the leader is lost, too",
        "ropeteam rejoin --coordinator HOST:PORT",
    ):
        assert words in told.stdout, told.stdout

    nodes.coordinator = f"{ELSEWHERE}:{free_port(ELSEWHERE)}"
    nodes[0].moved_to = ELSEWHERE
    nodes[0].start()
    told = ask("rejoin", "--coordinator", nodes.coordinator, "--socket", nodes[1].socket)
    assert told.returncode == 0, told.stderr
    assert f"node-1 is registered with the coordinator at {nodes.coordinator}" in told.stdout
    nodes.wait_members(3)  # node 2 learns the address from node 1
    goes_on(nodes, ranks)
    undisturbed(nodes.nodes[1:], processes)
    assert "according to a member of the last view" in nodes[2].log_text()
    report = nodes[2].status()["daemon"]["membership"]
    assert (report["registered"], report["coordinator"], report["missing"]) == (True, nodes.coordinator, [])

    # A node whose coordinator answers is not moved without --force.
    told = ask("rejoin", "--coordinator", "127.0.0.8:1", "--socket", nodes[1].socket)
    assert told.returncode == 1
    assert "which answers" in told.stderr
    assert "--force" in told.stderr
    for wrong in ("5", "--json"):
        told = ask("rejoin", "--coordinator", nodes.coordinator, wrong, "--socket", nodes[1].socket)
        assert told.returncode == 2 and f"{wrong} was not expected" in told.stderr


def test_the_list_leads_to_the_replacement_and_the_old_host_to_the_job(cluster):
    first, second = (f"{host}:{free_port(host)}" for host in ("127.0.0.1", ELSEWHERE))
    nodes = cluster(3, coordinator=f"{first},{second}")
    processes = [node.process for node in nodes.nodes[1:]]
    ranks = [nodes[rank].open(rank, 3, "run") for rank in range(3)]
    save_everywhere(ranks, 1)
    ranks[0].close()
    nodes[0].kill(drop_memory=True)
    nodes[0].moved_to = ELSEWHERE
    nodes[0].options = ["--coordinator-listen", second]
    nodes[0].start()
    nodes.wait_members(3)
    goes_on(nodes, ranks)
    undisturbed(nodes.nodes[1:], processes)

    # The old host returns: it first asks the addresses of its list.
    old = Daemon(nodes, 3, ["--embed-coordinator", "--coordinator-listen", first])
    nodes.nodes.append(old)
    old.moved_to = "127.0.0.1"
    old.start()
    nodes.wait_members(4)
    assert f"registered with {second}" in old.log_text()
    assert first not in [f"{host}:{port}" for host, port in old.listening()]


def test_a_coordinators_host_that_was_stopped_follows_its_members(cluster):
    nodes = cluster(3)
    nodes[0].process.send_signal(signal.SIGSTOP)
    try:
        wait_until(lambda: not membership(nodes[1])["registered"], "the loss")
        old, nodes.coordinator = nodes.coordinator, f"{ELSEWHERE}:{free_port(ELSEWHERE)}"
        spare = Daemon(nodes, 3, ["--embed-coordinator"])
        nodes.nodes.append(spare)
        spare.start()
        for node in nodes.nodes[1:3]:
            told = ask("rejoin", "--coordinator", nodes.coordinator, "--socket", node.socket)
            assert told.returncode == 0, told.stderr
        wait_until(lambda: all(node.members() == 3 for node in nodes.nodes[1:]), "a view of the three others")
    finally:
        nodes[0].process.send_signal(signal.SIGCONT)
    nodes.wait_members(4)
    assert old not in [f"{host}:{port}" for host, port in nodes[0].listening()]
    assert f"membership coordinator at {old} ends" in nodes[0].log_text()
    with nodes[0].open(0, 1, "after") as rope:
        rope.save(1, {"data": b"goes on"}, wait=Level.COMMITTED)
