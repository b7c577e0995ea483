# SPDX-License-Identifier: Apache-2.0
"""examples/Dockerfile without Docker: hadolint checks it, and its steps run here.

A stage's files are in a directory. Steps that download are not run: the packages of an apt-get step are
compared with those installed here, and torch is the one of this Python.
"""

from __future__ import annotations

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest
from harness import BUILD, ROOT, ROPETEAM, ROPETEAMD, free_port
from installations import run, show_torch

IMAGE_USER = "1000:1000"
DOCKERFILE = ROOT / "examples" / "Dockerfile"
NO_RECOMMENDS = "apt-get install -y --no-install-recommends "


def instructions(text: str) -> list[tuple[str, str]]:
    """The instructions of a Dockerfile in order: (keyword, the rest of its line)."""
    lines = re.sub(r"(?m)^ *#.*\n", "", text).replace("\\\n", " ").splitlines()
    return [(keyword, rest.strip()) for keyword, _, rest in (line.partition(" ") for line in lines if line)]


def named_packages(step: str) -> set[str]:
    """The packages that a RUN installs with apt-get."""
    return set(step.partition(NO_RECOMMENDS)[2].partition("&&")[0].split())


def of_debian_12() -> bool:
    release = pathlib.Path("/etc/os-release").read_text()
    return 'VERSION_ID="12"' in release and "ID=debian" in release


def installed_dependencies(packages: set[str]) -> set[str]:
    """The installed ones of these packages and of all their dependencies."""
    found: set[str] = set()
    todo = list(packages)
    while todo:
        package = todo.pop()
        if package in found:
            continue
        shown = subprocess.run(["dpkg-query", "-W", "-f=${Depends}", package], capture_output=True, text=True)
        if shown.returncode == 0:
            found.add(package)
            todo += re.findall(r"(?:^|, |\| )([a-z0-9.+-]+)", shown.stdout)
    return found


