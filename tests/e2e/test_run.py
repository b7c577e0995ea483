# SPDX-License-Identifier: Apache-2.0
"""What `ropeteam run` chooses, and what it tells its user."""

from __future__ import annotations

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence

import pytest
from harness import ROPETEAM, WAIT_S, environment, free_port, on_a_terminal


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


# Replaces ropeteamd: it writes its options to a file, is ready at once, and ends at a signal. It sets a handler for
# SIGINT, which says that the job is done, because a shell's background processes start with SIGINT ignored.
FAKE_DAEMON = """#!/usr/bin/env python3
import json, os, signal, sys
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda *_: sys.exit(0))
options = dict(word[2:].split("=", 1) for word in sys.argv[1:] if "=" in word)
with open(os.environ["FAKE_OPTIONS"], "w") as file:
    json.dump(options, file)
os.write(int(options["ready-fd"]), b"ropeteamd ready socket /nowhere control x data y\\n")
signal.pause()
"""


def run_with_fake_daemon(tmp_path: pathlib.Path, before: Sequence[str] = (), **variables: str):
    """Runs `ropeteam run` with these variables: its result, and the daemon's options. before: a command that runs
    it."""
    daemon = tmp_path / "daemon"
    daemon.write_text(FAKE_DAEMON)
    daemon.chmod(0o755)
    options = tmp_path / "options.json"
    done = subprocess.run(
        [*before, str(ROPETEAM), "run", "--daemon", str(daemon), "--", "true"],
        env=environment(**variables, FAKE_OPTIONS=str(options)), capture_output=True, text=True, timeout=WAIT_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done, json.loads(options.read_text())


def test_the_end_of_the_command_is_seen_where_sigchld_was_ignored(tmp_path):
    """Some entry points ignore SIGCHLD, and the programs that they start inherit this."""
    ignores = "import os, signal, sys; signal.signal(signal.SIGCHLD, signal.SIG_IGN); os.execv(sys.argv[1], sys.argv[1:])"
    run_with_fake_daemon(tmp_path, before=[sys.executable, "-c", ignores])


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
    warning, stays = told(first)[1:]
    assert stays.startswith("ropeteam run: 64.0 MiB of memory stay in /dev/shm/ropeteam-")
    assert stays.endswith("for the next run of job test; `ropeteam clean --job test` frees what it has on this node")
    assert "replicas 0, no copy of what is saved survives this node" in warning
    assert "--nodes N" in warning
    second = run_ropeteam(sys.executable, "-c", SAVE_ONE)
    assert (second.returncode, second.stdout) == (0, "5\n"), second.stderr
    _, again, former, stays_again = told(second)
    assert (again, stays_again) == (warning, stays)
    assert "a former run of job test has left up to step 5 in " in former
    another = run_ropeteam(sys.executable, "-c", SAVE_ONE, options=["--job", "another"])
    assert another.stdout == "0\n" and len(told(another)) == 3, another.stderr
    pathlib.Path(former.split(" in ")[1].split(":")[0]).unlink()  # the second way that the message names
    fresh = run_ropeteam(sys.executable, "-c", SAVE_ONE)
    assert fresh.stdout == "0\n" and len(told(fresh)) == 3, fresh.stderr
    quiet = run_ropeteam(sys.executable, "-c", SAVE_ONE, options=["--job", "test", "--quiet"])
    assert (quiet.stdout, quiet.stderr) == ("5\n", "")


SECOND_NODE = ["--ordinal", "1", "--nodes", "2", "--listen", "127.0.0.2", "--dead-after-ms", "200"]


def says_on_the_terminal(options: list[str], wanted: str) -> None:
    """Runs `ropeteam run` with a COMMAND that runs until standard error has shown `wanted`."""
    arena = tempfile.TemporaryDirectory(prefix="ropeteam-", dir="/dev/shm")
    with (
        arena,
        subprocess.Popen(
            [str(ROPETEAM), "run", *options, "--memory", "16M", "--arena-path", arena.name,
             "--socket", f"{arena.name}/r.sock", "--", "cat"],
            env=environment(), stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        ) as job,
    ):  # fmt: skip
        seen = []
        while not seen or (seen[-1] and wanted not in seen[-1]):
            seen.append(job.stderr.readline())
        job.stdin.close()
        rest = job.stderr.read()
        assert seen[-1], "".join(seen)
        assert job.wait(WAIT_S) == 0, rest  # COMMAND's exit code


def test_a_daemon_that_the_job_refuses_ends_a_run_that_requires_it(cluster, run_ropeteam, tmp_path):
    options = ["--job", "test", "--chunk-size", "1M", *SECOND_NODE, "--coordinator", cluster(1).coordinator]
    done = run_ropeteam("touch", "started", options=[*options, "--required"])
    assert done.returncode == 3, done.stderr
    why = "node node-1 has --chunk-size 1048576, the coordinator on node node-0 "
    assert why in done.stderr
    assert not (tmp_path / "started").exists()
    says_on_the_terminal(options, why)


def test_a_daemon_without_a_coordinator_ends_a_run_that_requires_it(run_ropeteam, tmp_path):
    coordinator = f"127.0.0.1:{free_port()}"
    options = ["--job", "test", *SECOND_NODE, "--coordinator", coordinator]
    done = run_ropeteam("touch", "started", options=[*options, "--required", "--join-timeout", "1"])
    assert done.returncode == 4, done.stderr
    assert f"no coordinator has answered at {coordinator} for " in done.stderr
    assert not (tmp_path / "started").exists()
    says_on_the_terminal(options, f"ropeteam run: no coordinator has answered at {coordinator} for ")


def test_a_required_daemon_that_joins_is_no_hindrance(run_ropeteam):
    done = run_ropeteam(sys.executable, "-c", SAVE_ONE, options=["--job", "test", "--required"])
    assert (done.returncode, done.stdout) == (0, "0\n"), done.stderr


def test_the_command_is_looked_up_before_the_daemon_starts(tmp_path):
    (tmp_path / "file").write_text("not a program")
    for command, code in (("no-such-command", 127), (str(tmp_path / "file"), 126), (str(tmp_path), 126)):
        done = subprocess.run(
            [str(ROPETEAM), "run", "--daemon", "/bin/false", "--", command],
            env=environment(), capture_output=True, text=True, timeout=WAIT_S,
        )  # fmt: skip
        assert done.returncode == code, done.stderr
        assert done.stderr.startswith(f"ropeteam run: {command}: ")


# Writes "ready" and "alive" at once. The first one then writes nothing more, the second one continues.
HANGING_DAEMON = """#!/usr/bin/env python3
import os, pathlib, signal, sys, time
signal.signal(signal.SIGINT, lambda *_: sys.exit(0))
options = dict(word[2:].split("=", 1) for word in sys.argv[1:] if "=" in word)
os.write(int(options["ready-fd"]), b"ropeteamd ready socket /nowhere control x data y\\nalive\\n")
begun = pathlib.Path(os.environ["FAKE_BEGUN"])
if not begun.exists():
    begun.write_text("")
    time.sleep(1000)
begun.with_name("again").write_text("")
while True:
    time.sleep(0.5)
    os.write(int(options["ready-fd"]), b"alive\\n")
"""


STOP_THE_DAEMON = """
import json, os, signal, subprocess, sys, time
def pid():
    done = subprocess.run([sys.argv[1], "status", "--local", "--json"], capture_output=True, text=True)
    return json.loads(done.stdout)["daemon"]["pid"]
before = pid()
os.kill(before, signal.SIGSTOP)
time.sleep(4)
os.kill(before, signal.SIGCONT)
print(pid() == before)
"""


def test_a_daemon_that_hangs_is_started_again_and_one_that_was_stopped_is_not(run_ropeteam, tmp_path):
    daemon = tmp_path / "daemon"
    daemon.write_text(HANGING_DAEMON)
    daemon.chmod(0o755)
    hanging = subprocess.Popen(
        [str(ROPETEAM), "run", "--daemon", str(daemon), "--watchdog", "2", "--",
         "sh", "-c", f"until [ -e {tmp_path}/again ]; do sleep 0.05; done"],
        env=environment(FAKE_BEGUN=str(tmp_path / "begun")), stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    # The real daemon is stopped for longer than the watchdog's limit, and is alive afterwards.
    stopped = run_ropeteam(
        sys.executable, "-c", STOP_THE_DAEMON, str(ROPETEAM), options=["--job", "test", "--watchdog", "2"]
    )
    said = hanging.communicate(timeout=WAIT_S)[1]
    assert hanging.returncode == 0, said
    assert "ropeteamd has hung for 2 s (--watchdog), killing it" in said
    assert "was ended by signal 9 (Killed), starting it again" in said
    assert (stopped.returncode, stopped.stdout) == (0, "True\n"), stopped.stderr


def test_faulting_memory_in_shows_how_far_it_is(run_ropeteam):
    plain = run_ropeteam("true")
    assert any(line.startswith("arena prefault: 64.0 MiB of 64.0 MiB, ") for line in plain.stderr.splitlines()), plain.stderr
    with tempfile.TemporaryDirectory(prefix="ropeteam-", dir="/dev/shm") as arena:
        code, shown = on_a_terminal(
            [str(ROPETEAM), "run", "--memory", "16M", "--arena-path", arena, "--socket", f"{arena}/r.sock", "--", "true"],
            "stderr", environment(),
        )  # fmt: skip
        assert code == 0 and "arena prefault [####" in shown


BEING_STOPPED = """#!/usr/bin/env python3
import os, signal, sys
options = dict(word[2:].split("=", 1) for word in sys.argv[1:] if "=" in word)
def stop(*_):
    os.write(int(options["ready-fd"]), b"progress prefault 2 3\\n")
    sys.exit(0)
signal.signal(signal.SIGTERM, stop)
os.write(int(options["ready-fd"]), b"progress prefault 1 3\\n")
os.kill(os.getppid(), signal.SIGINT)
while True:
    signal.pause()
"""


def test_an_interrupt_before_the_daemon_is_ready_is_the_last_that_is_said(tmp_path):
    daemon = tmp_path / "daemon"
    daemon.write_text(BEING_STOPPED)
    daemon.chmod(0o755)
    done = subprocess.run(
        [str(ROPETEAM), "run", "--daemon", str(daemon), "--", "true"],
        env=environment(), capture_output=True, text=True, timeout=WAIT_S,
    )  # fmt: skip
    assert done.returncode == 130, done.stderr
    assert done.stderr.splitlines()[-1] == "ropeteam run: signal 2 before ropeteamd was ready"


def test_another_command_line_is_another_job_and_the_same_one_goes_on(run_ropeteam, tmp_path):
    """A sweep: the second value does not begin with the first one's last step."""
    (tmp_path / "sweep.py").write_text(SAVE_ONE)
    found = []
    for value in ("0.1", "0.001", "0.1"):
        done = run_ropeteam(sys.executable, "sweep.py", value, options=["--replicas", "0"])
        assert done.returncode == 0, done.stderr
        assert re.search(r"job sweep-[0-9a-f]{8} \(the command and its directory\)", told(done)[0]), done.stderr
        found.append(done.stdout)
    assert found == ["0\n", "0\n", "5\n"]


def test_a_containers_small_dev_shm_is_told(tmp_path):
    small = tmp_path / "shm"
    small.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(small)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("a file system cannot be mounted here")
    try:
        done = subprocess.run(
            [str(ROPETEAM), "run", "--arena-path", str(small), "--socket", str(tmp_path / "s"), "--", "true"],
            env=environment(), capture_output=True, text=True, timeout=WAIT_S,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        [line] = [line for line in done.stderr.splitlines() if "--shm-size" in line]
        assert f"warning: {small} has 64.0 MiB in all, as in a container" in line
    finally:
        subprocess.run(["umount", "-l", str(small)], check=True, timeout=WAIT_S)


def test_an_empty_job_is_refused_and_not_named_after_the_next_option():
    done = subprocess.run(
        [str(ROPETEAM), "run", "--job", "", "--memory", "16M", "--", "true"],
        env=environment(), capture_output=True, text=True, timeout=WAIT_S,
    )  # fmt: skip
    assert done.returncode == 2 and "ropeteamd: --job is missing" in done.stderr, done.stderr


def test_help_says_what_every_option_means():
    done = subprocess.run([str(ROPETEAM), "run", "--help"], env=environment(), capture_output=True, text=True, timeout=WAIT_S)
    assert done.returncode == 0
    for option, words in {"--required": "exit code", "--chunk-size": "unit of allocation", "--listen": "numeric address"}.items():
        assert option in done.stdout and words in done.stdout
