# SPDX-License-Identifier: Apache-2.0
"""The examples that README shows work: the quick starts and the training example, under `ropeteam run`."""

from __future__ import annotations

import mmap
import os
import re
import struct
import subprocess
import textwrap

import pytest
from harness import LIBRARY, ROOT, WAIT_S, environment, forked_ranks

EXAMPLES = ROOT / "examples"


def losses(path):
    return dict(line.split() for line in path.read_text().splitlines())


@pytest.fixture
def c_quickstart(tmp_path):
    compiler = os.environ.get("CC", "cc")
    program = tmp_path / "quickstart"
    flags = ["-std=c11", "-Wall", "-Wextra", "-Werror", f"-I{ROOT / 'api' / 'include'}", f"-L{LIBRARY.parent}"]
    command = [compiler, *flags, str(EXAMPLES / "quickstart.c"), "-lropeteam", "-o", str(program)]
    subprocess.run(command, check=True)
    return program


AS_RANK = {"RANK": "0", "WORLD_SIZE": "1", "LD_LIBRARY_PATH": str(LIBRARY.parent)}


def test_the_c_quick_start_goes_on_where_it_ended(run_ropeteam, c_quickstart):
    first = run_ropeteam(str(c_quickstart), **AS_RANK)
    assert (first.returncode, first.stdout) == (0, "went on from step 0, weights[0] is now 1.5\n"), (
        first.stderr
    )
    second = run_ropeteam(str(c_quickstart), **AS_RANK)
    assert (second.returncode, second.stdout) == (0, "went on from step 3, weights[0] is now 3\n"), (
        second.stderr
    )


def test_the_c_quick_start_does_not_go_on_from_zeros_when_nothing_can_be_restored(cluster, c_quickstart):
    (node,) = cluster(1).nodes

    def run() -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(c_quickstart)], env=environment(ROPETEAM_SOCKET=node.socket, **AS_RANK),
            capture_output=True, text=True, timeout=WAIT_S,
        )  # fmt: skip

    assert run().returncode == 0
    weights = struct.pack("<d", 1.5) + bytes(8 * 999)  # the only copy of step 3, the latest
    with open(next(node.arena.glob("*.arena")), "r+b") as file, mmap.mmap(file.fileno(), 0) as arena:
        begin = arena.find(weights)
        assert begin >= 0 and arena.find(weights, begin + 1) == -1
        arena[begin + 100] ^= 1
    again = run()
    assert (again.returncode, again.stdout) == (1, ""), again.stdout
    assert "step 3 is not restored: " in again.stderr


def test_the_pytorch_quick_start_goes_on_where_it_ended(run_ropeteam):
    pytest.importorskip("torch", reason="torch is not installed")
    torchrun = ["torchrun", "--standalone", "--nproc-per-node", "2"]
    for first, last, launcher in ((1, 10, torchrun), (11, 20, forked_ranks(2))):
        done = run_ropeteam(*launcher, str(EXAMPLES / "quickstart.py"), GLOO_SOCKET_IFNAME="lo")
        assert done.returncode == 0, done.stderr
        ranks = re.findall(r"rank (\d): steps (\d+) to (\d+), loss", done.stdout)
        assert sorted(ranks) == [(str(rank), str(first), str(last)) for rank in range(2)]
        assert "not safe" not in done.stdout + done.stderr


def run_quickstart(node, tmp_path, before: str) -> subprocess.CompletedProcess[str]:
    """Runs examples/quickstart.py in two ranks on a node; the lines `before` cause a failure."""
    pytest.importorskip("torch", reason="torch is not installed")
    driver = tmp_path / "driver.py"
    text = f"import os, runpy, signal\nimport ropeteam.torch\n{textwrap.dedent(before)}\n"
    driver.write_text(text + f"runpy.run_path({str(EXAMPLES / 'quickstart.py')!r}, run_name='__main__')\n")
    return subprocess.run(
        [*forked_ranks(2), str(driver)],
        env=environment(ROPETEAM_SOCKET=node.socket, GLOO_SOCKET_IFNAME="lo"),
        capture_output=True,
        text=True,
        timeout=3 * WAIT_S,
    )


