# SPDX-License-Identifier: Apache-2.0
"""Several jobs on one machine: which daemon a command asks, and what `ropeteam clean` removes of ended jobs."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator

import pytest
from harness import ROPETEAM, WAIT_S, environment, on_a_terminal, wait_until


class Machine:
    """Arenas and sockets of the test's own, and the jobs that use them."""

    def __init__(self) -> None:
        self.arenas = pathlib.Path(tempfile.mkdtemp(prefix="ropeteam-", dir="/dev/shm"))
        self.runtime = pathlib.Path(tempfile.mkdtemp(prefix="ropeteam-", dir="/tmp"))
        self.sockets = self.runtime / "ropeteam"
        self.jobs: list[subprocess.Popen[str]] = []

    def environment(self) -> dict[str, str]:
        return environment(
            XDG_RUNTIME_DIR=str(self.runtime), ROPETEAM_ARENA_PATH=str(self.arenas), ROPETEAM_MEMORY="16M",
            ROPETEAM_LOG_FILE=str(self.runtime / "log"),
        )  # fmt: skip

    def ask(self, *command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(ROPETEAM), *command], env=self.environment(), capture_output=True, text=True, timeout=WAIT_S
        )

    def ended(self, job: str) -> pathlib.Path:
        """Runs a job to its end; the arena that it has left."""
        done = self.ask("run", "--job", job, "--", "true")
        assert done.returncode == 0, done.stderr
        return self.arena(job)

    def live(self, job: str) -> subprocess.Popen[str]:
        started = subprocess.Popen(
            [str(ROPETEAM), "run", "--job", job, "--quiet", "--", "sh", "-c", "echo up; cat"],
            env=self.environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.jobs.append(started)
        assert started.stdout.readline() == "up\n"
        return started

    def arena(self, job: str) -> pathlib.Path:
        return self.arenas / f"ropeteam-{job}-node-0.arena"

    def daemon_pid(self, job: str) -> int:
        answer = self.ask("status", "--local", "--json", "--job", job)
        return int(json.loads(answer.stdout)["daemon"]["pid"]) if answer.returncode == 0 else 0

    def end(self) -> None:
        for job in self.jobs:
            job.communicate()  # closes stdin, which ends the command
        shutil.rmtree(self.arenas)
        shutil.rmtree(self.runtime)


@pytest.fixture
def machine() -> Iterator[Machine]:
    if not ROPETEAM.exists():
        pytest.skip(f"{ROPETEAM} is not built")
    made = Machine()
    yield made
    made.end()


def test_clean_frees_what_nobody_uses_and_nothing_else(machine):
    ended = machine.ended("ended")
    live = machine.live("live")
    listed = machine.ask("clean")
    assert listed.returncode == 0, listed.stderr
    assert f"would remove  16.0 MiB  job ended node node-0  {ended}" in listed.stdout
    assert f"in use, stays  16.0 MiB  job live node node-0  {machine.arena('live')}" in listed.stdout
    assert "ropeteam clean --all-ended" in listed.stdout
    assert ended.exists()
    # Its daemon is killed, and `ropeteam run` is stopped, so that it cannot start the daemon again.
    live.send_signal(signal.SIGSTOP)
    try:
        pid = machine.daemon_pid("live")
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z", "its end")
        cleaned = machine.ask("clean", "--all-ended")
    finally:
        live.send_signal(signal.SIGCONT)
    assert cleaned.returncode == 0, cleaned.stderr
    assert f"removed  16.0 MiB  job ended node node-0  {ended}\n" in cleaned.stdout
    assert "16.0 MiB of memory freed" in cleaned.stdout
    assert not ended.exists() and machine.arena("live").exists()
    wait_until(lambda: machine.daemon_pid("live") not in (0, pid), "the daemon to be back")


def test_clean_of_one_job_goes_by_the_job_that_the_arena_names(machine):
    """By its name, the file of job a-b on node-0 could belong to job a on node b-node-0."""
    wanted, other = machine.ended("a"), machine.ended("a-b")
    assert f"would remove  16.0 MiB  job a node node-0  {wanted}" in machine.ask("clean", "--job", "a", "--dry-run").stdout
    assert wanted.exists()
    assert machine.ask("clean", "--job", "a").returncode == 0
    assert not wanted.exists() and other.exists()
    machine.live("c")
    refused = machine.ask("clean", "--job", "c")
    assert refused.returncode == 1 and "in use, stays" in refused.stdout
    assert machine.ask("clean", "--job", "a", "--all-ended").returncode == 2


def test_clean_removes_sockets_on_which_nobody_listens(machine):
    machine.live("live")
    dead, young = machine.sockets / "dead-node-0.sock", machine.sockets / "young-node-0.sock"
    for path in (dead, young):
        with socket.socket(socket.AF_UNIX) as left:
            left.bind(str(path))
    os.utime(dead, (0, 0))
    cleaned = machine.ask("clean", "--all-ended")
    assert f"removed  socket  {dead}\n" in cleaned.stdout
    assert {path.name for path in machine.sockets.glob("*.sock")} == {"live-node-0.sock", young.name}, (
        "one that was made just now may be about to listen"
    )


def test_a_start_that_finds_no_memory_says_what_others_have_left(machine):
    machine.ended("ended")
    refused = machine.ask("run", "--job", "next", "--memory", "1000000G", "--", "true")
    assert refused.returncode == 1
    assert "unused arenas hold 16.0 MiB" in refused.stderr and "ropeteam clean --all-ended" in refused.stderr


def test_job_and_node_pick_the_daemon(machine):
    machine.live("one")
    machine.live("two")
    several = machine.ask("status")
    assert several.returncode == 1
    for job in ("one", "two"):
        assert f"--job {job} --node node-0 " in several.stderr
        assert f"job {job} " in machine.ask("status", "--job", job).stdout
        assert machine.ask("ls", "--job", job, "--node", "node-0").returncode == 0
    missing = machine.ask("status", "--job", "three")
    assert missing.returncode == 1 and "of job three was found" in missing.stderr
    stopped = machine.daemon_pid("two")
    os.kill(stopped, signal.SIGSTOP)
    silent = machine.ask("status", "--job", "two", "--timeout", "0.5")
    os.kill(stopped, signal.SIGCONT)
    assert silent.returncode == 1 and "these daemons run but did not answer in time" in silent.stderr
    assert f"--socket {machine.sockets}/two-node-0.sock" in silent.stderr
    # The socket that a killed daemon left does not count as a daemon.
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(machine.sockets / "dead-node-0.sock"))
    assert "2 daemons are here" in machine.ask("status").stderr
    # export has no --node, and its --job means a folder.
    told = machine.ask("export", "latest", str(machine.runtime)).stderr
    assert "2 daemons are here" in told and "--node" not in told and "of job one, node node-0" in told, told


def test_watching_counts_fails_without_a_daemon_and_redraws_in_place(machine):
    for options in (("--watch", "0.1", "--count", "1"), ("--count", "1")):
        assert machine.ask("status", *options).returncode == 1
    machine.live("one")
    counted = machine.ask("status", "--watch", "0.1", "--count", "2")
    assert counted.returncode == 0 and counted.stdout.count("job one ") == 2
    code, screen = on_a_terminal(
        [str(ROPETEAM), "status", "--watch", "0.1", "--count", "3"], "stdout", machine.environment()
    )
    assert code == 0
    assert screen.count("\x1b[H") == 3 and screen.count("\x1b[J") == 3 and screen.count("\x1b[2J") == 1
