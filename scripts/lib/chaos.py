# SPDX-License-Identifier: Apache-2.0
"""The program behind scripts/chaos: a seeded schedule of faults against six daemons, with checks."""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import random
import shutil
import statistics
import sys
import time
from typing import Any

from chaos_faults import ETCD_FAULTS, FAKETIME, FAULTS, KILLS
from chaos_host import Stuck
from chaos_nodes import Cluster
from chaos_rounds import NODES, Chaos, Tally
from demo_nodes import Paths

ROOT = pathlib.Path(__file__).resolve().parents[2]


def worst(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} / {max(values):.2f}" if values else "-"


def table(chaos: Chaos) -> str:
    head = ["FAULT", "ROUNDS", "LOST", "WRONG", "STUCK", "DETECTED_S", "LATEST_S", "REDUNDANT_S"]
    rows = [head]
    total, kills = Tally(), Tally()
    for name, each in chaos.tallies.items():
        for sum_of in [total, kills] if name in KILLS else [total]:
            for key, value in vars(each).items():
                setattr(sum_of, key, getattr(sum_of, key) + value)
    for name, each in [*chaos.tallies.items(), ("all kills", kills), ("all", total)]:
        times = [worst(each.detection_s), worst(each.latest_s), worst(each.redundancy_s)]
        rows.append([name, *map(str, (each.rounds, each.lost, each.wrong, each.stuck)), *times])
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
    lines.append(f"steps committed {chaos.committed}; times: median / worst, in seconds")
    lines.append(f"a node was declared dead without a fault, or for one of etcd's or a link's alone, in {total.disturbed} rounds")
    return "\n".join(lines)


def parse(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/chaos", add_help=False)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--membership", choices=("etcd", "standalone"), default=None)
    parser.add_argument("--only", default="")
    parser.add_argument("--without", default="")
    parser.add_argument("--encrypt", choices=("yes", "no"), default=None)
    parser.add_argument("--keep", action="store_true")
    parser.add_argument("--in-turn", action="store_true")
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "build" / "chaos")
    options = parser.parse_args(words)
    there = all(map(shutil.which, ("etcd", "etcdctl")))
    if options.membership == "etcd" and not there:
        parser.error("--membership etcd: no etcd and etcdctl (Debian: etcd-server, etcd-client)")
    options.membership = options.membership or ("etcd" if there else "standalone")
    faults = {**FAULTS, **(ETCD_FAULTS if options.membership == "etcd" else {})}
    for option in ("only", "without"):
        names = list(filter(None, getattr(options, option).split(",")))
        unknown = [name for name in names if name not in faults]
        if unknown:
            wrong = f"--{option} {', '.join(unknown)}"
            parser.error(f"{wrong}: the faults over {options.membership} are {', '.join(faults)}")
        setattr(options, option, names)
    options.only = [name for name in options.only or faults if name not in options.without]
    if not options.only:
        parser.error("--without leaves no fault")
    if options.in_turn:
        options.rounds = len(options.only)
    if options.rounds < 1:
        parser.error(f"--rounds {options.rounds}: at least 1")
    if options.seed is None:
        options.seed = random.SystemRandom().randrange(1_000_000)
    if options.encrypt is None:
        options.encrypt = random.Random(f"{options.seed}/encrypt").choice(("yes", "no"))
    return options


def main() -> int:
    options = parse(sys.argv[1:])
    if os.geteuid() != 0:
        print("scripts/chaos: network namespaces take root", file=sys.stderr)
        return 1
    if "step-clock" in options.only and not pathlib.Path(FAKETIME).exists():
        print(f"step-clock is left out: there is no {FAKETIME} (Debian: libfaketime)")
        options.only.remove("step-clock")
    out = options.out
    out.mkdir(parents=True, exist_ok=True)
    for old in out.glob("*.log"):
        old.unlink()
    paths = Paths(ROOT, out)
    cluster = Cluster(paths, out, NODES, options.membership == "etcd", options.encrypt == "yes")
    chaos = Chaos(cluster, paths, options.seed)
    schedule = random.Random(options.seed)
    kind = f"{options.membership}, {'encrypted' if cluster.encrypt else 'plain'} replicas"
    print(f"seed {options.seed}, {options.rounds} rounds over {kind}, logs in {out}", flush=True)
    begin = time.monotonic()
    try:
        cluster.open()
        chaos.start()
        chaos.open_world()
        for number in range(options.rounds):
            name = options.only[number] if options.in_turn else schedule.choice(options.only)
            print(f"[{time.monotonic() - begin:6.1f} s] round {number + 1}: {name}", flush=True)
            chaos.random = random.Random(f"{options.seed}/{number}")
            try:
                chaos.round(name, {**FAULTS, **ETCD_FAULTS}[name])
            except Stuck as stuck:
                chaos.tally.stuck += 1
                chaos.note(f"STUCK: {stuck}")
                break  # rounds after a stuck one prove nothing
    finally:
        for rank in chaos.ranks:
            rank.kill()
        cluster.close(options.keep)
    print(table(chaos))
    report: dict[str, Any] = {"seed": options.seed, "membership": options.membership, "encrypt": options.encrypt}
    report |= {"rounds": options.rounds, "committed": chaos.committed}
    report["faults"] = {name: vars(each) for name, each in chaos.tallies.items()}
    report["notes"] = chaos.notes
    (out / "report.json").write_text(json.dumps(report, indent=1))
    bad = sum(each.lost + each.wrong + each.stuck for each in chaos.tallies.values())
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
