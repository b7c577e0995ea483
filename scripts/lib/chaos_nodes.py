# SPDX-License-Identifier: Apache-2.0
"""The nodes of scripts/chaos: each a ropeteamd in a network namespace of its own, on a bridge in one more, with its arena
on a tmpfs of the run's own. What is cut, slowed or filled is that and nothing else of the machine."""

from __future__ import annotations

import json
import mmap
import os
import pathlib
import secrets
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from datetime import datetime
from typing import Any

from demo_nodes import LOG_TIME, VIEW_LINE, Paths

READY_S = 60.0
ANSWER_S = 60.0
NETWORK = "10.99.0"
COORDINATOR_PORT = 29600
ARENA_MIB = 96
CHUNK = "256K"  # several a shard
REPLICAS = 2


class Stuck(Exception):
    """Something that has to happen did not, in the time it has; the text says what was seen."""


def wait_until(condition: Callable[[], Any], what: str, timeout_s: float) -> Any:
    """The condition's first true value."""
    deadline = time.monotonic() + timeout_s
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > deadline:
            raise Stuck(f"{what}: not within {timeout_s:.0f} s")
        time.sleep(0.01)


def run(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True, timeout=30, check=False)
    if done.returncode != 0:
        raise OSError(f"{' '.join(words)}: {done.stderr.strip()}")


class Rank:
    """A rank's process, chaos_rank.py; orders may be given to several before the answers are taken."""

    def __init__(self, paths: Paths, seed: int, number: int, world_size: int) -> None:
        self.number = number
        self.process = subprocess.Popen(
            [sys.executable, "-u", str(pathlib.Path(__file__).with_name("chaos_rank.py")), str(seed)]
            + [str(number), str(world_size)],
            env=paths.environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def order(self, do: str, **arguments: Any) -> None:
        try:
            self.process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass  # it was killed; answer() says so

    def answer(self, timeout_s: float = ANSWER_S) -> dict[str, Any]:
        """{"value": …} or {"error": …}. The process reads one line at a time, so a line is never left in a buffer."""
        if not select.select([self.process.stdout], [], [], timeout_s)[0]:
            raise Stuck(f"rank {self.number} does not answer within {timeout_s:.0f} s")
        line = self.process.stdout.readline()
        return json.loads(line) if line else {"error": "the process has ended"}

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


class Node:
    def __init__(self, cluster: Cluster, ordinal: int) -> None:
        self.cluster, self.ordinal = cluster, ordinal
        self.name = f"node-{ordinal}"
        self.space = f"{cluster.prefix}-{ordinal}"
        self.address = f"{NETWORK}.{ordinal + 1}"
        self.socket = str(cluster.directory / f"{ordinal}.sock")
        self.arena = cluster.arenas / str(ordinal)
        self.log = cluster.out / f"{self.name}.log"
        self.process: subprocess.Popen[bytes] | None = None
        self.stopped = False

    def start(self, wait: bool = True, preload: dict[str, str] | None = None) -> None:
        self.arena.mkdir(exist_ok=True)
        reader, writer = os.pipe()
        cluster = self.cluster
        command = ["ip", "netns", "exec", self.space, str(cluster.paths.build / "node" / "ropeteamd")]
        command += ["--job", "chaos", "--node", self.name, "--ordinal", str(self.ordinal)]
        command += ["--nodes", str(len(cluster.nodes)), "--replicas", str(REPLICAS)]
        command += ["--coordinator", f"{NETWORK}.1:{COORDINATOR_PORT}", "--listen", self.address]
        command += ["--socket", self.socket, "--arena-path", str(self.arena), "--memory", f"{ARENA_MIB}M"]
        command += ["--chunk-size", CHUNK, "--transport", "ofi", "--ready-fd", str(writer)]
        command += ["--job-key-file", str(cluster.key)]
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(
                command,
                env={**cluster.paths.environment(), **(preload or {})},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=log,
                pass_fds=[writer],
                start_new_session=True,
            )
        os.close(writer)
        self.stopped = False
        try:
            if wait and not (select.select([reader], [], [], READY_S)[0] and os.read(reader, 4096)):
                raise Stuck(f"{self.name} did not become ready: {self.last_words()}")
        finally:
            os.close(reader)

    def last_words(self) -> str:
        return self.log.read_text(errors="replace")[-600:]

    def kill(self, drop_memory: bool = False) -> None:
        """kill -9; with drop_memory as when the host is lost."""
        self.process.kill()
        self.process.wait()
        self.process = None
        if drop_memory:
            shutil.rmtree(self.arena)

    def pause(self) -> None:
        self.process.send_signal(signal.SIGSTOP)
        self.stopped = True

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)
        self.stopped = False

    def status(self, *options: str) -> dict[str, Any] | None:
        """None: no answer."""
        done = subprocess.run(
            [str(self.cluster.paths.ropeteam), "status", "--json", "--timeout", "5", "--socket", self.socket, *options],
            capture_output=True,
            text=True,
            timeout=ANSWER_S,
            check=False,
        )
        return json.loads(done.stdout) if done.returncode == 0 else None

    def views_since(self, when: float) -> list[tuple[float, int]]:
        """Time and members of each view that its log has since then."""
        found = []
        for match in VIEW_LINE.finditer(self.log.read_text(errors="replace")):
            at = datetime.strptime(match[1], LOG_TIME).timestamp()
            if at >= when:
                found.append((at, int(match[3])))
        return found

    def flip_bit_of(self, content: bytes, at: int) -> bool:
        """In the arena, wherever it holds these bytes; False where it does not."""
        (path,) = self.arena.glob("*.arena")
        with open(path, "r+b") as file, mmap.mmap(file.fileno(), 0) as arena:
            begin = arena.find(content[at : at + 64])
            if begin < 0:
                return False
            arena[begin] ^= 1 << (at % 8)
            return True

    # ---- the network, seen from its namespace

    def inside(self, *words: str) -> None:
        run("ip", "netns", "exec", self.space, *words)

    def drop_from(self, others: Iterable[Node]) -> None:
        addresses = "{" + ",".join(other.address for other in others) + "}"
        self.inside("nft", "add", "table", "ip", "chaos")
        self.inside("nft", "add", "chain", "ip", "chaos", "in", "{ type filter hook input priority 0 ; }")
        self.inside("nft", "add", "rule", "ip", "chaos", "in", "ip", "saddr", addresses, "drop")

    def throttle(self, megabits: int) -> None:
        shape = ["rate", f"{megabits}mbit", "burst", "64kb", "latency", "100ms"]
        self.inside("tc", "qdisc", "replace", "dev", "eth0", "root", "tbf", *shape)

    def heal(self) -> None:
        for words in (("nft", "delete", "table", "ip", "chaos"), ("tc", "qdisc", "del", "dev", "eth0", "root")):
            try:
                self.inside(*words)
            except OSError:
                pass  # it was not there


