# SPDX-License-Identifier: Apache-2.0
"""The demo's nodes. Each is a `ropeteam run -- torchrun …` on its own loopback address.

All processes of a node inherit a mark: the value of an environment variable that no other process on the
machine has. So all of them can be killed, whatever session they are in, and no other process is killed.
"""

from __future__ import annotations

import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime

MARK = "ROPETEAM_DEMO_NODE"
VIEW_LINE = re.compile(r"^(\S+) info view epoch (\d+) members (\d+) leader \S+", re.MULTILINE)
LOG_TIME = "%Y-%m-%dT%H:%M:%S.%f%z"  # as ropeteamd writes it
GRACE_S = 5.0  # between SIGTERM and SIGKILL at the end


class DemoError(Exception):
    """The demo failed. The text says what was seen."""


def free_port(address: str) -> int:
    with socket.socket() as probe:
        probe.bind((address, 0))
        return int(probe.getsockname()[1])


def wait_until(condition: Callable[[], bool], timeout_s: float, what: str, check: Callable[[], None]) -> None:
    """Waits for a condition. `check` raises if the condition can no longer become true."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        check()
        if time.monotonic() > deadline:
            raise DemoError(f"{what} did not happen within {timeout_s:.0f} s")
        time.sleep(0.02)


def marked(mark: str) -> list[int]:
    """The processes with this mark in their environment, without zombies."""
    wanted = f"{MARK}={mark}".encode()
    found = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            environment = pathlib.Path("/proc", entry, "environ").read_bytes()
        except OSError:
            continue  # gone meanwhile, or not ours to read
        if wanted in environment.split(b"\0"):
            found.append(int(entry))
    return found


def program(pid: int) -> str:
    """The name of the program that a process runs; "" when it is gone."""
    try:
        return pathlib.Path(f"/proc/{pid}/exe").readlink().name
    except OSError:
        return ""


def signal_all(pids: list[int], number: int) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            pass


@dataclass(frozen=True)
class ViewSeen:
    """A membership view in a daemon's log, with the line's time."""

    at: float
    epoch: int
    members: int


@dataclass
class Paths:
    """Where the programs and the demo's files are."""

    root: pathlib.Path
    out: pathlib.Path

    @property
    def build(self) -> pathlib.Path:
        """The build tree: the one that ROPETEAM_BUILD names, or the release build."""
        return pathlib.Path(os.environ.get("ROPETEAM_BUILD", self.root / "build" / "release")).resolve()

    @property
    def ropeteam(self) -> pathlib.Path:
        return self.build / "api" / "cli" / "ropeteam"

    @property
    def torchrun(self) -> pathlib.Path:
        return self.root / ".venv" / "bin" / "torchrun"

    @property
    def train(self) -> pathlib.Path:
        return self.root / "examples" / "train_gpt.py"

    def environment(self) -> dict[str, str]:
        environment = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("ROPETEAM_", "TORCHELASTIC_", "SLURM_", "SKYPILOT_", "AWS_"))
            and name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
        }
        tools = f"{self.build / 'node'}:{self.build / 'api' / 'cli'}:{self.root / '.venv' / 'bin'}"
        environment.update(
            PATH=f"{tools}:{environment.get('PATH', '')}",
            PYTHONPATH=str(self.root / "api" / "python"),
            ROPETEAM_LIBRARY=str(self.build / "api" / "client" / "libropeteam.so"),
            PYTHONUNBUFFERED="1",
            OMP_NUM_THREADS="1",
            GLOO_SOCKET_IFNAME="lo",
            # If the store is shared, torchrun keeps the first round's address on the survivors. A replacement
            # then waits forever for rank 0 to publish it again.
            TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1",
        )
        return environment


@dataclass
class Job:
    """What all nodes of the run have in common."""

    paths: Paths
    nodes: int
    training: list[str]  # arguments of the training program
    options: list[str]  # more options of `ropeteam run`
    memory: str = "256M"
    environment: dict[str, str] = field(default_factory=dict)  # further variables for every node
    first: int = 0  # the first node's number; names and addresses count from it
    token: str = field(default_factory=lambda: uuid.uuid4().hex[:12])

    def __post_init__(self) -> None:
        self.rendezvous = f"127.0.0.1:{free_port('127.0.0.1')}"
        self.coordinator = f"127.0.0.1:{free_port('127.0.0.1')}"
        # Short, because a unix socket's path has at most 107 bytes.
        self.sockets = pathlib.Path(tempfile.mkdtemp(prefix="ropeteam-demo-", dir="/tmp"))
        self.arenas = pathlib.Path(tempfile.mkdtemp(prefix="ropeteam-demo-", dir="/dev/shm"))

    def remove_files(self) -> None:
        shutil.rmtree(self.sockets, ignore_errors=True)
        shutil.rmtree(self.arenas, ignore_errors=True)


