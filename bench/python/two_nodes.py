# SPDX-License-Identifier: Apache-2.0
"""Two nodes on this machine for a measurement: one with the ranks, and one that holds their copies."""

from __future__ import annotations

import contextlib
import os
import pathlib
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUILD = pathlib.Path(os.environ.get("ROPETEAM_BUILD", ROOT / "build" / "release")).resolve()
ROPETEAM = BUILD / "api" / "cli" / "ropeteam"


def _environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("ROPETEAM_")}
    kept["PATH"] = f"{BUILD / 'node'}:{ROPETEAM.parent}:{pathlib.Path(sys.executable).parent}:{kept['PATH']}"
    kept["PYTHONPATH"] = str(ROOT / "api" / "python")
    kept["ROPETEAM_LIBRARY"] = str(BUILD / "api" / "client" / "libropeteam.so")
    return kept


@contextlib.contextmanager
def two_nodes(
    command: list[str], *, memory: str, files: pathlib.Path, storage: bool
) -> Iterator[subprocess.Popen[str]]:
    """Runs `command` under `ropeteam run` on node 0; node 1 has no ranks. Yields node 0's process, whose
    output is a pipe. The daemons' logs and storage are in `files`. All processes end with the context."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.2", 0))
        coordinator = f"127.0.0.2:{probe.getsockname()[1]}"
    # The path is short, since a unix socket's path has at most 107 bytes. The daemons remove their arenas.
    sockets = pathlib.Path(tempfile.mkdtemp(prefix="ropeteam-bench-", dir="/tmp"))
    common = ["--job", sockets.name, "--nodes", "2", "--coordinator", coordinator, "--memory", memory]
    common += ["--replicas", "1", "--remove-arena-at-exit", "--quiet"]
    if storage:
        (files / "storage").mkdir()
        common += ["--storage", str(files / "storage"), "--keep-on-storage", "1"]

    def node(ordinal: int, run: list[str], **options: object) -> subprocess.Popen[str]:
        own = ["--ordinal", str(ordinal), "--listen", f"127.0.0.{ordinal + 2}"]
        own += ["--socket", str(sockets / str(ordinal)), "--log-file", str(files / f"node-{ordinal}.log")]
        line = [str(ROPETEAM), "run", *common, *own, "--", *run]
        return subprocess.Popen(line, env=_environment(), text=True, **options)  # type: ignore[call-overload]

    processes: list[subprocess.Popen[str]] = []
    try:
        processes.append(node(1, ["sleep", "infinity"]))
        processes.append(node(0, command, stdout=subprocess.PIPE))
        yield processes[1]
    finally:
        for process in reversed(processes):
            process.terminate()
        for process in processes:
            process.wait(30)
        shutil.rmtree(sockets, ignore_errors=True)
