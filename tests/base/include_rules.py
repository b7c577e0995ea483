#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Which component may include which. Prints file:line for every include against the rules, and then exits 1.

    include_rules.py ROOT

A dependency rule is a folder and the prefixes that a quoted include below it may start with. The rule of the longest
folder that matches a file applies. In addition, `core` may include only the C++ standard library: what it decides must not
depend on a socket, a thread or a clock.
"""

import pathlib
import re
import sys

SUFFIXES = {".h", ".hh", ".hpp", ".inc", ".c", ".cc", ".cpp"}

# Folder -> prefixes. None: anything but what FORBIDDEN names.
RULES = {
    "core/base": ["core/base/"],
    "core/shard": ["core/base/", "core/shard/"],
    "core": ["core/"],
    "transport": ["transport/", "core/base/"],
    "membership": ["membership/", "core/base/"],
    "storage": ["storage/", "core/base/"],
    "api/include": ["ropeteam/"],
    "api/client": ["api/client/", "api/include/", "ropeteam/", "core/base/", "core/shard/"],
    "api": None,
    "node": None,
    "bench": None,
    "tests": None,
}

# Prefix -> the components that may include it; no other one may, whatever RULES says.
RESERVED = {
    "node/": {"node", "bench", "tests"},
    "bench/": {"bench", "tests"},
    "tests/": {"tests"},
}

# Files of ours that may be included against RESERVED: the commands that export and import make of files what the daemon
# makes, and those that look at arenas' files know their names and locks.
SHARED = {("api/cli/daemon_arena.h", "node/storage_workers.h"), ("api/cli/arenas.h", "node/arena_list.h"), ("api/cli/arenas.h", "node/user_directory.h")}

# Standard headers that bring in what core must be given as values: threads, clocks, files.
CORE_BANNED = {"thread", "chrono", "ctime", "future", "condition_variable", "filesystem", "fstream", "iostream"}
# The one place where core touches the machine: the checksum's kernels.
CORE_ALLOWED_C = {"core/base/checksum_x86.cc": {"immintrin.h"}}

QUOTED = re.compile(r'^\s*#\s*include\s*"([^"]+)"')
ANGLED = re.compile(r"^\s*#\s*include\s*<([^>]+)>")


def rule_of(path: str):
    """The folder in RULES that decides over `path`, or None."""
    folders = [folder for folder in RULES if path.startswith(folder + "/")]
    return max(folders, key=len, default=None)


def judge_quoted(path: str, target: str):
    """Why `path` may not include "target", or None."""
    component = path.split("/", 1)[0]
    for prefix, components in RESERVED.items():
        if target.startswith(prefix) and component not in components and (path, target) not in SHARED:
            return f"{component} may not include {prefix}"
    folder = rule_of(path)
    prefixes = RULES[folder]
    if prefixes is None or target.startswith(tuple(prefixes)):
        return None
    return f"{folder} may include only {', '.join(prefixes)}"


def judge_angled(path: str, target: str):
    """Why `path` may not include <target>, or None. Only core is held to the standard library."""
    if not path.startswith("core/") or target in CORE_ALLOWED_C.get(path, ()):
        return None
    if "/" in target or "." in target:
        return "core may include only the C++ standard library"
    if target in CORE_BANNED:
        return "core has no threads, clocks or files"
    return None


def check_file(root: pathlib.Path, file: pathlib.Path):
    path = file.relative_to(root).as_posix()
    text = file.read_text(encoding="utf-8", errors="replace")
    for number, line in enumerate(text.splitlines(), start=1):
        quoted, angled = QUOTED.match(line), ANGLED.match(line)
        why = None
        if quoted:
            why = judge_quoted(path, quoted.group(1))
        elif angled:
            why = judge_angled(path, angled.group(1))
        if why:
            yield f"{path}:{number}: {line.strip()}: {why}"


def main() -> int:
    if len(sys.argv) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    root = pathlib.Path(sys.argv[1]).resolve()
    components = sorted({folder.split("/", 1)[0] for folder in RULES})
    files = [file for component in components for file in sorted((root / component).rglob("*"))
             if file.suffix in SUFFIXES and "include_rules_fixture" not in file.relative_to(root).parts]
    if not files:
        print(f"no source files under {root}", file=sys.stderr)
        return 2
    broken = [message for file in files for message in check_file(root, file)]
    print("\n".join(broken + [f"{len(files)} files, {len(broken)} includes against the rules"]))
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
