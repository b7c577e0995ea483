# SPDX-License-Identifier: Apache-2.0
"""The nodes of scripts/chaos. Each is a ropeteamd in its own network namespace, with its arena on a tmpfs of
this run. A bridge in one more namespace connects them. Faults change nothing else of the machine."""

from __future__ import annotations

import json
import mmap
import os
import pathlib
import re
import secrets
import select
import shutil
import subprocess
import sys
import tempfile
from datetime import datetime
from typing import Any

from chaos_etcd import Etcd
from chaos_host import NETWORK, Host, Stuck, run, wait_until
from chaos_storage import KEPT, Store, View
from demo_nodes import LOG_TIME, VIEW_LINE, Paths

READY_S = 60.0
ANSWER_S = 60.0
COORDINATOR = f"{NETWORK}.1:29600"
SPARES = 2  # hosts beyond --nodes; they run only in the faults that use them
ARENA_MIB = 96
CHUNK = "256K"  # so that a shard has several
REPLICAS = 2
ROLE_LINE = re.compile(r"^(\S+) info membership node \S+ at \S+ has the coordinator role", re.MULTILINE)


# Mounts what the first three arguments say, and becomes the command in the others.
MOUNTED = 'mount -o "$1" "$2" "$3" && shift 3 && exec "$@"'
# Root without these capabilities is refused by a file's mode, as any user.
NO_OVERRIDE = ["setpriv", "--bounding-set=-dac_override,-dac_read_search", "--"]


def write_keys(path: pathlib.Path, *keys: str) -> None:
    """Replaces the file as a whole: a daemon may read it at any time."""
    new = path.with_suffix(".new")
    with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write("".join(key + "\n" for key in keys))
    new.replace(path)


class Rank:
    """A rank's process, chaos_rank.py. Several ranks may get an order before the first answer is read."""

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
        """{"value": …} or {"error": …}. At most one order is unanswered, so no line stays in a buffer."""
        if not select.select([self.process.stdout], [], [], timeout_s)[0]:
            raise Stuck(f"rank {self.number} does not answer within {timeout_s:.0f} s")
        line = self.process.stdout.readline()
        return json.loads(line) if line else {"error": "the process has ended"}

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


