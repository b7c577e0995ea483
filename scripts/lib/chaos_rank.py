# SPDX-License-Identifier: Apache-2.0
"""A rank of scripts/chaos. It reads orders from standard input and prints answers, one JSON object per line.

Seed, step, rank and token determine a shard's bytes, so every reader can check them.
"""

from __future__ import annotations

import contextlib
import json
import random
import sys
from typing import Any

import ropeteam
from ropeteam import Level

LARGEST = 2_000_000  # bytes of both objects of a shard together


def content(seed: int, step: int, rank: int, token: str) -> dict[str, bytes]:
    """Two objects of random sizes and bytes."""
    source = random.Random(f"{seed}/{step}/{rank}/{token}")
    return {name: source.randbytes(source.randint(1, LARGEST // 2)) for name in ("model", "optimizer")}


class RankProcess:
    def __init__(self, seed: int, rank: int, world_size: int) -> None:
        self.seed, self.rank, self.world_size = seed, rank, world_size
        self.client: ropeteam.Client | None = None

    def open(self, socket: str, token: str, timeout: float) -> None:
        self.close()
        self.client = ropeteam.open(
            socket, rank=self.rank, world_size=self.world_size, incarnation_token=token, timeout=timeout
        )

    def close(self) -> None:
        if self.client is not None:
            self.client.close()
        self.client = None

    def save(self, step: int, token: str, persist: bool) -> None:
        """The step is LOCAL when this returns."""
        objects = content(self.seed, step, self.rank, token)
        self.client.save(step, {"token": token, **objects})
        if persist:
            with contextlib.suppress(ropeteam.RopeteamError):  # the wait for PERSISTED says what became of it
                self.client.persist(step)

    def wait(self, step: int, level: str, timeout: float) -> None:
        self.client.wait(step, Level[level], timeout=timeout)

    def latest(self, timeout: float) -> int | None:
        found = self.client.latest(timeout)
        return None if found is None else found.step

    def read(self, step: int, timeout: float) -> list[str]:
        """Reads and checks every rank's shard. Returns the tokens of the incarnations that saved them."""
        tokens = []
        for rank in range(self.world_size):
            shard = self.client.load(step, rank, timeout=timeout)
            wanted = content(self.seed, step, rank, shard["token"])
            for name, value in wanted.items():
                if bytes(shard[name]) != value:
                    raise ValueError(f"WRONG BYTES: step {step} rank {rank} object {name}")
            tokens.append(shard["token"])
        return tokens


def main() -> None:
    process = RankProcess(*(int(word) for word in sys.argv[1:4]))
    for line in sys.stdin:
        order: dict[str, Any] = json.loads(line)
        try:
            answer = {"value": getattr(process, order.pop("do"))(**order)}
        except (ropeteam.RopeteamError, ValueError) as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
