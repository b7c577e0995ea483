# SPDX-License-Identifier: Apache-2.0
"""Accelerate 1.15 shards on accelerators only. On a machine without one it accepts an FSDP plugin and does
not shard, without a warning. Call apply() before an Accelerator is made: then it shards here too, by gloo."""

from __future__ import annotations

import torch
from accelerate.state import DistributedType, PartialState


def apply() -> None:
    PartialState._prepare_backend = lambda *arguments, **options: ("gloo", DistributedType.MULTI_GPU)

    def set_device(self) -> None:
        self.device = torch.device("cpu")

    PartialState.set_device = set_device
