# SPDX-License-Identifier: Apache-2.0
"""What the README shows is what runs: the quick starts and the training example, under `ropeteam run`."""

from __future__ import annotations

import os
import re
import subprocess

import pytest
from harness import LIBRARY, ROOT

EXAMPLES = ROOT / "examples"
STANDALONE = ["torchrun", "--standalone", "--nproc-per-node", "2"]


def losses(path):
    return dict(line.split() for line in path.read_text().splitlines())


def test_the_c_quick_start_goes_on_where_it_ended(run_ropeteam, tmp_path):
    compiler = os.environ.get("CC", "cc")
    flags = [
        "-std=c11",
        "-Wall",
        "-Wextra",
        "-Werror",
        f"-I{ROOT / 'api' / 'include'}",
        f"-L{LIBRARY.parent}",
    ]
    command = [
        compiler,
        *flags,
        str(EXAMPLES / "quickstart.c"),
        "-lropeteam",
        "-o",
        str(tmp_path / "quickstart"),
    ]
    subprocess.run(command, check=True)
    environment = {"RANK": "0", "WORLD_SIZE": "1", "LD_LIBRARY_PATH": str(LIBRARY.parent)}
    first = run_ropeteam("./quickstart", **environment)
    assert (first.returncode, first.stdout) == (0, "went on from step 0, weights[0] is now 1.5\n"), (
        first.stderr
    )
    second = run_ropeteam("./quickstart", **environment)
    assert (second.returncode, second.stdout) == (0, "went on from step 3, weights[0] is now 3\n"), (
        second.stderr
    )


def test_the_pytorch_quick_start_goes_on_where_it_ended(run_ropeteam):
    pytest.importorskip("torch", reason="torch is not installed")
    for first, last in ((1, 10), (11, 20)):
        done = run_ropeteam(*STANDALONE, str(EXAMPLES / "quickstart.py"), GLOO_SOCKET_IFNAME="lo")
        assert done.returncode == 0, done.stderr
        ranks = re.findall(r"rank (\d): steps (\d+) to (\d+), loss", done.stdout)
        assert sorted(ranks) == [(str(rank), str(first), str(last)) for rank in range(2)]
        assert "not saved" not in done.stdout


def test_training_that_is_interrupted_computes_what_uninterrupted_training_does(run_ropeteam, tmp_path):
    pytest.importorskip("torch", reason="torch is not installed")
    small = ["--layers", "2", "--width", "48", "--heads", "4", "--batch", "2", "--block", "16"]
    train = [*STANDALONE, str(EXAMPLES / "train_gpt.py"), *small]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    for steps, out in ((9, whole), (4, parts), (9, parts)):
        # The uninterrupted run has a store of its own: another job in the same arena would be found again.
        job = ["--job", out.name, "--node", out.name]
        done = run_ropeteam(
            *train, "--steps", str(steps), "--out", str(out), options=job, GLOO_SOCKET_IFNAME="lo"
        )
        assert done.returncode == 0, done.stderr
    for rank in range(2):
        assert losses(parts / f"loss.{rank}.txt") == losses(whole / f"loss.{rank}.txt")
        assert len((parts / f"loss.{rank}.txt").read_text().splitlines()) == 9  # no step was computed twice
        assert '"event": "loaded", ' in (parts / f"events.{rank}.jsonl").read_text()