class Node:
    """One run of one node."""

    def __init__(self, job: Job, ordinal: int, run: int) -> None:
        self.job, self.ordinal, self.run = job, ordinal, run
        self.name = f"node-{job.first + ordinal}"
        self.address = f"127.0.0.{job.first + ordinal + 1}"
        self.mark = f"{job.token}-{ordinal}-{run}"
        self.socket = job.sockets / f"{ordinal}.sock"
        self.arena = job.arenas / str(ordinal)
        self.log = job.paths.out / f"{self.name}.{run}.log"
        self.daemon_log = job.paths.out / f"{self.name}.{run}.daemon.log"
        self.started_at = 0.0
        self._process: subprocess.Popen[str] | None = None
        self._reader: threading.Thread | None = None

    def command(self) -> list[str]:
        job, paths = self.job, self.job.paths
        rendezvous = {
            "is_host": int(self.ordinal == 0),
            # A launcher that is silent for 4 s is dropped, so that it does not delay the survivors' next
            # round.
            "keep_alive_interval": 1,
            "keep_alive_max_attempt": 4,
            "last_call_timeout": 1,
            "join_timeout": 120,
        }
        store = ["--job", f"demo-{job.token}", "--node", self.name, "--nodes", str(job.nodes)]
        store += ["--ordinal", str(self.ordinal), "--coordinator", job.coordinator, "--listen", self.address]
        store += ["--memory", job.memory, "--arena-path", str(self.arena), "--socket", str(self.socket)]
        store += ["--log-file", str(self.daemon_log)]
        launch = ["--nnodes", str(job.nodes), "--nproc-per-node", "1", "--max-restarts", "5"]
        launch += ["--rdzv-backend", "c10d", "--rdzv-endpoint", job.rendezvous, "--rdzv-id", job.token]
        launch += ["--rdzv-conf", ",".join(f"{key}={value}" for key, value in rendezvous.items())]
        launch += ["--local-addr", self.address, "--monitor-interval", "0.1"]
        run = [str(paths.ropeteam), "run", *store, *job.options, "--"]
        return [*run, str(paths.torchrun), *launch, str(paths.train), *job.training]

    def start(self) -> None:
        self.arena.mkdir(exist_ok=True)
        self.started_at = time.time()
        self._process = subprocess.Popen(
            self.command(),
            env={**self.job.paths.environment(), **self.job.environment, MARK: self.mark},
            cwd=self.job.paths.out,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        """Writes the node's output to its log, each line with its arrival time."""
        assert self._process is not None and self._process.stdout is not None
        with open(self.log, "w") as log:
            for line in self._process.stdout:
                log.write(f"{time.time():.3f} {line}")
                log.flush()

    def views(self) -> list[ViewSeen]:
        """The membership views that this node's daemon has logged so far."""
        try:
            text = self.daemon_log.read_text(errors="replace")
        except OSError:
            return []
        return [
            ViewSeen(datetime.strptime(at, LOG_TIME).timestamp(), int(epoch), int(members))
            for at, epoch, members in VIEW_LINE.findall(text)
        ]

    def returncode(self) -> int | None:
        assert self._process is not None
        return self._process.poll()

    def tail(self, lines: int = 15) -> str:
        try:
            return "".join(self.log.read_text(errors="replace").splitlines(keepends=True)[-lines:])
        except OSError:
            return ""

    def processes(self) -> list[int]:
        return marked(self.mark)

    def lose_memory(self) -> None:
        """Removes the arena. Call it after the processes were killed."""
        shutil.rmtree(self.arena)
        self._reap()

    def end(self) -> None:
        """Ends the node's remaining processes: by SIGTERM, and after GRACE_S by SIGKILL."""
        deadline = time.monotonic() + GRACE_S
        signal_all(self.processes(), signal.SIGTERM)
        while self.processes() and time.monotonic() < deadline:
            self._reap(0)
            time.sleep(0.05)
        while pids := self.processes():
            signal_all(pids, signal.SIGKILL)
            self._reap(0)
        self._reap()

    def _reap(self, timeout_s: float = GRACE_S) -> None:
        if self._process is None:
            return
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return
        if self._reader is not None:
            self._reader.join(GRACE_S)


def kill_whole(nodes: list[Node]) -> float:
    """Kills all processes of these nodes with SIGKILL and removes their memory. Returns the kill's time.

    Daemons are killed first: a daemon that sees `ropeteam run` die sends a leave message, and a lost host
    does not."""

    def processes() -> list[int]:
        return [pid for node in nodes for pid in node.processes()]

    pids = sorted(processes(), key=lambda pid: program(pid) != "ropeteamd")
    at = time.time()
    signal_all(pids, signal.SIGKILL)
    while pids := processes():  # those that were started meanwhile
        signal_all(pids, signal.SIGKILL)
    for node in nodes:
        node.lose_memory()
    return at
