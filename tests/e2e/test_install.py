# SPDX-License-Identifier: Apache-2.0
"""What README tells a stranger to type: the lines in .venv, and an installation of its own.

Nothing of the harness is in the environment of what runs here: no PYTHONPATH, no ROPETEAM_LIBRARY.
"""

from __future__ import annotations

import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator

import pytest
from harness import BUILD, LIBRARY, ROOT, WAIT_S, clean_environment, free_port, usable

README = (ROOT / "README.md").read_text()
SAVE = """
import ropeteam
from ropeteam import _native
with ropeteam.open() as rope:
    rope.save(1, {"data": b"x" * 100_000}, wait=ropeteam.Level.COMMITTED)
    assert rope.load()["data"] == b"x" * 100_000
print(ropeteam.__file__)
print(_native.library().path)
"""


def line_of_readme(begin: str) -> str:
    """The only line of README's code blocks that begins so."""
    (line,) = re.findall(rf"^    ({re.escape(begin)}.*)$", README, re.MULTILINE)
    return str(line)


@pytest.fixture
def own_store() -> Iterator[dict[str, str]]:
    """What keeps a line as README has it away from other jobs of this machine, and small."""
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


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    if not LIBRARY.is_relative_to(BUILD):
        pytest.skip(f"the library of {BUILD.name} is not for this Python: it loads {LIBRARY}")
    if shutil.which("cmake") is None or not (BUILD / "bench" / "ropeteam-bench").exists():
        pytest.skip(f"no cmake here, or {BUILD} is not built")
    prefix = tmp_path_factory.mktemp("prefix")
    done = subprocess.run(
        ["cmake", "--install", str(BUILD), "--prefix", str(prefix)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return prefix


def run(
    *command: str, cwd: pathlib.Path = ROOT, **env: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        env=clean_environment(**env),
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=3 * WAIT_S,
    )


def test_readme_s_lines_run_as_typed_in_the_virtual_environment(own_store):
    if not (ROOT / ".venv" / "bin" / "ropeteam").exists():
        pytest.skip(".venv has no ropeteam: scripts/test and scripts/demo link it")
    pytest.importorskip("torch", reason="torch is not installed")
    typed = [line_of_readme(". .venv/bin/activate"), line_of_readme("ropeteam run -- torchrun --nproc-per-node 2")]
    done = run(
        "bash",
        "-ec",
        "\n".join(typed),
        PET_MASTER_PORT=str(free_port()),
        GLOO_SOCKET_IFNAME="lo",
        ROPETEAM_JOB="readme",
        **own_store,
    )
    assert done.returncode == 0, done.stderr
    assert sorted(re.findall(r"rank (\d): steps 1 to 10", done.stdout)) == ["0", "1"], done.stdout
    assert "not safe" not in done.stdout


def test_an_installation_saves_with_nothing_in_the_environment(prefix, own_store, tmp_path):
    program = str(prefix / "bin" / "ropeteam")
    done = run(
        program, "run", "--job", "test", "--", sys.executable, "-c", SAVE, cwd=tmp_path, RANK="0", WORLD_SIZE="1",
        **own_store,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    package, library = (pathlib.Path(line) for line in done.stdout.splitlines())
    assert package.is_relative_to(prefix) and library.is_relative_to(prefix), done.stdout
    # And the package finds its library when only it is known.
    alone = run(sys.executable, "-c", "import ropeteam; print(ropeteam.library_version())", cwd=tmp_path,
                PYTHONPATH=str(package.parents[1]))  # fmt: skip
    assert (alone.returncode, alone.stdout) == (0, "0.1.0\n"), alone.stderr
    assert {path.name for path in (prefix / "bin").iterdir()} == {"ropeteam", "ropeteamd", "ropeteam-bench"}
    assert (library.parent / "libropeteam.so.0").exists(), "what a program that links it asks for"


def test_the_installed_bench_finds_library_and_daemon(prefix, tmp_path):
    usable("ofi")  # what `save` compares with is a loop over libfabric
    done = run(
        str(prefix / "bin" / "ropeteam"), "bench", "save", "--size", "1", "--runs", "1", "--json", cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert '"save/local"' in done.stdout


def test_readme_s_lines_build_and_run_the_c_example(prefix, own_store, tmp_path):
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    build, start = (line_of_readme(begin).replace("DIR", str(prefix)) for begin in ("cc ", "RANK=0 WORLD_SIZE=1 "))
    built = run("bash", "-c", build, cwd=tmp_path)
    assert built.returncode == 0, built.stderr
    done = run("bash", "-c", start, cwd=tmp_path, ROPETEAM_JOB="c", **own_store)
    assert (done.returncode, done.stdout) == (0, "went on from step 0, weights[0] is now 1.5\n"), done.stderr