def files_of_the_repository() -> list[str]:
    listed = subprocess.run(
        ["git", "ls-files", "-coz", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    return [name for name in listed.split("\0") if name and (ROOT / name).is_file()]


class Stage:
    """A stage of the image: its /PATH is `files`/PATH here."""

    def __init__(self, files: pathlib.Path, path: str) -> None:
        self.files = files
        self.workdir = files
        self.workdir.mkdir()
        self.environment = {"PATH": path}
        self.shell = ["/bin/sh", "-c"]

    def step(self, keyword: str, text: str, stages: dict[str, Stage]) -> None:
        if keyword == "COPY":
            self.copy(text, stages)
        elif keyword == "ENV":
            self.env(text)
        elif keyword == "WORKDIR":
            self.enter(text)
        elif keyword == "USER":
            assert text == IMAGE_USER
        elif keyword == "SHELL":
            self.shell = json.loads(text)
        elif keyword == "RUN":
            self.run(text)
        else:
            pytest.fail(f"{keyword} is not known here")

    def here(self, text: str) -> str:
        return re.sub(r"(?<![^\s=:])/(?=\w)", f"{self.files}/", text)

    def env(self, text: str) -> None:
        name, _, value = self.here(text).partition("=")
        self.environment[name] = value.replace(f"${name}", self.environment.get(name, ""))

    def enter(self, text: str) -> None:
        self.workdir = pathlib.Path(self.here(text))
        self.workdir.mkdir(parents=True)

    def copy(self, text: str, stages: dict[str, Stage]) -> None:
        words = text.split()
        origin = words.pop(0).partition("=")[2] if words[0].startswith("--from") else ""
        *sources, last = words
        target = self.workdir / self.here(last)
        for source in sources:
            if origin:
                shutil.copytree(stages[origin].here(source), target)
                continue
            whole = (ROOT / source).is_dir()
            every = files_of_the_repository()
            named = [name for name in every if source in (".", name) or name.startswith(f"{source}/")]
            assert named, f"there is no {source} in the repository"
            for name in named:
                path = target / os.path.relpath(name, source) if whole else target
                path.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / name, path)

    def run(self, text: str) -> None:
        if "apt-get" in text:
            assert NO_RECOMMENDS in text
            assert subprocess.run([self.shell[0], "-n", "-c", text]).returncode == 0, text
            if "xargs" in text:
                listed = pathlib.Path(self.here("/tmp/packages")).read_text()
                assert listed == (ROOT / "scripts" / "lib" / "packages").read_text()
            return
        if "torch==" in text:
            requirements = (ROOT / "scripts" / "lib" / "requirements.txt").read_text().split()
            assert text.split()[-1] in requirements, "another torch than the tests'"
            python = self.files / "venv" / "bin" / "python"
            show_torch(python)
            launcher = python.with_name("torchrun")
            launcher.write_text(f"#!{python}\nfrom torch.distributed.run import main\nmain()\n")
            launcher.chmod(0o755)
            return
        if text.startswith("useradd"):
            return  # this machine gets no new user
        # Nothing is downloaded or compiled: the wheel contains the build under test.
        quick = {"PIP_NO_INDEX": "1", "PIP_NO_BUILD_ISOLATION": "0"}
        quick["CMAKE_ARGS"] = f"-DROPETEAM_PREBUILT={BUILD.resolve()}"
        done = run(*self.shell, self.here(text), cwd=self.workdir, **self.environment, **quick)
        assert done.returncode == 0, text + done.stdout + done.stderr


def test_the_linter_has_nothing_to_say():
    hadolint = pathlib.Path(sys.executable).with_name("hadolint")
    if not hadolint.exists():
        pytest.skip("hadolint is not installed")
    said = run(str(hadolint), "--no-color", str(DOCKERFILE))
    assert (said.returncode, said.stdout) == (0, ""), said.stdout + said.stderr


def test_the_image_is_built_from_the_repository_alone():
    left_out = DOCKERFILE.with_name("Dockerfile.dockerignore").read_text().split()
    here = [line.strip("/") for line in (ROOT / ".gitignore").read_text().split() if line.startswith("/")]
    assert {*here, ".git"} <= set(left_out)


def test_the_steps_make_an_image_that_trains(finished_build, own_store, tmp_path):
    pytest.importorskip("scikit_build_core", reason="scikit-build-core is not installed")
    path = f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}"
    stages: dict[str, Stage] = {}
    command: list[str] = []
    for keyword, text in instructions(DOCKERFILE.read_text()):
        if keyword == "FROM":
            base, _, name = text.partition(" AS ")
            assert base == "debian:12-slim" or base in stages
            stage = stages[base] if base in stages else Stage(tmp_path / f"stage-{len(stages)}", path)
            stages[name] = stage
        elif keyword == "CMD":
            command = json.loads(text)
        else:
            stage.step(keyword, text, stages)
    environment = {**stage.environment, **own_store, "GLOO_SOCKET_IFNAME": "lo", "ROPETEAM_JOB": "image"}
    done = run(*command, cwd=stage.workdir, PET_MASTER_PORT=str(free_port()), **environment)
    assert done.returncode == 0, done.stderr
    assert sorted(re.findall(r"rank (\d): steps 1 to 10", done.stdout)) == ["0", "1"], done.stdout
    asked = "command -v ropeteam; ropeteam --version; ropeteamd --version"
    said = run("sh", "-c", asked, cwd=stage.workdir, **environment).stdout
    assert said == f"{stage.files}/venv/bin/ropeteam\nropeteam 0.1.0\nropeteamd 0.1.0\n"


def test_the_image_does_not_run_as_root_and_that_for_skypilot_does():
    _, *stages = re.split(r"(?m)^FROM ", DOCKERFILE.read_text())[1:]
    assert [stage.split("\n")[0] for stage in stages] == ["debian:12-slim AS skypilot", "skypilot"]
    users = [[text for keyword, text in instructions(stage) if keyword == "USER"] for stage in stages]
    assert users == [[], [IMAGE_USER]]
    assert f"useradd --uid {IMAGE_USER.split(':')[0]} --create-home " in stages[-1], "torch asks for its name and home"


def test_the_image_has_what_the_programs_load():
    if not of_debian_12() or not ROPETEAMD.exists():
        pytest.skip("not a built tree on Debian 12, which the image is of")
    steps = [text for keyword, text in instructions(DOCKERFILE.read_text()) if keyword == "RUN"]
    (named,) = [named_packages(step) for step in steps if "libfabric1" in step]
    has = installed_dependencies(named)
    assert named <= has, f"not packages of Debian 12, or not installed: {named - has}"
    linked = subprocess.run(["ldd", ROPETEAMD, ROPETEAM], capture_output=True, text=True, check=True).stdout
    needed = subprocess.run(
        ["dpkg", "-S", *sorted({os.path.realpath(path) for path in re.findall(r"=> (/\S+)", linked)})],
        capture_output=True, text=True,
    )  # fmt: skip
    owners = {line.split(":")[0] for line in needed.stdout.splitlines()}
    assert "libfabric1" in owners and owners <= has, owners - has
