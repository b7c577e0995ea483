# SPDX-License-Identifier: Apache-2.0
"""Everything on all nodes gets SIGTERM, as from scancel, systemd's KillMode or the end of a pod: the ranks save once more
in their handlers, and the daemons stay until COMMAND has ended."""

from __future__ import annotations

import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap

import pytest
from harness import ROPETEAM, WAIT_S, environment, free_port, wait_until

# The signal also reaches it a second time, from `ropeteam run`.
RANK = textwrap.dedent("""
    import signal, sys
    import ropeteam
    rank = int(sys.argv[1])
    rope = ropeteam.open(rank=rank, world_size=2, timeout=60)
    signal.signal(signal.SIGTERM, lambda *_: None)
    rope.save(1, {"data": bytes([rank]) * 3_000_000}, wait=ropeteam.Level.COMMITTED)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    print("trains", flush=True)
    signal.sigwait([signal.SIGTERM])
    rope.save(2, {"data": bytes([rank]) * 3_000_000}, wait=ropeteam.Level.COMMITTED)
    print("saved", flush=True)
    # The other rank asks its own daemon for this step, which takes this daemon's report.
    sys.stdin.readline()
    sys.exit(0)
""")


class Node:
    def __init__(self, folder: pathlib.Path, ordinal: int, coordinator: str, options: list[str]) -> None:
        self.log = folder / f"{ordinal}.log"
        arena = folder / str(ordinal)
        arena.mkdir()
        words = ["--job", folder.name, "--nodes", "2", "--ordinal", str(ordinal), "--coordinator", coordinator]
        words += ["--listen", f"127.0.0.{ordinal + 1}", "--memory", "64M", "--arena-path", str(arena), "--required"]
        words += ["--socket", str(folder / f"{ordinal}.sock"), "--log-file", str(self.log), "--quiet", *options]
        self.run = subprocess.Popen(
            [str(ROPETEAM), "run", *words, "--", sys.executable, "-u", "-c", RANK, str(ordinal)],
            env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def processes(self) -> dict[str, int]:
        """`ropeteam run` and its children, by name."""
        children = pathlib.Path(f"/proc/{self.run.pid}/task/{self.run.pid}/children").read_text().split()
        found = {pathlib.Path(f"/proc/{pid}/comm").read_text().strip(): int(pid) for pid in children}
        assert len(found) == 2 and "ropeteamd" in found, found
        return {**found, "run": self.run.pid}


@pytest.mark.parametrize("options", [[], ["--drain-on-term", "--notice-seconds", "2"]], ids=["stay", "drain"])
def test_a_sigterm_to_everything_lets_the_ranks_save_once_more(options):
    folder = pathlib.Path(tempfile.mkdtemp(prefix="ropeteam-", dir="/dev/shm"))
    coordinator = f"127.0.0.1:{free_port()}"
    nodes = [Node(folder, ordinal, coordinator, options) for ordinal in range(2)]
    try:
        for node in nodes:
            assert node.run.stdout.readline() == "trains\n", node.run.communicate()[1]
        everything = [node.processes() for node in nodes]
        daemons = [processes.pop("ropeteamd") for processes in everything]
        for pid in daemons:
            os.kill(pid, signal.SIGTERM)
        for node in nodes:  # the signals have arrived before any rank begins to save
            wait_until(lambda: "SIGTERM of process" in node.log.read_text(), "the signal")
        for processes in everything:
            for pid in processes.values():
                os.kill(pid, signal.SIGTERM)
        for node in nodes:
            assert node.run.stdout.readline() == "saved\n", node.run.communicate()[1]
            assert f"ignoring the SIGTERM of process {os.getpid()}" in node.log.read_text()
            assert "draining" not in node.log.read_text()
        for node in nodes:
            told = node.run.communicate(timeout=WAIT_S)[1]
            assert node.run.returncode == 0 and "starting it again" not in told, told
        drained = ["draining within 2 s: SIGTERM" in node.log.read_text() for node in nodes]
        assert drained == [bool(options)] * 2
        assert not any(pathlib.Path(f"/proc/{pid}").exists() for pid in daemons)
    finally:
        for node in nodes:
            node.run.kill()
            node.run.communicate()
        shutil.rmtree(folder, ignore_errors=True)
