# SPDX-License-Identifier: Apache-2.0
"""The coordinator is given by name, on machines without a name server: /etc/hosts is enough, and a name that is not
resolved is reported as such."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
from harness import ROPETEAMD, WAIT_S, environment, free_port

# Runs in mounts and a network of its own until its standard input ends. The name server of resolv.conf takes questions
# and answers none if "silent" is given; otherwise nothing listens at its address.
SPACE = """
import pathlib, socket, subprocess, sys
folder, server = pathlib.Path(sys.argv[1]), socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
(folder / "hosts").write_text("127.0.0.1 localhost head-node\\n")
(folder / "resolv.conf").write_text("nameserver 127.0.0.53\\n")
for name in ("hosts", "resolv.conf"):
    subprocess.run(["mount", "--bind", folder / name, f"/etc/{name}"], check=True)
if sys.argv[2] == "silent":
    server.bind(("127.0.0.53", 53))
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def space(tmp_path) -> Iterator[Callable[[str], list[str]]]:
    """space("silent" or "absent") makes such a space; returns the command that runs another command in it."""
    if os.geteuid() != 0 or not all(map(shutil.which, ("unshare", "nsenter", "ip"))):
        pytest.skip("mounts and a network of its own take root, unshare (Debian: util-linux) and ip (iproute2)")
    holders: list[subprocess.Popen[str]] = []

    def make(server: str) -> list[str]:
        holder = subprocess.Popen(
            ["unshare", "-mn", sys.executable, "-c", SPACE, str(tmp_path), server],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        holders.append(holder)
        if holder.stdout.readline() != "ready\n":
            pytest.skip("no mount and network namespaces can be made here")
        return ["nsenter", "-t", str(holder.pid), "-m", "-n"]

    yield make
    for holder in holders:
        holder.communicate()


def test_a_name_of_etc_hosts_needs_no_name_server(cluster, space):
    nodes = cluster(2, prefix=space("silent"), coordinator=f"head-node:{free_port()}")
    assert "registered with head-node:" in nodes[1].log_text()


@pytest.mark.parametrize(
    ("server", "words"),
    [
        ("absent", "the name nowhere is not resolved: Temporary failure in name resolution"),
        ("silent", "it does not answer, or the name nowhere is not resolved"),
    ],
)
def test_a_name_that_is_not_resolved_is_named(space, tmp_path, server, words):
    command = [str(ROPETEAMD), "--job", "j", "--nodes", "2", "--ordinal", "1", "--coordinator", "nowhere:7000"]
    command += ["--insecure", "--memory", "16M", "--arena-path", "/dev/shm", "--node", tmp_path.name]
    command += ["--socket", "/tmp/" + tmp_path.name, "--dead-after-ms", "400", "--join-timeout", "1"]
    done = subprocess.run(
        [*space(server), "sh", "-c", 'mount -t tmpfs none /dev/shm && exec "$@"', "sh", *command],
        env=environment(), capture_output=True, text=True, timeout=WAIT_S,
    )  # fmt: skip
    assert done.returncode == 4, done.stderr
    assert f"membership coordinator nowhere:7000 not reached yet, reason {words}" in done.stderr
    assert "no coordinator has answered at nowhere:7000 for " in done.stderr.splitlines()[-1]
    assert done.stderr.splitlines()[-1].endswith(words)
