# SPDX-License-Identifier: Apache-2.0
"""A host of scripts/chaos: a network namespace with one process, which can be killed, stopped, cut off and slowed."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Callable, Iterable
from typing import IO, Any

NETWORK = "10.99.0"


class Stuck(Exception):
    """Something did not happen in time. The text says what was seen."""


def wait_until(condition: Callable[[], Any], what: str, timeout_s: float) -> Any:
    """Waits for the condition, and returns its first true value."""
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


class Host:
    """A network namespace with one process in it."""

    def __init__(self, space: str, address: str) -> None:
        self.space, self.address = space, address
        self.process: subprocess.Popen[bytes] | None = None
        self.stopped = False

    def spawn(self, command: list[str], log: IO[bytes], **options: Any) -> None:
        self.process = subprocess.Popen(
            ["ip", "netns", "exec", self.space, *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=log,
            start_new_session=True,
            **options,
        )
        self.stopped = False

    def kill(self) -> None:
        """kill -9."""
        self.process.kill()
        self.process.wait()
        self.process = None

    def pause(self) -> None:
        self.process.send_signal(signal.SIGSTOP)
        self.stopped = True

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)
        self.stopped = False

    # ---- the network, seen from its namespace

    def connect(self, hub: str) -> None:
        """Connects this namespace to the bridge in the namespace `hub`."""
        port = f"port{self.address.rpartition('.')[2]}"
        run("ip", "-n", hub, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", self.space)
        run("ip", "-n", hub, "link", "set", port, "master", "bridge", "up")
        run("ip", "-n", self.space, "address", "add", f"{self.address}/24", "dev", "eth0")
        run("ip", "-n", self.space, "link", "set", "eth0", "up")

    def inside(self, *words: str) -> None:
        run("ip", "netns", "exec", self.space, *words)

    def drop_from(self, others: Iterable[Host], but_port: int | None = None) -> None:
        """Drops what arrives from these hosts, except TCP from and to `but_port`."""
        addresses = ",".join(other.address for other in others)
        if not addresses:
            return
        self.inside("nft", "add", "table", "ip", "chaos")
        self.inside("nft", "add", "chain", "ip", "chaos", "in", "{ type filter hook input priority 0 ; }")
        rule = ("nft", "add", "rule", "ip", "chaos", "in", "ip", "saddr", "{" + addresses + "}")
        # Not one rule with two `!=`: nft 1.0.6 drops the packets that have one of the two ports, too.
        for side in ("sport", "dport") if but_port else ():
            self.inside(*rule, "tcp", side, str(but_port), "accept")
        self.inside(*rule, "drop")

    def throttle(self, megabits: int) -> None:
        shape = ["rate", f"{megabits}mbit", "burst", "64kb", "latency", "100ms"]
        self.inside("tc", "qdisc", "replace", "dev", "eth0", "root", "tbf", *shape)

    def heal(self) -> None:
        for words in (("nft", "delete", "table", "ip", "chaos"), ("tc", "qdisc", "del", "dev", "eth0", "root")):
            try:
                self.inside(*words)
            except OSError:
                pass  # it was not there
