#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks a Promela model with spin, exhaustively, and prints the result and the number of states.

    check.py [--expect-error] MODEL [NAME[=VALUE] ...]

The names are defined while the model is read, as by `spin -D`. Without --expect-error every state must hold. With it
spin must find one that does not: the model has been told to leave out a rule that the protocol needs. The trail of an
error that was not expected is printed. Exit status 77: spin is not installed.
"""

import argparse
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

DEPTH_MAX = 100_000     # steps of one run; reaching it is a failure, since states behind it are not seen
MEMORY_MAX_MB = 2000
SECONDS_MAX = 280
SKIPPED = 77
# What the assertions of the models say, by a part of the expression that spin prints.
MEANINGS = {
    "!(decided)": "a node acts by a former lease after the successor has decided",
    "!(reused)": "a put lands in memory that has been used again",
    "newest_act<=": "a leader decides after a leader of a newer epoch has",
    "told==0": "a step told COMMITTED is lost",
    "(step>=told)": "an incarnation is told to restore a step older than one told COMMITTED",
    "known_pin[n]>=told": "the next incarnation is told to restore a step older than one told COMMITTED",
    ">=m)": "a step is told COMMITTED after the next incarnation was told to restore an older one",
    "(told_pin==": "two ranks of one incarnation are told different steps",
}


def run(command, folder, **options):
    return subprocess.run(command, cwd=folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **options)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=pathlib.Path)
    parser.add_argument("--expect-error", action="store_true")
    parser.add_argument("names", nargs="*")
    args = parser.parse_args()
    if shutil.which("spin") is None:
        print("skipped: spin is not installed (Debian's package spin)")
        return SKIPPED
    compiler = shutil.which("cc") or shutil.which("gcc")
    defines = ["-D" + name for name in args.names]
    what = " ".join([args.model.name] + defines)

    with tempfile.TemporaryDirectory(prefix="ropeteam-model-") as folder:
        shutil.copy(args.model, folder)
        generated = run(["spin", *defines, "-a", args.model.name], folder)
        if generated.returncode != 0 or not (pathlib.Path(folder) / "pan.c").exists():
            print(f"{what}: spin cannot read the model\n{generated.stdout}")
            return 1
        # SAFETY: assertions only, no cycles. Every state is stored whole: no hashing, no bit states.
        # An error is found early; optimizing the checker would take longer than running it.
        optimize = "-O0" if args.expect_error else "-O2"
        compiled = run([compiler, optimize, "-w", "-DSAFETY", f"-DMEMLIM={MEMORY_MAX_MB}", "-o", "pan", "pan.c"], folder)
        if compiled.returncode != 0:
            print(f"{what}: the checker cannot be compiled\n{compiled.stdout}")
            return 1
        try:
            # -E: a run may end anywhere. -n: no report of code that was not reached.
            result = run(["./pan", f"-m{DEPTH_MAX}", "-E", "-n"], folder, timeout=SECONDS_MAX).stdout
        except subprocess.TimeoutExpired:
            print(f"{what}: not finished within {SECONDS_MAX} s")
            return 1

        def number(pattern, default="?"):
            found = re.search(pattern, result)
            return found.group(1) if found else default

        states = int(number(r"(\d+) states, stored", "0"))
        errors = int(number(r"errors: (\d+)", "-1"))
        cost = (f"{states:,} states stored, {number(r'elapsed time ([0-9.e+]+) seconds')} s, "
                f"{number(r'([0-9.]+).total actual memory')} MB")
        complete = "Search not completed" not in result and "max search depth too small" not in result
        assertion = number(r"assertion violated (.*) \(at depth", None)
        meaning = next((text for part, text in MEANINGS.items() if part in (assertion or "")), assertion)
        if args.expect_error:
            good = errors == 1 and assertion is not None
            print(f"{what}: {'found, as it must be: ' + meaning if good else 'NO ERROR IS FOUND'}; {cost}")
            return 0 if good else 1
        good = errors == 0 and complete and states > 0
        if good:
            print(f"{what}: every state holds; {cost}")
            return 0
        print(f"{what}: FAILED; {cost}\n{result}")
        if errors > 0:
            print(run(["spin", *defines, "-t", "-p", args.model.name], folder).stdout[-20000:])
        return 1


if __name__ == "__main__":
    sys.exit(main())
