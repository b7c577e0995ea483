#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Every header compiles alone: as C++20, and the public one as C11 too. Prints the compiler's words for one that does
not and exits 1.

    headers_alone.py ROOT BUILD CXX CC

Include paths are those of BUILD/compile_commands.json, so a header sees what the build lets it see. A header of a
component, or of an optional part, that is not in the build is skipped, with a message. A header that is the first
include of a source of the build is not compiled again: the finished build has shown that it compiles alone.
"""

import concurrent.futures
import json
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys

COMPONENTS = ["core", "transport", "membership", "storage", "node", "api", "bench"]
# Parts that need a library which may be missing.
OPTIONAL = ["transport/ofi", "transport/verbs", "transport/ucx", "membership/standalone", "membership/etcd", "storage/s3"]
PUBLIC = "api/include/ropeteam/ropeteam.h"


# What stands before a source's first line of code.
NO_CODE = re.compile(r"(?:\s|//[^\n]*\n|/\*.*?\*/)*", re.DOTALL)
INCLUDE = re.compile(r'#include "([^"]+)"')


def begins_with(source: pathlib.Path) -> str:
    """The header whose inclusion is the source's first line of code, or ""."""
    text = source.read_text(errors="replace")
    include = INCLUDE.match(text, NO_CODE.match(text).end())
    return include[1] if include else ""


def build_flags(build: pathlib.Path, root: pathlib.Path):
    """The include flags of the whole build, in order, the folders that have a source in it, and the headers that a C++
    source of it begins with."""
    flags, folders, shown = [], set(), set()
    for entry in json.loads((build / "compile_commands.json").read_text()):
        source = pathlib.Path(entry["directory"], entry["file"]).resolve()
        if source.is_relative_to(root) and not source.is_relative_to(build):
            folders.add(source.parent.relative_to(root).as_posix())
            if source.suffix == ".cc":
                shown.add(begins_with(source))
        words = iter(shlex.split(entry["command"]))
        for word in words:
            found = None
            if word == "-isystem":
                found = ["-isystem", next(words)]
            elif word.startswith("-I"):
                found = [word]
            if found and found not in flags:
                flags.append(found)
    return [word for flag in flags for word in flag], folders, shown


def compile_alone(job):
    """Compiles a source that includes the header and nothing else. A header that is itself the source is spared some
    warnings and gets others. Objects are written because ccache, where there is one, remembers only those."""
    header, compiler, suffix, folder = job
    source = folder / (header.replace("/", "_") + suffix)
    source.parent.mkdir(parents=True, exist_ok=True)
    text = f'#include "{header}"\n'
    if not source.exists() or source.read_text() != text:
        source.write_text(text)
    command = [*compiler, "-Wall", "-Wextra", "-Werror", "-c", str(source), "-o", str(source) + ".o"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    return header + (" as C11" if suffix == ".c" else ""), result.returncode, result.stderr


def main() -> int:
    if len(sys.argv) != 5:
        print(__doc__, file=sys.stderr)
        return 2
    root, build = pathlib.Path(sys.argv[1]).resolve(), pathlib.Path(sys.argv[2]).resolve()
    cxx, cc = sys.argv[3:]
    flags, folders, shown = build_flags(build, root)
    launcher = [shutil.which("ccache")] if shutil.which("ccache") else []
    as_cxx = [*launcher, cxx, "-std=c++20", *flags, "-I", str(root)]
    as_c = [*launcher, cc, "-std=c11", "-pedantic", "-I", str(root)]
    sources = build / "headers_alone"
    jobs, passed_over, by_sources = [], [], 0
    for component in COMPONENTS:
        for file in sorted((root / component).rglob("*.h")):
            header = file.relative_to(root).as_posix()
            part = next((part for part in OPTIONAL if header.startswith(part + "/")), component)
            built = any(folder == part or folder.startswith(part + "/") for folder in folders)
            if not built and header != PUBLIC:
                passed_over.append(header)
                continue
            if header in shown:
                by_sources += 1
                continue
            jobs.append((header, as_cxx, ".cc", sources))
    if (root / PUBLIC).exists():
        jobs.append((PUBLIC, as_c, ".c", sources))
    broken = 0
    with concurrent.futures.ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        for header, code, text in pool.map(compile_alone, jobs):
            if code != 0:
                broken += 1
                print(f"{header} does not compile alone:\n{text}")
    if passed_over:
        print("not in this build, passed over: " + ", ".join(passed_over))
    print(f"{len(jobs)} headers, {broken} that do not compile alone; {by_sources} more begin a source of the build")
    return 1 if broken or not jobs else 0


if __name__ == "__main__":
    sys.exit(main())
