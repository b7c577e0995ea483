# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the end-to-end tests; see harness.py.

Daemons that a test starts are stopped when the test ends. The test fails if one of them ends with a status other than
0, for example after a sanitizer's report.
"""

from __future__ import annotations

import pathlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent))

from harness import (  # noqa: E402
    BUILD,
    LIBRARY,
    ROPETEAM,
    ROPETEAMD,
    WAIT_S,
    Cluster,
    Daemon,
    environment,
    free_port,
)


@pytest.fixture
def cluster(tmp_path: pathlib.Path) -> Iterator[Callable[..., Cluster]]:
    """cluster(nodes, memory="64M", options=[...]) starts daemons and waits until all see all.

    node_options: further options for each node. coordinator: the default is a free port of 127.0.0.1."""
    yield from _clusters(tmp_path)


@pytest.fixture(scope="module")
def module_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Cluster]]:
    """`cluster` for a fixture that several tests share."""
    yield from _clusters(tmp_path_factory.mktemp("module"))


def _clusters(tmp_path: pathlib.Path) -> Iterator[Callable[..., Cluster]]:
    if not ROPETEAMD.exists():
        pytest.skip(f"{ROPETEAMD} is not built")
    clusters: list[Cluster] = []

    def start(
        nodes: int,
        memory: str = "64M",
        options: list[str] | None = None,
        node_options: list[list[str]] | None = None,
        job: str = "test",
        coordinator: str = "",
        prefix: list[str] | None = None,
    ) -> Cluster:
        # The paths are short, since a unix socket's path has at most 107 bytes.
        directory = pathlib.Path(tempfile.mkdtemp(prefix="ropeteam-", dir="/tmp"))
        arenas = pathlib.Path(tempfile.mkdtemp(prefix="ropeteam-", dir="/dev/shm"))
        logs = tmp_path / f"logs-{len(clusters)}"
        logs.mkdir()
        made = Cluster(nodes, memory, directory, arenas, logs, job)
        made.coordinator = coordinator or f"127.0.0.1:{free_port()}"
        clusters.append(made)
        own = node_options or [[]] * nodes
        made.nodes = [Daemon(made, ordinal, [*(options or []), *own[ordinal]]) for ordinal in range(nodes)]
        for node in made.nodes:
            node.prefix = prefix or []
        made.nodes[0].start()  # the coordinator, and the leader
        for node in made.nodes[1:]:
            node.start(wait=False)
        made.wait_members()
        return made

    yield start
    died = []
    for made in clusters:
        for node in made.nodes:
            if node.process is not None:
                by_itself = node.process.poll()
                status = node.stop() if by_itself is None else by_itself
                if status != 0 or by_itself is not None:
                    died.append(f"{node.name} ended with {status}; its log:\n{node.log_text()[-4000:]}")
        shutil.rmtree(made.directory, ignore_errors=True)
        shutil.rmtree(made.arenas, ignore_errors=True)
    assert not died, "\n".join(died)


@pytest.fixture
def run_ropeteam(tmp_path: pathlib.Path) -> Iterator[Callable[..., subprocess.CompletedProcess[str]]]:
    """run_ropeteam(command…, options=[…]) runs `ropeteam run` with an arena and socket of the test's own, and
    returns its result.

    A second call finds the arena of the first call, as a restarted job would."""
    if not ROPETEAM.exists():
        pytest.skip(f"{ROPETEAM} is not built")
    directory = pathlib.Path(tempfile.mkdtemp(prefix="ropeteam-", dir="/tmp"))
    arena = pathlib.Path(tempfile.mkdtemp(prefix="ropeteam-", dir="/dev/shm"))

    def run(
        *command: str, options: list[str] | None = None, timeout_s: float = 3 * WAIT_S, **env: str
    ) -> subprocess.CompletedProcess[str]:
        options = [*(options or ["--job", "test"]), "--memory", "64M"]
        options += ["--socket", str(directory / "r.sock"), "--arena-path", str(arena)]
        return subprocess.run(
            [str(ROPETEAM), "run", *options, "--", *command],
            env=environment(**env),
            cwd=tmp_path,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )

    yield run
    shutil.rmtree(directory, ignore_errors=True)
    shutil.rmtree(arena, ignore_errors=True)


@pytest.fixture
def own_store() -> Iterator[dict[str, str]]:
    """Variables that keep a command of README apart from other jobs of this machine, and its arena small."""
    directory = pathlib.Path(tempfile.mkdtemp(prefix="ropeteam-", dir="/tmp"))
    arena = pathlib.Path(tempfile.mkdtemp(prefix="ropeteam-", dir="/dev/shm"))
    yield {
        "ROPETEAM_MEMORY": "64M",
        "ROPETEAM_ARENA_PATH": str(arena),
        "ROPETEAM_SOCKET": str(directory / "r.sock"),
        "ROPETEAM_LOG_FILE": str(directory / "r.log"),
    }
    shutil.rmtree(directory, ignore_errors=True)
    shutil.rmtree(arena, ignore_errors=True)


@pytest.fixture(scope="session")
def finished_build() -> None:
    """Skips the test if the build under test cannot be installed."""
    if not LIBRARY.is_relative_to(BUILD):
        pytest.skip(f"the library of {BUILD.name} is not for this Python: it loads {LIBRARY}")
    if shutil.which("cmake") is None or not (BUILD / "bench" / "ropeteam-bench").exists():
        pytest.skip(f"no cmake here, or {BUILD} is not built")
