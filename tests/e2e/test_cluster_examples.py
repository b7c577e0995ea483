# SPDX-License-Identifier: Apache-2.0
"""Checks the files of examples/ that start a job on a cluster, without a cluster."""

from __future__ import annotations

import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile

import pytest
from harness import ROOT, ROPETEAM, ROPETEAMD, WAIT_S, ask, environment, free_port

EXAMPLES = ROOT / "examples"


def documents(name):
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
    return list(yaml.safe_load_all((EXAMPLES / name).read_text()))


@pytest.mark.parametrize("name", ["skypilot.yaml", "slurm.sbatch", "kubernetes.yaml"])
def test_every_option_is_one_of_ropeteam_run(name):
    if not ROPETEAM.exists():
        pytest.skip(f"{ROPETEAM} is not built")
    known = set(re.findall(r"(?m)^ +(--[a-z-]+)", ask("run", "--help").stdout))
    text = re.sub(r"(?m)^ *#.*", "", (EXAMPLES / name).read_text())
    (line,) = re.findall(r"ropeteam,? run(.*?) --[ \]]", text, re.DOTALL)
    used = set(re.findall(r"--[a-z-]+", line))
    assert used and used <= known, used - known


# The long options of sbatch(1) that the script may use, each with a pattern of its value; "": it has no
# value.
SBATCH = {
    "job-name": r"[\w-]+",
    "nodes": r"\d+(-\d+)?",
    "ntasks-per-node": r"\d+",
    "gpus-per-node": r"(\w+:)?\d+",
    "exclusive": "",
    "requeue": "",
}
# Runs the step on the two nodes of the allocation, as Slurm would. If one fails, the other is ended.
SRUN = """
for option in "$@"; do
  case "$option" in
    --kill-on-bad-exit=1) shift ;;
    -*) echo "srun: unknown option $option" >&2; exit 2 ;;
    *) break ;;
  esac
done
for node in 0 1; do
  mkdir -p "$ARENAS/$node"
  SLURM_NODEID=$node SLURMD_NODENAME=host-$node ROPETEAM_LISTEN=127.0.0.$((node + 1)) \\
    ROPETEAM_ARENA_PATH=$ARENAS/$node ROPETEAM_SOCKET=$HOME/$node.sock \\
    ROPETEAM_LOG_FILE=$HOME/$node.log "$@" &
done
status=0
for node in 0 1; do
  wait -n || { status=1; kill $(jobs -p) 2>/dev/null; }
done
exit $status
"""
SCONTROL = """
[ "$*" = "show hostnames 127.0.0.[1-2]" ] && printf '127.0.0.1\\n127.0.0.2\\n'
"""

# Replaces torchrun at the job's second start, because torchrun itself imports torch, which takes time.
TORCHRUN = """#!/bin/bash
exec env RANK=$SLURM_NODEID WORLD_SIZE=2 {python} "${{@: -1}}"
"""


def test_the_slurm_script_asks_for_what_sbatch_knows():
    script = EXAMPLES / "slurm.sbatch"
    assert subprocess.run(["bash", "-n", str(script)]).returncode == 0
    lines = script.read_text().splitlines()
    options = [line for line in lines if line.startswith("#SBATCH")]
    asked = [re.fullmatch(r"#SBATCH --([a-z-]+)(?:=(.*))?", line) for line in options]
    assert asked and all(each and re.fullmatch(SBATCH[each[1]], each[2] or "") for each in asked)
    # sbatch reads options only before the first command.
    first = next(number for number, line in enumerate(lines) if line and not line.startswith("#"))
    assert not any(line.startswith("#SBATCH") for line in lines[first:])


