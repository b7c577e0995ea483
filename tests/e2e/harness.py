# SPDX-License-Identifier: Apache-2.0
"""Real processes for the end-to-end tests: daemons on loopback addresses, and the build's programs.

ROPETEAM_BUILD is the build tree under test (default: build/release), ROPETEAM_LIBRARY the library that
Python loads.
"""

from __future__ import annotations

import contextlib
import importlib.util
import ipaddress
import json
import os
import pathlib
import pty
import random
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import termios
import textwrap
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUILD = pathlib.Path(os.environ.get("ROPETEAM_BUILD", ROOT / "build" / "release"))
ROPETEAMD = BUILD / "node" / "ropeteamd"
ROPETEAM = BUILD / "api" / "cli" / "ropeteam"
LIBRARY = pathlib.Path(os.environ.get("ROPETEAM_LIBRARY", BUILD / "api" / "client" / "libropeteam.so"))

sys.path.insert(0, str(ROOT / "api" / "python"))

# How long a condition may take. It is generous, since sanitizers and busy machines are slow; a wait ends as soon as its
# condition is true.
WAIT_S = 60.0
VIEW = re.compile(r"view epoch (\d+) members (\d+) leader (\S+)")


def wait_until(condition: Callable[[], Any], what: str, timeout_s: float = WAIT_S) -> Any:
    """Returns the condition's first true value; fails the test if the time is over."""
    deadline = time.monotonic() + timeout_s
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > deadline:
            pytest.fail(f"{what}: not within {timeout_s:.0f} s")
        time.sleep(0.01)


# These are below the ports that the kernel gives to connections.
PORTS = range(10_000, 32_000)


def free_port(address: str = "127.0.0.1") -> int:
    """A port for a server that is started later: it is free now, and the kernel does not assign it by itself."""
    for port in random.SystemRandom().sample(PORTS, len(PORTS)):  # tests seed the default generator
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((address, port))
            return port
    pytest.fail(f"no port of {PORTS} is free at {address}")


def e2e_fixture(name: str) -> Any:
    """A fixture of this folder's conftest.py, for tests of another folder. It is loaded under another name,
    since that folder may have a `conftest` too."""
    if "e2e_conftest" not in sys.modules:
        path = pathlib.Path(__file__).with_name("conftest.py")
        spec = importlib.util.spec_from_file_location("e2e_conftest", path)
        assert spec is not None and spec.loader is not None
        sys.modules["e2e_conftest"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules["e2e_conftest"])
    return getattr(sys.modules["e2e_conftest"], name)


def clean_environment(**more: str) -> dict[str, str]:
    """This process's environment, without variables of a launcher that runs the tests, and of our package."""
    launchers = ("ROPETEAM_", "TORCHELASTIC_", "SLURM_", "SKYPILOT_", "PET_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(launchers)}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "NNODES", "NODE_RANK"):
        kept.pop(name, None)
    for name in ("PYTHONPATH", "ROPETEAMD", "GROUP_RANK", "GROUP_WORLD_SIZE"):
        kept.pop(name, None)
    return {**kept, **more}


def environment(**more: str) -> dict[str, str]:
    """clean_environment() with the paths of the build's programs, package and library."""
    kept = clean_environment()
    kept["PATH"] = (
        f"{ROPETEAMD.parent}:{ROPETEAM.parent}:{pathlib.Path(sys.executable).parent}:{kept['PATH']}"
    )
    kept["PYTHONPATH"] = str(ROOT / "api" / "python")
    kept["ROPETEAM_LIBRARY"] = str(LIBRARY)
    return {**kept, **more}


def forked_ranks(count: int) -> list[str]:
    """The command before a script and its arguments, for tests that do not need torchrun to start the ranks."""
    launcher = pathlib.Path(__file__).with_name("fork_ranks.py")
    return [sys.executable, str(launcher), str(count), str(free_port())]


def ask(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(ROPETEAM), *command],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )


def on_a_terminal(command: list[str], stream: str, env: dict[str, str]) -> tuple[int, str]:
    """Runs a command whose `stream` ("stdout" or "stderr") is a terminal: its exit code, and what the terminal
    shows."""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 120))
    try:
        done = subprocess.run(command, env=env, stdin=subprocess.DEVNULL, timeout=WAIT_S, **{stream: theirs})
        shown = b""
        while select.select([ours], [], [], 0)[0]:
            shown += os.read(ours, 65536)
    finally:
        os.close(ours)
        os.close(theirs)
    return done.returncode, shown.decode()


def payload(seed: int, size: int) -> bytes:
    return random.Random(seed).randbytes(size)


def devices(*arguments: str) -> subprocess.CompletedProcess[str]:
    return ask("devices", *arguments)


def fabrics() -> dict[str, dict]:
    return {each["transport"]: each for each in json.loads(devices("--json").stdout)["transports"]}


