# SPDX-License-Identifier: Apache-2.0
"""The demo's storage: a bucket on its own S3 server, on loopback. It is the strict server of the tests, which
verifies every signature and checksum, and keeps the objects in its memory."""

from __future__ import annotations

import json
import pathlib
import re
import secrets
import select
import subprocess
import urllib.request
from collections.abc import Iterable
from datetime import datetime

from demo_nodes import LOG_TIME, DemoError, Paths
from demo_report import Persist, StoredStep

BUCKET, PREFIX = "demo", "runs"
READY_TIMEOUT_S = 30.0  # until the server listens: Python may start slowly on a busy machine
ANSWER_TIMEOUT_S = 30.0  # of a request for its state
END_TIMEOUT_S = 5.0
MANIFEST = re.compile(r"(?P<folder>.*/step-(?P<step>\d+)-i(?P<incarnation>\d+)/)ropeteam-manifest\.json")
PERSIST_LINE = re.compile(
    r"^(?P<at>\S+) info step (?P<step>\d+) incarnation (?P<incarnation>\d+) is (?P<what>being persisted|persisted)$",
    re.MULTILINE,
)
TCP_LISTEN, TCP_TIME_WAIT = "0A", "06"  # as /proc/net/tcp writes states


class Bucket:
    """Runs from construction to end(). Its server also ends when this process dies."""

    def __init__(self, paths: Paths, python: pathlib.Path) -> None:
        self._key, self._secret = "demo", secrets.token_hex(16)
        self._log = paths.out / "bucket.log"
        server = paths.root / "tests" / "storage" / "s3" / "server" / "strict_s3.py"
        command = [str(python), str(server), "--port", "0", "--bucket", BUCKET, "--until-stdin-closes"]
        command += ["--access-key", self._key, "--secret-key", self._secret]
        with open(self._log, "w") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
            )
        try:
            self.port = self._read_port()
        except DemoError:
            self.end()
            raise
        self.endpoint = f"http://127.0.0.1:{self.port}"
        self.url = f"s3://{BUCKET}/{PREFIX}?endpoint={self.endpoint}&region=us-east-1"
        # Ignores proxies from the environment, because the server is on loopback.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def _read_port(self) -> int:
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], READY_TIMEOUT_S)
        line = self._process.stdout.readline() if ready else ""
        if not line:
            raise DemoError(f"the S3 server did not start within {READY_TIMEOUT_S:.0f} s: {self._log}")
        return int(json.loads(line)["port"])

    def environment(self) -> dict[str, str]:
        """Variables for the daemons to reach the bucket. They hide the user's own configuration."""
        return {
            "AWS_ACCESS_KEY_ID": self._key,
            "AWS_SECRET_ACCESS_KEY": self._secret,
            "AWS_CONFIG_FILE": "/dev/null",
            "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
            "AWS_EC2_METADATA_DISABLED": "true",
            "NO_PROXY": "127.0.0.1",
            "no_proxy": "127.0.0.1",
        }

    def steps(self) -> list[StoredStep]:
        """The steps that have a manifest, oldest first. Asks the server directly, not by the S3 protocol."""
        try:
            with self._opener.open(f"{self.endpoint}/_control/state?log=0", timeout=ANSWER_TIMEOUT_S) as answer:
                objects = json.load(answer)["objects"][BUCKET]
        except (OSError, ValueError) as error:
            raise DemoError(f"the S3 server does not answer: {error}; its log: {self._log}") from error
        return stored_steps({name: entry["size"] for name, entry in objects.items()})

    def connections(self) -> int:
        """Number of connections that the server has not closed. Until 0, a request may still take effect."""
        lines = pathlib.Path("/proc/net/tcp").read_text().splitlines()[1:]
        port = f":{self.port:04X}"
        # Fields: number, local address, remote address, state.
        of_server = [line.split()[3] for line in lines if line.split()[1].endswith(port)]
        return sum(state not in (TCP_LISTEN, TCP_TIME_WAIT) for state in of_server)

    def end(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()


def stored_steps(sizes: dict[str, int]) -> list[StoredStep]:
    """The committed steps among a bucket's objects, oldest first."""
    found = []
    for name in sizes:
        if manifest := MANIFEST.fullmatch(name):
            size = sum(bytes_ for other, bytes_ in sizes.items() if other.startswith(manifest["folder"]))
            found.append(StoredStep(int(manifest["step"]), int(manifest["incarnation"]), size))
    return sorted(found, key=lambda stored: (stored.incarnation, stored.step))


def read_persists(logs: Iterable[pathlib.Path]) -> list[Persist]:
    """From the daemons' logs: when each step began to be persisted and when it was. In order of the begin."""
    begun: dict[tuple[int, int], float] = {}
    ended: dict[tuple[int, int], float] = {}
    for path in logs:
        for line in PERSIST_LINE.finditer(path.read_text(errors="replace") if path.exists() else ""):
            times = begun if line["what"] == "being persisted" else ended
            at = datetime.strptime(line["at"], LOG_TIME).timestamp()
            key = (int(line["incarnation"]), int(line["step"]))
            times[key] = min(at, times.get(key, at))
    persists = [Persist(step, incarnation, at, ended.get((incarnation, step)))
                for (incarnation, step), at in begun.items()]  # fmt: skip
    return sorted(persists, key=lambda persist: persist.begun_at)