class Node(Host):
    """A ropeteamd."""

    def __init__(self, cluster: Cluster, ordinal: int) -> None:
        super().__init__(f"{cluster.prefix}-{ordinal}", f"{NETWORK}.{ordinal + 1}")
        self.cluster, self.ordinal = cluster, ordinal
        self.name = f"node-{ordinal}"
        self.socket = str(cluster.directory / f"{ordinal}.sock")
        self.arena = cluster.arenas / str(ordinal)
        self.log = cluster.out / f"{self.name}.log"
        self.key = cluster.directory / f"{self.name}.key"
        self.keys = (cluster.first_key,)
        self.view: View | None = None  # what it sees in the place of the store

    def start(self, wait: bool = True, preload: dict[str, str] | None = None) -> None:
        self.arena.mkdir(exist_ok=True)
        write_keys(self.key, *self.keys)
        reader, writer = os.pipe()
        cluster = self.cluster
        command = ["sh", "-c", MOUNTED, "sh", *self.mounted()] if self.view else []
        command += [*NO_OVERRIDE, str(cluster.paths.build / "node" / "ropeteamd")]
        command += ["--job", "chaos", "--node", self.name, "--ordinal", str(self.ordinal)]
        command += ["--nodes", str(len(cluster.nodes)), "--replicas", str(REPLICAS)]
        command += ["--membership", cluster.etcd.url] if cluster.etcd else ["--coordinator", COORDINATOR]
        command += ["--listen", self.address]
        command += ["--socket", self.socket, "--arena-path", str(self.arena), "--memory", f"{ARENA_MIB}M"]
        command += ["--chunk-size", CHUNK, "--transport", "tcp", "--ready-fd", str(writer)]
        # Incarnations end only because of the faults, and every committed step must come back.
        command += ["--quarantine-after", "0"]
        command += ["--job-key-file", str(self.key)]
        command += ["--encrypt-replicas"] if cluster.encrypt else []
        command += ["--storage", str(cluster.store.path), "--keep-on-storage", str(KEPT)]
        with open(self.log, "ab") as log:
            self.spawn(command, log, env={**cluster.paths.environment(), **(preload or {})}, pass_fds=[writer])
        os.close(writer)
        try:
            if wait and not (select.select([reader], [], [], READY_S)[0] and os.read(reader, 4096)):
                raise Stuck(f"{self.name} did not become ready: {self.last_words()}")
        finally:
            os.close(reader)

    def stop(self) -> None:
        """SIGTERM."""
        self.process.terminate()
        try:
            self.process.wait(READY_S)
        except subprocess.TimeoutExpired as error:
            raise Stuck(f"{self.name} does not end within {READY_S:.0f} s: {self.last_words()}") from error
        if self.process.returncode != 0:
            raise Stuck(f"{self.name} ended with {self.process.returncode}: {self.last_words()}")
        self.process = None

    # ---- its storage

    def mounted(self) -> list[str]:
        return [self.view.options, str(self.view.source), str(self.cluster.store.path)]

    def see(self, view: View | None) -> None:
        """Mounts this over its store, or unmounts what is there. It stays when the daemon restarts."""
        self.view = view
        if self.process is None or self.process.poll() is not None:
            return
        change = ["mount", "-o", *self.mounted()] if view else ["umount", "-l", str(self.cluster.store.path)]
        try:
            run("nsenter", f"--mount=/proc/{self.process.pid}/ns/mnt", *change)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise Stuck(f"the storage of {self.name} cannot be changed: {error}") from error

    def log_text(self) -> str:
        return self.log.read_text(errors="replace")

    def last_words(self) -> str:
        return self.log_text()[-600:]

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

    def log_since(self, when: float, line: re.Pattern[str]) -> list[tuple[float, re.Match[str]]]:
        """Matching lines of its log, with their times. The first group of `line` is the time."""
        found = ((datetime.strptime(match[1], LOG_TIME).timestamp(), match) for match in line.finditer(self.log_text()))
        return [(at, match) for at, match in found if at >= when]

    def views_since(self, when: float) -> list[tuple[float, int]]:
        """Time and number of members of each view."""
        return [(at, int(match[3])) for at, match in self.log_since(when, VIEW_LINE)]

    def found_coordinator_since(self, when: float) -> bool:
        return bool(self.log_since(when, ROLE_LINE))

    def flip_bit_of(self, content: bytes, at: int) -> bool:
        """Flips a bit of these bytes in the arena. False: the arena does not have them."""
        (path,) = self.arena.glob("*.arena")
        with open(path, "r+b") as file, mmap.mmap(file.fileno(), 0) as arena:
            begin = arena.find(content[at : at + 64])
            if begin < 0:
                return False
            arena[begin] ^= 1 << (at % 8)
            return True