class Cluster:
    """Makes namespaces and a tmpfs; close() removes them."""

    def __init__(self, paths: Paths, out: pathlib.Path, size: int) -> None:
        self.paths, self.out = paths, out
        self.prefix = f"rt{os.getpid()}"
        self.directory = pathlib.Path(tempfile.mkdtemp(prefix="ropeteam-chaos-", dir="/tmp"))
        self.arenas = self.directory / "memory"
        self.arenas.mkdir()
        self.key = self.directory / "job.key"
        self.key.touch(0o600)
        self.key.write_text(secrets.token_hex(32))
        self.nodes: list[Node] = []
        self.nodes = [Node(self, ordinal) for ordinal in range(size)]
        self.spaces = [f"{self.prefix}-hub", *(node.space for node in self.nodes)]

    def open(self) -> None:
        # Room for all arenas and their tables, and for the ballast of a full one.
        run("mount", "-t", "tmpfs", "-o", f"size={len(self.nodes) * (ARENA_MIB + 32)}M", "chaos", str(self.arenas))
        for space in self.spaces:
            run("ip", "netns", "add", space)
            run("ip", "-n", space, "link", "set", "lo", "up")
        hub = self.spaces[0]
        run("ip", "-n", hub, "link", "add", "bridge", "type", "bridge")
        run("ip", "-n", hub, "link", "set", "bridge", "up")
        for node in self.nodes:
            port = f"port{node.ordinal}"
            run("ip", "-n", hub, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", node.space)
            run("ip", "-n", hub, "link", "set", port, "master", "bridge", "up")
            run("ip", "-n", node.space, "address", "add", f"{node.address}/24", "dev", "eth0")
            run("ip", "-n", node.space, "link", "set", "eth0", "up")

    def close(self, keep: bool) -> None:
        for node in self.nodes:
            if node.process is not None:
                node.kill()
        for space in self.spaces:
            subprocess.run(["ip", "netns", "del", space], capture_output=True, timeout=30, check=False)
        if keep:
            print(f"kept: {self.directory}")
            return
        subprocess.run(["umount", str(self.arenas)], capture_output=True, timeout=30, check=False)
        shutil.rmtree(self.directory, ignore_errors=True)

    def running(self) -> list[Node]:
        return [node for node in self.nodes if node.process is not None and not node.stopped]

    def redundant(self) -> bool:
        """Every node is a member, and every committed step that is kept has all its copies."""
        status = self.running()[0].status()
        if status is None or len(status["nodes"]) != len(self.nodes):
            return False
        if not all(node["has_lease"] for node in status["nodes"]):
            return False
        kept = [step for step in status["steps"] if step["committed"]]
        return all(step["copies_min"] >= 1 + REPLICAS for step in kept)

    def committed(self) -> list[int]:
        """Steps that the cluster says it keeps for good."""
        status = self.running()[0].status()
        return [step["step"] for step in status["steps"] if step["committed"] and step["producible"]]