def check_trained_to_the_end(done: subprocess.CompletedProcess[str], warned: list[int], says: str) -> None:
    assert done.returncode == 0, done.stderr
    assert sorted(re.findall(r"rank (\d): steps 1 to 10, loss", done.stdout)) == ["0", "1"]
    # Two ranks write into one pipe, so a line's end may come after the other rank's text.
    steps = re.findall(rf"step (\d+) is not safe, training goes on[^:]*: {says}", done.stderr)
    assert sorted(map(int, steps)) == sorted([*warned, *warned]), done.stderr


def test_the_pytorch_quick_start_trains_to_its_end_when_no_save_finds_room(cluster, tmp_path):
    (node,) = cluster(1, memory="64M").nodes
    done = run_quickstart(
        node,
        tmp_path,
        """
        def full(*arguments, **options):
            raise ropeteam.NoSpace("needed 25 chunks")
        ropeteam.Client.begin = full
        """,
    )
    check_trained_to_the_end(done, [1, 2, 4, 8], ".*?needed")  # ten failures give four warnings
    assert node.status()["latest"] is None


def test_the_pytorch_quick_start_ends_at_once_when_no_save_can_ever_fit(cluster, tmp_path):
    (node,) = cluster(1, memory="64M").nodes
    done = run_quickstart(
        node,
        tmp_path,
        """
        from ropeteam.torch import _state
        small = _state.training_state
        _state.training_state = lambda *a, **k: {**small(*a, **k), "large": bytes(100_000_000)}
        """,
    )
    assert done.returncode != 0
    needed = "a shard of 96.0 MiB is larger than the arena of 60.0 MiB: the daemon needs --memory 578M"
    assert f"InvalidArgument: {needed} (3 steps x 1 copies x 2 ranks x 96.0 MiB)" in done.stderr


def test_the_pytorch_quick_start_trains_to_its_end_when_its_daemon_dies_for_good(cluster, tmp_path):
    (node,) = cluster(1).nodes
    done = run_quickstart(
        node,
        tmp_path,
        f"""
        from ropeteam.torch import _checkpointer
        save = _checkpointer.save_state
        def save_state(rope, step, *arguments, **options):
            torch.distributed.barrier()  # every rank has saved the step before
            if step == 4 and rope.rank == 0:
                os.kill({node.process.pid}, signal.SIGKILL)
                while os.path.exists("/proc/{node.process.pid}/exe"):
                    pass
            torch.distributed.barrier()
            return save(rope, step, *arguments, **options)
        import torch
        _checkpointer.save_state = save_state
        """,
    )
    node.process.wait(WAIT_S)
    node.process = None
    check_trained_to_the_end(done, [4, 5, 7], "(?:no daemon at the socket|the daemon is gone)")


def test_training_that_is_interrupted_computes_what_uninterrupted_training_does(run_ropeteam, tmp_path):
    pytest.importorskip("torch", reason="torch is not installed")
    small = ["--layers", "2", "--width", "48", "--heads", "4", "--batch", "2", "--block", "16"]
    train = [str(EXAMPLES / "train_gpt.py"), *small]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    for steps, out in ((9, whole), (4, parts), (9, parts)):
        # Each of the two runs is a job of its own, so that it does not restore the other's steps.
        job = ["--job", out.name, "--node", out.name]
        done = run_ropeteam(
            *forked_ranks(2), *train, "--steps", str(steps), "--out", str(out), options=job, GLOO_SOCKET_IFNAME="lo"
        )
        assert done.returncode == 0, done.stderr
    for rank in range(2):
        assert losses(parts / f"loss.{rank}.txt") == losses(whole / f"loss.{rank}.txt")
        assert len((parts / f"loss.{rank}.txt").read_text().splitlines()) == 9  # no step was computed twice
        assert '"event": "loaded", ' in (parts / f"events.{rank}.jsonl").read_text()
