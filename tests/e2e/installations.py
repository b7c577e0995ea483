# SPDX-License-Identifier: Apache-2.0
"""Shared by the tests of installations.

Commands run here without the harness's variables PYTHONPATH and ROPETEAM_LIBRARY.
"""

from __future__ import annotations

import pathlib
import re
import subprocess

import pytest
from harness import ROOT, WAIT_S, clean_environment, free_port

README = (ROOT / "README.md").read_text()


def run(
    *command: str, cwd: pathlib.Path = ROOT, timeout_s: float = 3 * WAIT_S, **env: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        env=clean_environment(**env),
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )


def line_of_readme(begin: str) -> str:
    """The only line of README's code blocks that begins with `begin`."""
    (line,) = re.findall(rf"^    ({re.escape(begin)}.*)$", README, re.MULTILINE)
    return str(line)


def show_torch(python: pathlib.Path) -> None:
    """Lets the Python of a fresh virtual environment import the torch of this Python, since a copy has a
    gigabyte.

    Skips the test if torch is not installed."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    site = run(str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").stdout.strip()
    pathlib.Path(site, "torch.pth").write_text(f"{pathlib.Path(torch.__file__).parents[1]}\n")


def train_readme_s_example(python: pathlib.Path, own_store: dict[str, str], folder: pathlib.Path) -> None:
    """Runs README's PyTorch example with the daemon of the wheel that `python` has."""
    (text,) = re.findall(r"^```python\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    (folder / "train.py").write_text(text)
    done = run(
        str(python.with_name("ropeteam")), "run", "--", str(python), "-m", "torch.distributed.run",
        "--nproc-per-node", "1", "train.py",
        cwd=folder, PET_MASTER_PORT=str(free_port()), GLOO_SOCKET_IFNAME="lo", ROPETEAM_JOB="wheel",
        **own_store,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "rank 0: steps 1 to 10" in done.stdout, done.stdout
    assert "not safe" not in done.stdout + done.stderr
