# SPDX-License-Identifier: Apache-2.0
"""`ropeteam run --start-etcd`: three nodes run the etcd that decides on membership, and one of them is lost."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator

import pytest
from harness import ROPETEAM, WAIT_S, ask, environment, free_port, save_everywhere, saved, wait_until

import ropeteam

MEMBERS = 3


class Node:
    def __init__(self, job: Job, ordinal: int, host: str) -> None:
        self.job, self.ordinal, self.host = job, ordinal, host
        self.client = f"{host}:{free_port(host)}"
        self.socket = str(job.folder / f"{host}.sock")
        self.arena = job.folder / f"arena-{host}"
        self.data = pathlib.Path(f"/tmp/ropeteam-{os.geteuid()}/etcd-{job.name}-{ordinal}")
        self.log = job.folder / f"{host}.err"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self.arena.mkdir(exist_ok=True)
        hosts = ",".join(node.client for node in self.job.nodes)
        words = ["--start-etcd", hosts, "--job", self.job.name, "--ordinal", str(self.ordinal), "--nodes", str(MEMBERS)]
        words += ["--listen", self.host, "--socket", self.socket, "--memory", "64M", "--arena-path", str(self.arena)]
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(
                [str(ROPETEAM), "run", *words, "--log-file", f"{self.log}.daemon", "--", "sleep", "1000"],
                env=environment(),
                stdin=subprocess.DEVNULL,
                stderr=log,
                start_new_session=True,
            )

    def members(self) -> int:
        done = ask("status", "--json", "--timeout", "2", "--socket", self.socket)
        return len(json.loads(done.stdout).get("nodes", [])) if done.returncode == 0 else 0

    def etcd(self) -> list[dict]:
        """The members of etcd that this node's member knows."""
        done = subprocess.run(
            ["etcdctl", "--command-timeout=2s", "--endpoints", self.client, "member", "list", "--write-out=json"],
            env={**os.environ, "ETCDCTL_API": "3"},
            capture_output=True,
            text=True,
            timeout=WAIT_S,
            check=False,
        )
        return json.loads(done.stdout)["members"] if done.returncode == 0 else []


class Job:
    def __init__(self) -> None:
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="ropeteam-", dir="/dev/shm"))
        self.name = self.folder.name
        self.nodes: list[Node] = []
        self.nodes = [Node(self, ordinal, f"127.0.0.{81 + ordinal}") for ordinal in range(MEMBERS)]

    def wait(self) -> None:
        for node in self.nodes:
            wait_until(lambda: node.members() == MEMBERS, f"node {node.ordinal} sees all")


@pytest.fixture
def job() -> Iterator[Job]:
    if shutil.which("etcd") is None or shutil.which("etcdctl") is None:
        pytest.skip("no etcd and etcdctl (Debian: etcd-server, etcd-client)")
    made = Job()
    yield made
    for node in made.nodes:
        if node.process is not None:
            node.process.terminate()
            node.process.wait(WAIT_S)
        print(node.log.read_text() if node.log.exists() else "")
        shutil.rmtree(node.data, ignore_errors=True)
    shutil.rmtree(made.folder, ignore_errors=True)


def child(pid: int, name: str) -> int:
    """The process id of the child of this name; 0: there is none."""
    for each in pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            if pathlib.Path(f"/proc/{each}/comm").read_text().strip() == name:
                return int(each)
    return 0


def open_ranks(job) -> list[ropeteam.Client]:
    return [
        ropeteam.open(node.socket, rank=node.ordinal, world_size=MEMBERS, incarnation_token="run")
        for node in job.nodes
    ]


def test_the_jobs_own_etcd_outlives_a_node_and_takes_its_replacement_in(job):
    for node in job.nodes:
        node.start()
    job.wait()
    ranks = open_ranks(job)
    save_everywhere(ranks, 1)

    lost = job.nodes[0]
    ranks[0].close()
    lost.process.send_signal(signal.SIGKILL)
    lost.process.wait()
    shutil.rmtree(lost.arena)
    # Removes the lost node's etcd data, which a real loss would remove; the other nodes' data is in use.
    words = ["clean", "--job", job.name, "--arena-path", str(job.folder)]
    cleaned = wait_until(lambda: "removed  etcd" in (done := ask(*words)).stdout and done, "etcd's data to be removed")
    assert f"removed  etcd  {lost.data}" in cleaned.stdout
    assert f"in use, stays  etcd  {job.nodes[1].data}" in cleaned.stdout
    assert cleaned.returncode == 1
    assert not lost.data.exists() and job.nodes[1].data.exists()
    assert lost.data.parent.stat().st_mode & 0o777 == 0o700

    job.nodes[0] = Node(job, 0, "127.0.0.91")
    job.nodes[0].start()
    job.wait()
    for rope in ranks:
        rope.close()
    ranks = open_ranks(job)
    for rank, rope in enumerate(ranks):
        assert rope.load(1)["data"] == saved(1, rank)
    save_everywhere(ranks, 2)
    for rope in ranks:
        rope.close()
    wanted = {f"ropeteam-{node.ordinal}": [f"http://{node.client}"] for node in job.nodes}
    wait_until(
        lambda: {each.get("name"): each.get("clientURLs") for each in job.nodes[1].etcd()} == wanted,
        "etcd's new member has started in the place of the lost one",
    )

    # A launcher signals all processes of a node: its member of etcd is there again, while the command runs.
    keeper = child(job.nodes[1].process.pid, ROPETEAM.name)
    member = child(keeper, "etcd")
    for pid in (keeper, member):
        os.kill(pid, signal.SIGTERM)
    wait_until(lambda: child(keeper, "etcd") not in (0, member), "etcd to be started again")
    job.wait()

    for node in job.nodes:  # a clean end removes all data
        node.process.terminate()
    for node in job.nodes:
        node.process.wait(WAIT_S)
        assert not node.data.exists()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--start-etcd", "a,b"], "--start-etcd names 2 hosts"),
        (["--start-etcd", "a", "--membership", "etcd://b:1/p"], "an etcd that is there is left alone"),
        (["--start-etcd", "10.0.0.1", "--listen", "10.0.0.1"], "say --insecure"),
        (["--start-etcd", "auto", "--nodes", "3", "--ordinal", "0", "--listen", "127.0.0.1"], "the first three of 3 nodes: name them"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_starts(words, says):
    done = ask("run", *words, "--", "true")
    assert done.returncode == 2, done.stderr
    assert says in done.stderr
