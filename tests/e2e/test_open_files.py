# SPDX-License-Identifier: Apache-2.0
"""Connections of strangers, and a moment without descriptors, keep nobody from a daemon's ports."""

from __future__ import annotations

import contextlib
import pathlib
import resource
import socket
import time
import urllib.request
from collections.abc import Iterator

from harness import WAIT_S, Cluster, Daemon, ask, free_port, payload, wait_until

from ropeteam import Level

LIMIT = 256  # of open files
HELD = 300  # connections
HELD_S = 1.0
SCRAPE_TIMEOUT_S = 10.0  # Prometheus' own
LIMITED = ["sh", "-c", f'ulimit -n {LIMIT}; exec "$@"', "sh"]


@contextlib.contextmanager
def held(address: tuple[str, int], count: int = HELD) -> Iterator[list[socket.socket]]:
    """Connections that send nothing."""
    with contextlib.ExitStack() as stack:
        made = []
        for _ in range(count):
            made.append(stack.enter_context(socket.create_connection(address, timeout=WAIT_S)))
        yield made


def scrape(address: tuple[str, int]) -> str:
    url = f"http://{address[0]}:{address[1]}/metrics"
    with urllib.request.urlopen(url, timeout=SCRAPE_TIMEOUT_S) as answer:
        return answer.read().decode()


def address_of(text: str) -> tuple[str, int]:
    host, port = text.rsplit(":", 1)
    return host, int(port)


def commit_for(rope, seconds: float, step: int) -> int:
    """Commits steps for so long; returns the number of the next one."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        rope.save(step, {"data": payload(step, 100_000)}, wait=Level.COMMITTED)
        step += 1
    return step


def joins_again(nodes: Cluster) -> None:
    """Node 1 dies and returns: it connects to the coordinator, and both control planes to each other."""
    nodes[1].kill()
    wait_until(lambda: nodes[0].members() == 1, "node 1 to be gone")
    nodes[1].start()
    nodes.wait_members(2)


def test_strangers_at_each_port_keep_nobody_away(cluster):
    metrics = f"127.0.0.1:{free_port()}"
    nodes = cluster(2, node_options=[["--metrics", metrics], []], prefix=LIMITED)
    ports = {
        "coordinator": address_of(nodes.coordinator),
        "control": address_of(nodes[0].status()["daemon"]["control"]),
        "metrics": address_of(metrics),
    }
    step = 1
    for name, port in ports.items():
        with nodes[0].open(0, 1, "run") as rope, held(port):
            step = commit_for(rope, HELD_S, step)
            assert "ropeteam_members 2" in scrape(ports["metrics"]), name
            joins_again(nodes)
            step = commit_for(rope, 0.01, step)
        log = nodes[0].log_text()
        bound = "16 connections of 127.0.0.1" if name == "metrics" else f"{LIMIT // 4} connections in all"
        assert f"port {port[0]}:{port[1]}: {bound} have not authenticated, the oldest is closed" in log, name
    assert f"open files at most {LIMIT}" in log
    assert "no descriptor is left" not in log, "strangers of one port leave enough"


def test_a_moment_without_descriptors_passes(cluster):
    metrics = f"127.0.0.1:{free_port()}"
    nodes = cluster(2, node_options=[["--metrics", metrics], []])
    pid = nodes[0].process.pid
    ports = [address_of(each) for each in (nodes.coordinator, nodes[0].status()["daemon"]["control"], metrics)]
    views = nodes[1].log_text().count("view epoch")
    with nodes[0].open(0, 1, "run") as rope:
        step = commit_for(rope, 0.01, 1)
        highest = max(int(entry.name) for entry in pathlib.Path(f"/proc/{pid}/fd").iterdir())
        before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (highest + 1, before[1]))
        said = f"no descriptor is left for a connection (accept: Too many open files (24); RLIMIT_NOFILE {highest + 1})"
        with held(ports[0]), held(ports[1]), held(ports[2]):
            step = commit_for(rope, HELD_S, step)
            for host, port in ports:
                wait_until(lambda: f"port {host}:{port}: {said}" in nodes[0].log_text(), f"a line about {port}")
        resource.prlimit(pid, resource.RLIMIT_NOFILE, before)
        assert nodes[1].log_text().count("view epoch") == views, "nobody left"
        joins_again(nodes)
        assert "ropeteam_members 2" in wait_until(lambda: scrape(ports[2]), "a scrape")
        commit_for(rope, 0.01, step)


def test_slow_clients_do_not_delay_a_scrape(cluster):
    address = ("127.0.0.1", free_port())
    nodes = cluster(1, options=["--metrics", f"{address[0]}:{address[1]}"])
    with held(address, 100) as slow:
        for client in slow[-10:]:  # those that are not closed yet
            client.sendall(b"G")
        for byte in b"ET /met":
            begun = time.monotonic()
            assert "ropeteam_members 1" in scrape(address)
            assert time.monotonic() - begun < SCRAPE_TIMEOUT_S / 2
            for client in slow[-10:]:
                with contextlib.suppress(OSError):  # its time may be over
                    client.sendall(bytes([byte]))
    assert nodes[0].process.poll() is None


def test_one_node_alone_opens_no_port(cluster):
    nodes = cluster(1)
    node: Daemon = nodes[0]
    assert len(node.listening()) == 3, "with --coordinator others may join"
    node.kill()
    nodes.coordinator = ""
    node.start()
    with node.open(0, 1, "run") as rope:
        rope.save(1, {"data": b"x" * 5_000_000}, wait=Level.COMMITTED)
        assert rope.load(1)["data"] == b"x" * 5_000_000
        assert node.listening() == []
    shown = ask("status", "--socket", node.socket)
    assert shown.returncode == 0 and "security control no port   data no port" in shown.stdout, shown
    told = ask("rejoin", "--coordinator", "127.0.0.1:1", "--socket", node.socket)
    assert told.returncode != 0 and "give it --coordinator 127.0.0.1:1 and restart it" in told.stderr
    assert node.stop() == 0
    node.options = ["--metrics", f"127.0.0.1:{free_port()}"]
    node.start()
    assert [f"{host}:{port}" for host, port in node.listening()] == node.options[1:]
    with node.open(0, 1, "run") as rope:
        assert rope.load(1)["data"] == b"x" * 5_000_000
