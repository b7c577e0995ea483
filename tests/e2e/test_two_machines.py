# SPDX-License-Identifier: Apache-2.0
"""Runs the commands of docs/two-machines.md, with two nodes of this machine as the two machines."""

from __future__ import annotations

import contextlib
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

import pytest
from harness import ROOT, WAIT_S, environment, free_port

LOAD = """
import ropeteam
with ropeteam.open(incarnation_token="again") as rope:
    step = rope.latest().step
    loaded = rope.load(step)
    print(f"it is step {step}, of {min(len(loaded), 2)} objects or more")
    rope.save(step + 1, {"data": b"x"}, wait=ropeteam.Level.COMMITTED)  # neither leaves before the other has loaded
"""
PAGE = (ROOT / "docs" / "two-machines.md").read_text()


def lines_of(begin: str) -> list[str]:
    return re.findall(rf"^    ({re.escape(begin)}.*)$", PAGE, re.MULTILINE)


def test_the_page_s_lines_train_and_a_machine_that_lost_its_memory_has_its_shard_again():
    pytest.importorskip("torch", reason="torch is not installed")
    first, second = lines_of("NNODES=2 ")
    (forget,) = lines_of("ropeteam clean ")
    assert lines_of("export FIRST=")
    with contextlib.ExitStack() as stack:
        machines = []
        for _ in range(2):
            arenas = pathlib.Path(tempfile.mkdtemp(prefix="ropeteam-", dir="/dev/shm"))
            stack.callback(shutil.rmtree, arenas)
            machines.append(
                environment(
                    FIRST="127.0.0.1", GLOO_SOCKET_IFNAME="lo", ROPETEAM_ARENA_PATH=str(arenas), XDG_RUNTIME_DIR=str(arenas),
                    ROPETEAM_LOG_FILE=str(arenas / "log"), ROPETEAM_COORDINATOR_PORT=str(free_port()),
                )
            )  # fmt: skip
        machines[1]["ROPETEAM_COORDINATOR_PORT"] = machines[0]["ROPETEAM_COORDINATOR_PORT"]
        home = pathlib.Path(machines[0]["ROPETEAM_ARENA_PATH"])
        (key,) = lines_of("(umask 077; openssl ")
        (export,) = lines_of("export ROPETEAM_JOB_KEY_FILE=")
        subprocess.run(key, shell=True, check=True, env={**machines[0], "HOME": str(home)})
        for machine in machines:
            machine["ROPETEAM_JOB_KEY_FILE"] = export.split("=")[1].replace("~", str(home))
        port = str(free_port())

        def type_in(*lines: str) -> list[str]:
            ranks = [
                subprocess.Popen(
                    line.replace("29500", port).replace("--memory 1G", "--memory 64M"), shell=True, executable="/bin/bash",
                    env=machine, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                )
                for line, machine in zip(lines, machines)
            ]  # fmt: skip
            return [rank.communicate(timeout=3 * WAIT_S)[0] for rank in ranks]

        said = type_in(first, second)
        for rank, text in enumerate(said):
            assert f"rank {rank}: steps 1 to 10, " in text and "not safe" not in text, "\n".join(said)
        cleaned = subprocess.run(forget, shell=True, env=machines[1], capture_output=True, text=True)
        assert "job two node node-1" in cleaned.stdout, cleaned.stderr
        # As examples/quickstart.py begins, but without torchrun, which takes long.
        again = [
            f"RANK={rank} WORLD_SIZE=2 {line.split(' -- ')[0]} -- {sys.executable} -c '{LOAD}'"
            for rank, line in enumerate((first, second))
        ]
        said = type_in(*again)
        assert all("it is step 10, of 2 objects or more" in text for text in said), "\n".join(said)
