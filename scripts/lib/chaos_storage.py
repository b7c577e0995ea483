# SPDX-License-Identifier: Apache-2.0
"""The storage of scripts/chaos: a directory on a tmpfs of this run. A fault mounts something else over it for one
daemon, in the mount namespace of that daemon."""

from __future__ import annotations

import json
import pathlib
import shutil
from dataclasses import dataclass

from chaos_host import run
from chaos_rank import content

SIZE = "1G"
KEPT = 3  # steps that stay on storage
MANIFEST = "ropeteam-manifest.json"


@dataclass(frozen=True)
class View:
    """What a daemon sees in the place of the store."""

    source: pathlib.Path
    options: str = "bind"
    readable: bool = False  # whether the daemon can read the store's steps


def objects(path: pathlib.Path) -> tuple[str, dict[str, bytes]]:
    """The token of a rank's file, and its other objects."""
    data = path.read_bytes()
    begin = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:begin])
    values = header.pop("__metadata__")
    found = {name: data[slice(*(begin + at for at in entry["data_offsets"]))] for name, entry in header.items()}
    return json.loads(values["token"]), found


class Store:
    def __init__(self, directory: pathlib.Path) -> None:
        self.root = directory / "storage"
        self.path = self.root / "store"
        # The daemons run without the capabilities that override these modes.
        self.denied = self.root / "denied"

    def open(self) -> None:
        self.root.mkdir()
        run("mount", "-t", "tmpfs", "-o", f"size={SIZE}", "chaos", str(self.root))
        self.path.mkdir()
        self.denied.mkdir(mode=0)

    def empty(self, name: str) -> View:
        """An empty directory on the same kind of file system. The daemon may write there."""
        path = self.root / name
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir()
        return View(path)

    def refusals(self) -> list[View]:
        """EACCES for every call, and EROFS for every write."""
        return [View(self.denied), View(self.path, "bind,ro", readable=True)]

    def trouble_with(self, seed: int, step: int, token: str, world_size: int) -> str:
        """Why the store does not have the step as the ranks of this incarnation saved it; "" if it has."""
        wanted = {rank: (token, content(seed, step, rank, token)) for rank in range(world_size)}
        damaged = []
        for manifest in self.path.glob(f"*/step-{step:010}-*/{MANIFEST}"):
            try:
                ranks = json.loads(manifest.read_text())["ranks"]
                found = {each["rank"]: objects(manifest.parent / each["files"][0]["path"]) for each in ranks}
            except (OSError, LookupError, ValueError) as error:
                damaged.append(f"WRONG: {manifest.parent.name} on storage: {type(error).__name__}: {error}")
                continue
            if found == wanted:
                return ""
            if any(saved_by == token for saved_by, _ in found.values()):
                damaged.append(f"WRONG: the bytes of {manifest.parent.name} on storage")
        return damaged[0] if damaged else f"LOST: step {step} was persisted, storage has {sorted(self.steps())}"

    def steps(self) -> list[str]:
        """The folders of all complete steps."""
        return [manifest.parent.name for manifest in self.path.glob(f"*/*/{MANIFEST}")]