def usable(transport: str) -> None:
    """Skips the test if this build or machine does not have the transport."""
    missing = fabrics()[transport]["missing"]
    if missing:
        pytest.skip(f"{transport}: {missing}")


class ScriptedRank:
    """A rank that is a Python script in a process of its own. The script prints lines, and waits for go_on() in
    sys.stdin.readline(). The process is killed at the end of the block."""

    def __init__(self, script: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-u", "-c", textwrap.dedent(script)],
            env=environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def says(self) -> str:
        return self.process.stdout.readline().strip()

    def go_on(self) -> None:
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def __enter__(self) -> ScriptedRank:
        return self

    def __exit__(self, *failure: object) -> None:
        self.process.kill()
        self.process.communicate()


@dataclass
class Daemon:
    """One node's ropeteamd, which may be killed and started again."""

    cluster: Cluster
    ordinal: int
    options: list[str]
    process: subprocess.Popen[bytes] | None = None
    starts: int = 0
    members_seen: list[int] = field(default_factory=list)
    moved_to: str = ""  # if set: the address that it listens on
    prefix: list[str] = field(default_factory=list)  # a command that executes it

    @property
    def name(self) -> str:
        return f"node-{self.ordinal}"

    @property
    def address(self) -> str:
        return self.moved_to or f"127.0.0.{self.ordinal + 1}"

    @property
    def socket(self) -> str:
        return str(self.cluster.directory / f"{self.ordinal}.sock")

    @property
    def arena(self) -> pathlib.Path:
        """The directory that holds the arena's file."""
        return self.cluster.arenas / str(self.ordinal)

    @property
    def log(self) -> pathlib.Path:
        return self.cluster.logs / f"{self.name}.{self.starts}.log"

    def log_text(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def command(self, ready_fd: int) -> list[str]:
        cluster = self.cluster
        command = [str(ROPETEAMD), "--job", cluster.job, "--node", self.name, "--ordinal", str(self.ordinal)]
        command += ["--nodes", str(cluster.size), "--listen", self.address]
        if cluster.coordinator and "--membership" not in self.options:
            command += ["--coordinator", cluster.coordinator]
        command += ["--socket", self.socket, "--arena-path", str(self.arena), "--memory", cluster.memory]
        # Scrubbing is off by default: tests that corrupt bytes expect a certain component to find them.
        if "--scrub-rate" not in self.options:
            command += ["--scrub-rate", "0"]
        return [*command, "--ready-fd", str(ready_fd), *self.options]

    def start(self, wait: bool = True) -> Daemon:
        """Starts it; with `wait`, waits until it reports that it is ready."""
        assert self.process is None, f"{self.name} runs already"
        self.starts += 1
        self.arena.mkdir(exist_ok=True)
        reader, writer = os.pipe()
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(
                [*self.prefix, *self.command(writer)],
                env=environment(),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=log,
                pass_fds=[writer],
                start_new_session=True,
            )
        os.close(writer)
        try:
            if wait and not (select.select([reader], [], [], WAIT_S)[0] and os.read(reader, 4096)):
                pytest.fail(f"{self.name} did not become ready; its log:\n{self.log_text()}")
        finally:
            os.close(reader)
        return self

    def kill(self, drop_memory: bool = False) -> None:
        """SIGKILL; drop_memory also removes its arena, as if the machine was lost."""
        self._end(signal.SIGKILL)
        if drop_memory:
            shutil.rmtree(self.arena)

    def stop(self) -> int:
        """SIGTERM; returns the exit status, which is 0 for a clean end."""
        return self._end(signal.SIGTERM)

    def _end(self, number: int) -> int:
        assert self.process is not None, f"{self.name} does not run"
        self.process.send_signal(number)
        try:
            status = self.process.wait(WAIT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            pytest.fail(f"{self.name} did not end; its log:\n{self.log_text()}")
        self.process = None
        return status

    def listening(self) -> list[tuple[str, int]]:
        """The addresses and TCP ports that its process listens on. gRPC's are IPv4 addresses in IPv6 sockets."""
        assert self.process is not None
        owned = set()
        for entry in pathlib.Path(f"/proc/{self.process.pid}/fd").iterdir():
            try:
                owned.add(os.readlink(entry))
            except FileNotFoundError:
                continue  # closed meanwhile
        found = []
        tables = [pathlib.Path(f"/proc/{self.process.pid}/net/{name}").read_text() for name in ("tcp", "tcp6")]
        for line in "".join(tables).splitlines():
            fields = line.split()
            if fields[3] != "0A" or f"socket:[{fields[9]}]" not in owned:  # 0A: TCP_LISTEN
                continue
            digits, port = fields[1].split(":")
            words = [int(digits[at : at + 8], 16).to_bytes(4, sys.byteorder) for at in range(0, len(digits), 8)]
            address = ipaddress.ip_address(b"".join(words))
            found.append((str(getattr(address, "ipv4_mapped", None) or address), int(port, 16)))
        return found

    def members(self) -> int:
        """The number of members of the last view in its log; 0 if it has no view yet."""
        views = VIEW.findall(self.log_text())
        return int(views[-1][1]) if views else 0

    def status(self) -> dict[str, Any]:
        """`ropeteam status --json` of this node's socket. Counters and free chunks lag by up to a second."""
        return self._status()

    def local_status(self) -> dict[str, Any]:
        """The node's own report; its counters do not lag."""
        return self._status("--local")

    def _status(self, *options: str) -> dict[str, Any]:
        done = subprocess.run(
            [str(ROPETEAM), "status", "--json", *options, "--socket", self.socket],
            env=environment(),
            capture_output=True,
            text=True,
            timeout=WAIT_S,
        )
        assert done.returncode == 0, done.stderr
        return dict(json.loads(done.stdout))

    def open(self, rank: int, world_size: int, token: str | None = None, timeout: float = WAIT_S) -> Any:
        import ropeteam

        return ropeteam.open(
            self.socket, rank=rank, world_size=world_size, incarnation_token=token, timeout=timeout
        )


@dataclass
class Cluster:
    """The nodes of one job."""

    size: int
    memory: str
    directory: pathlib.Path
    arenas: pathlib.Path
    logs: pathlib.Path
    job: str = "test"
    coordinator: str = ""
    nodes: list[Daemon] = field(default_factory=list)

    def __getitem__(self, ordinal: int) -> Daemon:
        return self.nodes[ordinal]

    def wait_members(self, count: int | None = None) -> None:
        """Waits until every running node's view has `count` members; default: all running nodes."""
        running = [node for node in self.nodes if node.process is not None]
        wanted = len(running) if count is None else count
        wait_until(lambda: all(node.members() == wanted for node in running), f"a view of {wanted} members")


def saved(step: int, rank: int) -> bytes:
    return payload(100 * step + rank, 3_000_000)


def save_everywhere(ranks: list[Any], step: int) -> None:
    """Every rank saves saved() as "data"; waits until the step is committed."""
    from ropeteam import Level

    for rank, rope in enumerate(ranks):
        rope.save(step, {"data": saved(step, rank)})
    for rope in ranks:
        rope.wait(step, Level.COMMITTED)


def open_again(nodes: list[Daemon], ranks: list[Any]) -> list[Any]:
    """Closes all ranks and opens them with their token, as a launcher that restarts all processes."""
    for rope in ranks:
        rope.close()
    return [node.open(rank, len(ranks), "run") for rank, node in enumerate(nodes)]


def undisturbed(nodes: list[Daemon], processes: list[subprocess.Popen[bytes]]) -> None:
    """The surviving nodes have the same processes and the same instances."""
    for node, process in zip(nodes, processes, strict=True):
        assert node.process is process
        assert process.poll() is None
        assert "it starts again" not in node.log_text()
        assert "declared dead while alive" not in node.log_text()


# How long the data path is cut, and how soon afterwards a save must commit again. Reconnecting takes at most 2.5 s and
# the requirement is 5 s; the limit leaves room for a machine that runs other tests at the same time.
CUT_S = 10.0
AGAIN_S = 15.0


def verify(node: Daemon) -> subprocess.CompletedProcess[str]:
    return ask("verify", "--socket", node.socket)


def saves_commit_again(nodes: Cluster, cut: Callable[[], None], heal: Callable[[], None], size: int) -> float:
    """Cuts the data path of two nodes between two saves and heals it. Returns the seconds until a save is committed."""
    from ropeteam import DeadlineExceeded, Level

    with nodes[0].open(0, 1, "run") as rope:
        rope.save(1, {"data": payload(1, size)}, wait=Level.COMMITTED)
        cut()
        cut_at = time.monotonic()
        rope.save(2, {"data": payload(2, size)})
        with pytest.raises(DeadlineExceeded):
            rope.wait(2, Level.COMMITTED, timeout=0)
        wait_until(lambda: "is down" in nodes[0].log_text(), "node 0 to notice")
        assert nodes[0].members() == 2 and nodes[1].members() == 2, "the control plane lives"
        while time.monotonic() < cut_at + CUT_S:  # the cut must last this long
            time.sleep(0.05)
        heal()
        healed_at = time.monotonic()
        rope.save(3, {"data": payload(3, size)}, wait=Level.COMMITTED)
        seconds = time.monotonic() - healed_at
        assert seconds < AGAIN_S
        assert "is up again" in nodes[0].log_text()
        assert nodes[0].members() == 2
        assert rope.load(3)["data"] == payload(3, size)
    return seconds
