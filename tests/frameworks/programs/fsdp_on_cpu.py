# SPDX-License-Identifier: Apache-2.0
"""Accelerate 1.15 shards only on accelerators. On a machine without one it accepts an FSDP plugin, but does
not shard and does not warn. If apply() is called before an Accelerator is created, it shards here by gloo."""

from __future__ import annotations

import torch
from accelerate.state import DistributedType, PartialState


def apply() -> None:
    PartialState._prepare_backend = lambda *arguments, **options: ("gloo", DistributedType.MULTI_GPU)

    def set_device(self) -> None:
        self.device = torch.device("cpu")

    PartialState.set_device = set_device