def test_the_slurm_script_runs_on_two_nodes_and_goes_on_when_one_is_replaced(tmp_path):
    pytest.importorskip("torch", reason="torch is not installed")
    if shutil.which("openssl") is None:
        pytest.skip("no openssl here")
    programs = tmp_path / "bin"
    programs.mkdir()
    for program, text in {"srun": SRUN, "scontrol": SCONTROL}.items():
        (programs / program).write_text(f"#!/bin/bash{text}")
        (programs / program).chmod(0o755)
    home = pathlib.Path(tempfile.mkdtemp(prefix="ropeteam-", dir="/tmp"))
    arenas = pathlib.Path(tempfile.mkdtemp(prefix="ropeteam-", dir="/dev/shm"))

    def run() -> subprocess.CompletedProcess[str]:
        env = environment(
            HOME=str(home), ARENAS=str(arenas), SLURM_JOB_ID="77", SLURM_NNODES="2", SLURM_GPUS_ON_NODE="1",
            SLURM_JOB_NODELIST="127.0.0.[1-2]", MASTER_PORT=str(free_port()), ROPETEAM_MEMORY="64M",
            ROPETEAM_COORDINATOR_PORT=str(free_port()), ROPETEAMD=str(ROPETEAMD), GLOO_SOCKET_IFNAME="lo",
        )  # fmt: skip
        env["PATH"] = f"{programs}:{env['PATH']}"
        with subprocess.Popen(
            ["bash", str(EXAMPLES / "slurm.sbatch")], env=env, cwd=ROOT, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        ) as job:  # fmt: skip
            try:
                said = job.communicate(timeout=3 * WAIT_S)
            except subprocess.TimeoutExpired:
                os.killpg(job.pid, signal.SIGKILL)  # also kills the nodes
                raise
        return subprocess.CompletedProcess(job.args, job.returncode, *said)

    try:
        first = run()
        assert first.returncode == 0, first.stderr
        shutil.rmtree(arenas / "0")  # as a new machine: only the other one has rank 0's shard
        (programs / "torchrun").write_text(TORCHRUN.format(python=sys.executable))
        (programs / "torchrun").chmod(0o755)
        second = run()  # a requeued job keeps its number, and therefore its key
        assert (home / ".ropeteam-77.key").stat().st_mode & 0o77 == 0
    finally:
        shutil.rmtree(arenas, ignore_errors=True)
        shutil.rmtree(home, ignore_errors=True)
    for done, steps in ((first, "1 to 10"), (second, "11 to 20")):
        assert done.returncode == 0, done.stderr
        assert sorted(re.findall(rf"rank (\d): steps {steps}", done.stdout)) == ["0", "1"], done.stdout
    assert "job 77" in first.stderr


def test_the_kubernetes_manifests_fit_together():
    service, job = documents("kubernetes.yaml")
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    env = {entry["name"]: entry.get("value") for entry in container["env"]}
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    assert pod["subdomain"] == service["metadata"]["name"]
    assert env["PET_MASTER_ADDR"] == f"{job['metadata']['name']}-0.{service['metadata']['name']}"
    assert int(env["PET_NNODES"]) == job["spec"]["completions"] == job["spec"]["parallelism"]
    assert {mount["name"] for mount in container["volumeMounts"]} == {each["name"] for each in pod["volumes"]}
    uid, gid = map(int, re.findall(r"(?m)^USER (\d+):(\d+)$", (EXAMPLES / "Dockerfile").read_text())[-1])
    assert uid != 0
    assert pod["securityContext"] == {"runAsNonRoot": True, "runAsUser": uid, "runAsGroup": gid, "fsGroup": gid}
    assert container["securityContext"] == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    validate = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    for document in (service, job):
        validate.validate(document, validate.latest_version(), strict=True)


def test_the_skypilot_task_s_script_is_one():
    (task,) = documents("skypilot.yaml")  # tests/frameworks/test_sky.py gives it to SkyPilot
    assert task["secrets"] == {"ROPETEAM_JOB_KEY": None} and "SKYPILOT_NODE_RANK" in task["run"]
    done = subprocess.run(["bash", "-n", "-c", task["run"]], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
