# SPDX-License-Identifier: Apache-2.0
"""Compares ranged reads with fetching whole shards: bytes over the wire, and time. The daemons are on loopback.

    PYTHONPATH=api/python python3 bench/python/bench_ranges.py [--mib 64] [--tensors 400]

Four ranks on four nodes save the rows of 400 matrices. A fifth node reads what one rank of six would need, once by rows
and once by columns. Each measurement has its own step, so that the reader has no data from the previous one. Prints one
JSON object.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "api" / "python"), str(ROOT / "tests" / "e2e")]

from harness import Cluster, Daemon, free_port  # noqa: E402

from ropeteam import Level, Range  # noqa: E402

SAVERS, READERS, COLUMNS = 4, 6, 4096  # COLUMNS in bytes: a row of a matrix has 1024 numbers


def needed(kind: str, rows: int, reader: int, rank: int) -> tuple[int, int, int, int]:
    """The range that `reader` of six needs of a matrix's `rows` on `rank`: offset, length, count, stride."""
    if kind == "columns":
        first, last = (COLUMNS * reader // READERS, COLUMNS * (reader + 1) // READERS)
        return first, last - first, rows, COLUMNS
    whole = rows * SAVERS
    first, last = (whole * (reader + each) // READERS for each in (0, 1))
    begin, end = (min(max(at - rows * rank, 0), rows) for at in (first, last))
    return begin * COLUMNS, (end - begin) * COLUMNS, 1, 0


def measure(kind: str, partial: bool, step: int, rope, node: Daemon, rows: int, tensors: int) -> dict:
    """Reads into existing buffers, as a model's tensors are, and checks their bytes."""
    before = node.local_status()
    here = {copy["id"]["rank"] for copy in before["copies"] if copy["id"]["step"] == step}
    plan, bytes_needed = [], 0
    for rank in sorted(set(range(SAVERS)) - here):  # a replica on this node would not cross the wire
        offset, length, count, stride = needed(kind, rows, 2, rank)
        targets = [bytearray(b"\xff" * (length * count)) for _ in range(tensors if length else 0)]
        bytes_needed += sum(map(len, targets))
        if targets:
            plan.append((rank, (offset, length, count, stride), targets))
    begun = time.monotonic()
    for rank, (offset, length, count, stride), targets in plan:
        with rope.view(step, rank, partial=partial) as view:
            view.read_ranges(
                [
                    Range(f"layer.{i}", target, offset, length, count, stride, 0, length if count > 1 else 0)
                    for i, target in enumerate(targets)
                ]
            )
    seconds = time.monotonic() - begun
    for rank, _, targets in plan:
        assert all(target == bytes([1 + (i + rank) % 250]) * len(target) for i, target in enumerate(targets))
    wire = node.local_status()["counters"]["fetch_bytes"] - before["counters"]["fetch_bytes"]
    return {"seconds": round(seconds, 4), "needed_bytes": bytes_needed, "wire_bytes": wire}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=64, help="of each rank's shard")
    parser.add_argument("--tensors", type=int, default=400)
    parser.add_argument("--passes", type=int, default=3)
    options = parser.parse_args()
    rows = (options.mib << 20) // options.tensors // COLUMNS
    with (
        tempfile.TemporaryDirectory(dir="/tmp") as directory,
        tempfile.TemporaryDirectory(dir="/dev/shm") as arenas,
    ):
        base = pathlib.Path(directory)
        cluster = Cluster(SAVERS + 1, f"{options.mib * 12}M", base, pathlib.Path(arenas), base, "bench")
        cluster.coordinator = f"127.0.0.1:{free_port()}"
        flags = ["--replicas", "1", "--keep-steps", "2"]
        cluster.nodes = [Daemon(cluster, ordinal, flags) for ordinal in range(SAVERS + 1)]
        try:
            for node in cluster.nodes:
                node.start()
            cluster.wait_members()
            report = run(cluster, rows, options)
        finally:
            for node in cluster.nodes:
                node.stop()
    print(json.dumps(report, indent=1))


def run(cluster: Cluster, rows: int, options: argparse.Namespace) -> dict:
    node = cluster[SAVERS]  # a fifth rank saves one byte, so that its node holds almost only others' replicas
    ranks = [cluster[rank].open(rank, SAVERS + 1, "run") for rank in range(SAVERS + 1)]
    report: dict = {"shard_mib": options.mib, "tensors": options.tensors, "rows": rows}
    step = 0
    for number in range(options.passes + 1):
        for kind in ("rows", "columns"):
            for partial in (False, True):
                step += 1
                for rank in range(SAVERS):
                    layers = {
                        f"layer.{i}": bytes([1 + (i + rank) % 250]) * (rows * COLUMNS)
                        for i in range(options.tensors)
                    }
                    ranks[rank].save(step, layers)
                ranks[SAVERS].save(step, {"none": b"0"})
                for rope in ranks:
                    rope.wait(step, Level.COMMITTED)
                found = measure(kind, partial, step, ranks[SAVERS], node, rows, options.tensors)
                if number:  # the first pass touches the memory
                    report.setdefault(f"{kind}/{'ranges' if partial else 'whole'}", []).append(found)
    for name, found in list(report.items()):
        if isinstance(found, list):
            best = sorted(found, key=lambda each: each["seconds"])[len(found) // 2]
            report[name] = {**best, "wire_per_needed": round(best["wire_bytes"] / best["needed_bytes"], 3)}
    for kind in ("rows", "columns"):
        ratio = report[f"{kind}/ranges"]["seconds"] / report[f"{kind}/whole"]["seconds"]
        report[f"{kind}/time_ranges_vs_whole"] = round(ratio, 3)
    return report


if __name__ == "__main__":
    main()
