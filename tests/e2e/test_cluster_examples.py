# SPDX-License-Identifier: Apache-2.0
"""The files of examples/ that start a job on a cluster, checked without one."""

from __future__ import annotations

import os
import pathlib
import re
import shutil
import subprocess
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


def test_the_slurm_script_runs(tmp_path):
    """As one node: `srun` is the command itself, with what Slurm would set for it."""
    pytest.importorskip("torch", reason="torch is not installed")
    if shutil.which("openssl") is None:
        pytest.skip("no openssl here")
    programs = tmp_path / "bin"
    programs.mkdir()
    for program, text in {
        "srun": 'while [ "${1#-}" != "$1" ]; do shift; done\nexport SLURM_NODEID=0\nexec "$@"',
        "scontrol": "echo 127.0.0.1",
    }.items():
        (programs / program).write_text(f"#!/bin/sh\n{text}\n")
        (programs / program).chmod(0o755)
    arena = pathlib.Path(tempfile.mkdtemp(prefix="ropeteam-", dir="/dev/shm"))
    env = environment(
        HOME=str(tmp_path), SLURM_JOB_ID="77", SLURM_NNODES="1", SLURM_JOB_NODELIST="node[1]", SLURM_GPUS_ON_NODE="1",
        MASTER_PORT=str(free_port()), ROPETEAMD=str(ROPETEAMD), ROPETEAM_MEMORY="64M", ROPETEAM_ARENA_PATH=str(arena),
        ROPETEAM_SOCKET=str(tmp_path / "s"), ROPETEAM_LOG_FILE=str(tmp_path / "log"), GLOO_SOCKET_IFNAME="lo",
    )  # fmt: skip
    env["PATH"] = f"{programs}:{env['PATH']}"
    try:
        runs = [
            subprocess.run(
                ["bash", str(EXAMPLES / "slurm.sbatch")], env=env, cwd=ROOT, stdin=subprocess.DEVNULL,
                capture_output=True, text=True, timeout=WAIT_S,
            )
            for _ in range(2)  # a job that is requeued has its number, and its key
        ]  # fmt: skip
    finally:
        shutil.rmtree(arena, ignore_errors=True)
    for run, steps in zip(runs, ("1 to 10", "11 to 20")):
        assert run.returncode == 0, run.stderr
        assert f"rank 0: steps {steps}" in run.stdout, run.stdout + run.stderr
    assert "job 77" in runs[0].stderr and (tmp_path / ".ropeteam-77.key").stat().st_mode & 0o77 == 0


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
    validate = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    for document in (service, job):
        validate.validate(document, validate.latest_version(), strict=True)


def test_the_skypilot_task_is_one():
    (task,) = documents("skypilot.yaml")
    assert task["secrets"] == {"ROPETEAM_JOB_KEY": None} and "SKYPILOT_NODE_RANK" in task["run"]
    done = subprocess.run(["bash", "-n", "-c", task["run"]], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    sky = pytest.importorskip("sky", reason="skypilot is not installed")
    made = sky.Task.from_yaml_config(task, secrets_overrides=[("ROPETEAM_JOB_KEY", "k")])
    assert made.num_nodes == 4 and all(resources.use_spot for resources in made.resources)


def instructions():
    """The Dockerfile's, in order: (keyword, text)."""
    text = (EXAMPLES / "Dockerfile").read_text().replace("\\\n", " ")
    lines = [line.split(maxsplit=1) for line in text.splitlines() if line and not line.startswith("#")]
    return [(line[0], line[1]) for line in lines]


def dependencies(packages):
    """All packages that come with these, by what is installed here."""
    found, todo = set(), list(packages)
    while todo:
        package = todo.pop()
        if package in found:
            continue
        shown = subprocess.run(["dpkg-query", "-W", "-f=${Depends}", package], capture_output=True, text=True)
        if shown.returncode == 0:
            found.add(package)
            todo += re.findall(r"(?:^|, |\| )([a-z0-9.+-]+)", shown.stdout)
    return found


def test_the_image_has_what_the_programs_load():
    steps = instructions()
    assert {keyword for keyword, _ in steps} <= {"FROM", "RUN", "COPY", "WORKDIR", "ENV", "CMD"}
    for keyword, text in steps:
        if keyword == "RUN":
            assert subprocess.run(["bash", "-n", "-c", text]).returncode == 0, text
        elif keyword == "COPY" and not text.startswith("--from"):
            assert all((ROOT / source).exists() for source in text.split()[:-1]), text
    release = pathlib.Path("/etc/os-release").read_text()
    if "VERSION_ID=\"12\"" not in release or "ID=debian" not in release or not ROPETEAMD.exists():
        pytest.skip("not a built tree on Debian 12, which the image is of")
    (install,) = [text for _, text in steps[1:] if "libfabric1" in text]
    has = dependencies(re.findall(r"[a-z0-9.+-]+", install.partition("recommends")[2].partition("&&")[0]))
    linked = subprocess.run(["ldd", ROPETEAMD, ROPETEAM], capture_output=True, text=True, check=True).stdout
    needed = subprocess.run(
        ["dpkg", "-S", *sorted({os.path.realpath(path) for path in re.findall(r"=> (/\S+)", linked)})],
        capture_output=True, text=True,
    )  # fmt: skip
    owners = {line.split(":")[0] for line in needed.stdout.splitlines()}
    assert "libfabric1" in owners and owners <= has, owners - has
