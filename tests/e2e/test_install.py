# SPDX-License-Identifier: Apache-2.0
"""The commands of README's installation: in .venv, with a prefix of its own, and from a wheel."""

from __future__ import annotations

import pathlib
import re
import subprocess
import sys
import sysconfig
import zipfile

import pytest
from harness import BUILD, ROOT, free_port, usable
from installations import line_of_readme, run, show_torch, train_readme_s_example

SAVE = """
import ropeteam
from ropeteam import _native
with ropeteam.open() as rope:
    rope.save(1, {"data": b"x" * 100_000}, wait=ropeteam.Level.COMMITTED)
    assert rope.load()["data"] == b"x" * 100_000
print(ropeteam.__file__)
print(_native.library().path)
"""

# This script neither opens a client nor registers the package with fsspec.
SAVE_A_FILE = """
import fsspec
with fsspec.open("ropeteam://1/data", "wb") as file:
    file.write(b"x" * 100_000)
fs = fsspec.filesystem("ropeteam")
fs.client.wait(1)
assert fs.cat("ropeteam://latest/data") == b"x" * 100_000
print(fs.ls("ropeteam://", detail=False))
"""


@pytest.fixture(scope="module")
def prefix(finished_build: None, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    prefix = tmp_path_factory.mktemp("prefix")
    done = subprocess.run(
        ["cmake", "--install", str(BUILD), "--prefix", str(prefix)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return prefix


@pytest.fixture(scope="module")
def wheel(finished_build: None, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A wheel with the build's programs; nothing is compiled."""
    pytest.importorskip("scikit_build_core", reason="scikit-build-core is not installed")
    directory = tmp_path_factory.mktemp("wheel")
    built = run(
        sys.executable, "-m", "pip", "wheel", str(ROOT), "--no-deps", "--no-index", "--no-build-isolation",
        "-w", str(directory), "-C", f"build-dir={directory / 'build'}",
        "-C", f"cmake.define.ROPETEAM_PREBUILT={BUILD.resolve()}",
    )  # fmt: skip
    assert built.returncode == 0, built.stdout + built.stderr
    (wheel,) = directory.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def wheel_python(wheel: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The Python of a fresh virtual environment that contains only the wheel."""
    venv = tmp_path_factory.mktemp("fresh") / "venv"
    made = run(sys.executable, "-m", "venv", "--without-pip", str(venv))
    assert made.returncode == 0, made.stderr
    python = venv / "bin" / "python"
    installed = run(
        sys.executable, "-m", "pip", "--python", str(python), "install", "--no-index", str(wheel)
    )
    assert installed.returncode == 0, installed.stdout + installed.stderr
    return python


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
    assert "not safe" not in done.stdout + done.stderr


def test_an_installation_saves_with_nothing_in_the_environment(prefix, own_store, tmp_path):
    program = str(prefix / "bin" / "ropeteam")
    done = run(
        program, "run", "--job", "test", "--", sys.executable, "-c", SAVE, cwd=tmp_path, RANK="0", WORLD_SIZE="1",
        **own_store,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    package, library = (pathlib.Path(line) for line in done.stdout.splitlines())
    assert package.is_relative_to(prefix) and library.is_relative_to(prefix), done.stdout
    # The package finds its library even if only the package is on the path.
    alone = run(sys.executable, "-c", "import ropeteam; print(ropeteam.library_version())", cwd=tmp_path,
                PYTHONPATH=str(package.parents[1]))  # fmt: skip
    assert (alone.returncode, alone.stdout) == (0, "0.1.0\n"), alone.stderr
    assert {path.name for path in (prefix / "bin").iterdir()} == {"ropeteam", "ropeteamd", "ropeteam-bench"}
    assert (library.parent / "libropeteam.so.0").exists(), "what a program that links it asks for"


def is_elf(path: pathlib.Path) -> bool:
    with path.open("rb") as file:
        return file.read(4) == b"\x7fELF"


def test_no_program_looks_for_libraries_in_the_current_directory(prefix):
    """An empty element of a run path means the current directory, and a relative one a place below it."""
    run_path = re.compile(r"\((?:RUNPATH|RPATH)\).*\[(.*)\]")
    looked = 0
    for directory in (BUILD, prefix):
        for path in directory.rglob("*"):
            if path.is_symlink() or not path.is_file() or not is_elf(path):
                continue
            said = run("readelf", "-d", str(path)).stdout
            if "(NEEDED)" not in said:
                continue
            looked += 1
            for elements in run_path.findall(said):
                wrong = [each for each in elements.split(":") if not each.startswith(("/", "$ORIGIN"))]
                assert not wrong, f"{path} looks for libraries in {elements!r}"
    assert looked > 4


def test_what_is_installed_is_hardened(prefix):
    """As checksec reads it: PIE, full RELRO, a stack that is not executable, stack protector, FORTIFY."""
    if "ROPETEAM_SANITIZE:STRING=\n" not in (BUILD / "CMakeCache.txt").read_text():
        pytest.skip("a sanitizer's build is not hardened")
    looked = 0
    for path in prefix.rglob("*"):
        if path.is_symlink() or not path.is_file() or not is_elf(path):
            continue
        looked += 1
        said = run("readelf", "-hldW", "--dyn-syms", str(path)).stdout
        for pattern in (
            r"Type: +DYN",
            r"GNU_RELRO",
            r"\(FLAGS\).*BIND_NOW|\(FLAGS_1\).*NOW",
            r"GNU_STACK.* RW ",
            r"UND __stack_chk_fail@",
            r"UND __(memcpy|memset|snprintf|vsnprintf|read|recv)_chk@",
        ):
            assert re.search(pattern, said), f"{path}: nothing in readelf's output matches {pattern}"
    assert looked >= 4, "ropeteam, ropeteamd, ropeteam-bench, libropeteam.so"


def test_the_installed_bench_finds_library_and_daemon(prefix, tmp_path):
    usable("ofi")  # the baseline of `save` is a loop over libfabric
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


def test_the_header_has_the_version_of_everything(wheel, wheel_python, tmp_path):
    header = (ROOT / "api" / "include" / "ropeteam" / "ropeteam.h").read_text()
    version = ".".join(re.findall(r"#define ROPETEAM_VERSION_(?:MAJOR|MINOR|PATCH) (\d+)", header))
    asked = """if True:
        import importlib.metadata, ropeteam
        print(importlib.metadata.version("ropeteam"), ropeteam.__version__, ropeteam.library_version())"""
    done = run(str(wheel_python), "-c", asked, cwd=tmp_path)
    assert done.stdout.split() == [version] * 3, done.stderr
    for program in ("ropeteam", "ropeteamd"):
        said = run(str(wheel_python.with_name(program)), "--version", cwd=tmp_path)
        assert said.stdout == f"{program} {version}\n", said.stderr
    assert wheel.name.startswith(f"ropeteam-{version}-")


def test_a_wheel_is_for_one_platform_and_any_python(wheel):
    tag = sysconfig.get_platform().replace("-", "_").replace(".", "_")
    assert wheel.name.endswith(f"-py3-none-{tag}.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    package = ROOT / "api" / "python"
    python = {str(path.relative_to(package)) for path in package.glob("ropeteam/**/*.py")}
    programs = {"ropeteam/bin/ropeteam", "ropeteam/bin/ropeteamd", "ropeteam/lib/libropeteam.so"}
    assert names == python | programs | {"ropeteam/py.typed"}


def test_readme_s_example_and_fsspec_work_from_a_wheel(wheel_python, own_store, tmp_path):
    alone = run(str(wheel_python), "-c", "import ropeteam, sys; print('torch' in sys.modules)", cwd=tmp_path)
    assert (alone.returncode, alone.stdout) == (0, "False\n"), alone.stderr
    show_torch(wheel_python)
    train_readme_s_example(wheel_python, own_store, tmp_path)
    # fsspec is a dependency of torch.
    done = run(
        str(wheel_python.with_name("ropeteam")), "run", "--job", "files", "--", str(wheel_python), "-c", SAVE_A_FILE,
        cwd=tmp_path, RANK="0", WORLD_SIZE="1", **own_store,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "['1']\n"), done.stderr