class Cluster:
    """Makes namespaces and a tmpfs; close() removes them. `etcd`: membership uses an etcd of this run."""

    def __init__(self, paths: Paths, out: pathlib.Path, size: int, etcd: bool, encrypt: bool) -> None:
        self.paths, self.out, self.encrypt = paths, out, encrypt
        self.prefix = f"rt{os.getpid()}"
        self.directory = pathlib.Path(tempfile.mkdtemp(prefix="ropeteam-chaos-", dir="/tmp"))
        self.arenas = self.directory / "memory"
        self.arenas.mkdir()
        self.first_key = secrets.token_hex(32)
        self.nodes = [Node(self, ordinal) for ordinal in range(size)]
        self.spares = [Node(self, ordinal) for ordinal in range(size, size + SPARES)]
        self.store = Store(self.directory)
        self.stores = self.directory / "etcd"
        self.etcd = Etcd(self.prefix, self.stores, out) if etcd else None
        self.hub = f"{self.prefix}-hub"

    def open(self) -> None:
        # Room for all arenas and their tables, and for the ballast of full_memory().
        size = f"size={len(self.nodes + self.spares) * (ARENA_MIB + 32)}M"
        run("mount", "-t", "tmpfs", "-o", size, "chaos", str(self.arenas))
        for space in (self.hub, *(host.space for host in self.hosts())):
            run("ip", "netns", "add", space)
            run("ip", "-n", space, "link", "set", "lo", "up")
        run("ip", "-n", self.hub, "link", "add", "bridge", "type", "bridge")
        run("ip", "-n", self.hub, "link", "set", "bridge", "up")
        for host in self.hosts():
            host.connect(self.hub)
        self.store.open()
        if self.etcd:
            # In memory: a slow disk would be an unplanned fault.
            self.stores.mkdir()
            run("mount", "-t", "tmpfs", "-o", "size=2G", "chaos", str(self.stores))
            self.etcd.start()

    def hosts(self) -> list[Host]:
        return [*self.nodes, *self.spares, *(self.etcd.members if self.etcd else [])]

    def close(self, keep: bool) -> None:
        for host in self.hosts():
            if host.process is not None:
                host.kill()
        for space in (self.hub, *(host.space for host in self.hosts())):
            subprocess.run(["ip", "netns", "del", space], capture_output=True, timeout=30, check=False)
        if keep:
            print(f"kept: {self.directory}")
            return
        for mounted in (self.arenas, self.stores, self.store.root):
            subprocess.run(["umount", str(mounted)], capture_output=True, timeout=30, check=False)
        shutil.rmtree(self.directory, ignore_errors=True)

    def running(self) -> list[Node]:
        return [node for node in self.nodes + self.spares if node.process is not None and not node.stopped]

    def coordinator(self) -> Node:
        """The node that has the coordinator role, as the first running node sees it."""
        address = self.coordinator_at().partition(":")[0]
        return next(node for node in self.running() if node.address == address)

    def coordinator_at(self) -> str:
        """Its address and port."""

        def found() -> str:
            status = self.running()[0].status("--local")
            where = status["daemon"]["membership"]["coordinator"] if status else ""
            return where if any(where.startswith(f"{node.address}:") for node in self.running()) else ""

        return wait_until(found, "a coordinator", READY_S) if self.etcd else COORDINATOR

    def leader(self) -> Node:
        def found() -> Node | None:
            status = self.running()[0].status()
            return next((node for node in self.running() if status and node.name == status["leader"]), None)

        return wait_until(found, "a leader that runs", READY_S)

    def redundant(self, absent: int = 0) -> bool:
        """Every node is a member, but for `absent` ones, and every committed step that is kept has all its copies."""
        running = self.running()
        members = len(self.nodes) - absent + sum(spare in running for spare in self.spares)
        status = running[0].status()
        if status is None or len(status["nodes"]) != members:
            return False
        if not all(node["has_lease"] for node in status["nodes"]):
            return False
        only_stored = [step for step in status["steps"] if step["persisted"] and not step["ranks_sealed"]]
        kept = [step for step in status["steps"] if step["committed"] and step not in only_stored]
        return all(step["copies_min"] >= 1 + REPLICAS for step in kept)

    def removable(self) -> bool:
        """A key may be removed: no copy needs it."""
        status = self.running()[0].status()
        return status is not None and any(key["removable"] for key in status["keys"])

    def one_key(self) -> bool:
        """All copies are of one key, and their nodes have it."""
        status = self.running()[0].status()
        return status is not None and [key["unreadable"] for key in status["keys"]] == [0]

    def committed(self) -> list[int]:
        """Steps that the cluster reports as committed and producible."""
        status = self.running()[0].status()
        return [step["step"] for step in status["steps"] if step["committed"] and step["producible"]]
