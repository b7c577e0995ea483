# SPDX-License-Identifier: Apache-2.0
"""What `ropeteam run` chooses, and what it tells whoever started it."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
import tempfile

import pytest
from harness import ROPETEAM, WAIT_S, environment


def told(done: subprocess.CompletedProcess[str]) -> list[str]:
    return [line for line in done.stderr.splitlines() if line.startswith("ropeteam run:")]


def test_with_a_config_file_the_daemon_logs_where_it_does_without(tmp_path):
    job = pathlib.Path(tempfile.mkdtemp(prefix="config-", dir="/dev/shm"))
    log = pathlib.Path(f"/tmp/ropeteam-{os.geteuid()}/{job.name}-node-0.log")
    config = tmp_path / "daemon.conf"
    config.write_text(
        f'# a job of its own\njob = "{job.name}"  # and no node\narena-path = "{job}"\nmemory = 64M\n'
    )
    try:
        done = subprocess.run(
            [str(ROPETEAM), "run", "--config", str(config), "--remove-arena-at-exit", "--", "sh", "-c", "echo $ROPETEAM_JOB"],
            env=environment(), capture_output=True, text=True, timeout=WAIT_S,
        )  # fmt: skip
        assert (done.returncode, done.stdout) == (0, f"{job.name}\n"), done.stderr
        assert " info " not in done.stderr, "the daemon's log belongs into its file"
        assert told(done)[0] == (
            f"ropeteam run: the daemon's settings {config} (--config), log-file {log} (default)"
        )
        assert "ready socket" in log.read_text()
        elsewhere = tmp_path / "elsewhere.log"
        config.write_text(config.read_text() + f"log-file = '{elsewhere}'\n")
        log.unlink()
        done = subprocess.run(
            [str(ROPETEAM), "run", "--config", str(config), "--remove-arena-at-exit", "--", "true"],
            env=environment(), capture_output=True, text=True, timeout=WAIT_S,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert "ready socket" in elsewhere.read_text() and not log.exists()
    finally:
        log.unlink(missing_ok=True)
        job.rmdir()


# Stands in for ropeteamd: leaves its arguments, is ready at once, ends when told to.
FAKE_DAEMON = """#!/usr/bin/env python3
import json, os, signal, sys
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
options = dict(word[2:].split("=", 1) for word in sys.argv[1:] if "=" in word)
with open(os.environ["FAKE_OPTIONS"], "w") as file:
    json.dump(options, file)
os.write(int(options["ready-fd"]), b"ropeteamd ready socket /nowhere control x data y\\n")
signal.pause()
"""


def run_with_fake_daemon(tmp_path: pathlib.Path, **variables: str):
    """`ropeteam run` with these variables: how it ended, and the options that the daemon got."""
    daemon = tmp_path / "daemon"
    daemon.write_text(FAKE_DAEMON)
    daemon.chmod(0o755)
    options = tmp_path / "options.json"
    done = subprocess.run(
        [str(ROPETEAM), "run", "--daemon", str(daemon), "--", "true"],
        env=environment(**variables, FAKE_OPTIONS=str(options)), capture_output=True, text=True, timeout=WAIT_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done, json.loads(options.read_text())


@pytest.mark.parametrize(
    ("variables", "nodes", "ordinal"),
    [
        ({"PET_NNODES": "2", "PET_NODE_RANK": "1"}, "2", "1"),
        ({"PET_NNODES": "3:8", "PET_NODE_RANK": "2"}, "3", "2"),
        ({"PET_NNODES": "2", "PET_NODE_RANK": "1", "NNODES": "5", "NODE_RANK": "4"}, "2", "1"),
        ({"PET_NNODES": "4", "PET_NODE_RANK": "3", "GROUP_WORLD_SIZE": "2", "GROUP_RANK": "0"}, "2", "0"),
        ({"PET_NNODES": "4", "PET_NODE_RANK": "3", "ROPETEAM_NODES": "2", "ROPETEAM_ORDINAL": "1"}, "2", "1"),
    ],
)
def test_what_torchrun_reads_is_read_in_the_documented_order(tmp_path, variables, nodes, ordinal):
    _, given = run_with_fake_daemon(tmp_path, **variables, PET_MASTER_ADDR="127.0.0.1", MASTER_ADDR="10.0.0.1")
    assert (given["nodes"], given["ordinal"], given["coordinator"]) == (nodes, ordinal, "127.0.0.1:29600")


def test_a_number_of_nodes_that_nobody_gave_is_left_to_the_running_job(tmp_path):
    done, given = run_with_fake_daemon(tmp_path)
    assert "nodes" not in given, "the daemon would take a default for the user's and refuse a job of more nodes"
    assert "nodes 1 (default, or the running job's)" in told(done)[0]
    done, given = run_with_fake_daemon(tmp_path, ROPETEAM_NODES="1")
    assert given["nodes"] == "1"
    assert "nodes 1 (ROPETEAM_NODES)" in told(done)[0]


def test_a_number_of_nodes_that_makes_no_sense_is_named_with_its_variable():
    done = subprocess.run(
        [str(ROPETEAM), "run", "--", "true"],
        env=environment(PET_NNODES="few"), capture_output=True, text=True, timeout=WAIT_S,
    )  # fmt: skip
    assert done.returncode == 2
    assert 'PET_NNODES is "few", not a number of nodes' in done.stderr


SAVE_ONE = """
import ropeteam
with ropeteam.open(rank=0, world_size=1) as rope:
    found = rope.latest()
    print(found.step if found else 0)
    rope.save((found.step if found else 0) + 5, {"data": b"x"}, wait=ropeteam.Level.COMMITTED)
"""


def test_one_node_is_told_that_no_copy_survives_it_and_that_a_former_run_is_there(run_ropeteam):
    first = run_ropeteam(sys.executable, "-c", SAVE_ONE)
    assert (first.returncode, first.stdout) == (0, "0\n"), first.stderr
    (warning,) = told(first)[1:]
    assert "replicas 0, no copy of what is saved survives this node" in warning
    assert "--nodes N" in warning
    second = run_ropeteam(sys.executable, "-c", SAVE_ONE)
    assert (second.returncode, second.stdout) == (0, "5\n"), second.stderr
    _, again, former = told(second)
    assert again == warning
    assert "a former run of job test has left up to step 5 in " in former
    another = run_ropeteam(sys.executable, "-c", SAVE_ONE, options=["--job", "another"])
    assert another.stdout == "0\n" and len(told(another)) == 2, another.stderr
    pathlib.Path(former.split(" in ")[1].split(":")[0]).unlink()  # the other way that it names
    anew = run_ropeteam(sys.executable, "-c", SAVE_ONE)
    assert anew.stdout == "0\n" and len(told(anew)) == 2, anew.stderr
    quiet = run_ropeteam(sys.executable, "-c", SAVE_ONE, options=["--job", "test", "--quiet"])
    assert (quiet.stdout, quiet.stderr) == ("5\n", "")
