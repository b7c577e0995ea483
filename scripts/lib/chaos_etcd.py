# SPDX-License-Identifier: Apache-2.0
"""The etcd of scripts/chaos: three members, each in its own network namespace."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import subprocess

from chaos_host import NETWORK, Host, Stuck, wait_until

MEMBERS = 3
CLIENT_PORT, PEER_PORT = 2379, 2380
READY_S = 30.0  # until a member answers: after an absence it waits for an election, and may need a snapshot
KEEP_REVISIONS = 1000  # compaction keeps the data of a long run small


class Member(Host):
    """An etcd process. `data` is its directory."""

    def __init__(self, etcd: Etcd, number: int) -> None:
        super().__init__(f"{etcd.prefix}-e{number}", f"{NETWORK}.{101 + number}")
        self.etcd, self.name = etcd, f"etcd-{number}"
        self.client = f"{self.address}:{CLIENT_PORT}"
        self.peer = f"http://{self.address}:{PEER_PORT}"
        self.data = etcd.directory / self.name
        self.log = etcd.out / f"{self.name}.log"

    def start(self) -> None:
        members = self.etcd.members
        words = {
            "name": self.name,
            "data-dir": str(self.data),
            "listen-client-urls": f"http://{self.client},http://127.0.0.1:{CLIENT_PORT}",
            "advertise-client-urls": f"http://{self.client}",
            "listen-peer-urls": self.peer,
            "initial-advertise-peer-urls": self.peer,
            "initial-cluster": ",".join(f"{member.name}={member.peer}" for member in members),
            "initial-cluster-token": f"chaos-{self.etcd.wipes}",
            "auto-compaction-mode": "revision",
            "auto-compaction-retention": str(KEEP_REVISIONS),
        }
        with open(self.log, "ab") as log:
            self.spawn(["etcd", *(f"--{name}={value}" for name, value in words.items())], log)

    def control(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Runs etcdctl against this member alone."""
        command = ["ip", "netns", "exec", self.space, "etcdctl", "--command-timeout=1s", *words]
        environment = {**os.environ, "ETCDCTL_API": "3"}
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=30, check=False)

    def answers(self) -> bool:
        """Whether it answers a read, which needs a majority of the members."""
        return self.process is not None and not self.stopped and self.control("get", "none").returncode == 0

    def leads(self) -> bool:
        done = self.control("endpoint", "status", "--write-out=json")
        if done.returncode != 0:
            return False
        status = json.loads(done.stdout)[0]["Status"]
        return bool(status["leader"] == status["header"]["member_id"])


class Etcd:
    def __init__(self, prefix: str, directory: pathlib.Path, out: pathlib.Path) -> None:
        self.prefix, self.directory, self.out = prefix, directory, out
        self.wipes = 0
        self.members: list[Member] = []
        self.members = [Member(self, number) for number in range(MEMBERS)]

    @property
    def url(self) -> str:
        return f"etcd://{','.join(member.client for member in self.members)}/chaos"

    def start(self) -> None:
        for member in self.members:
            if member.process is None:
                member.start()
        self.wait()

    def wait(self) -> None:
        """Waits until every member answers."""
        wait_until(lambda: all(member.answers() for member in self.members), "every member of etcd answers", READY_S)

    def leader(self) -> Member:
        return wait_until(lambda: next((each for each in self.members if each.leads()), None), "a leader", READY_S)

    def followers(self) -> list[Member]:
        leader = self.leader()
        return [member for member in self.members if member is not leader]

    def kill(self) -> None:
        for member in self.members:
            member.kill()

    def wipe(self) -> None:
        """Removes all data; no member may run. The next start makes a new cluster."""
        self.wipes += 1
        for member in self.members:
            if member.process is not None:
                raise Stuck(f"{member.name} runs while its data is wiped")
            shutil.rmtree(member.data)

    def signal(self, stop: bool) -> None:
        for member in self.members:
            member.pause() if stop else member.go_on()
