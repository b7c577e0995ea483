# SPDX-License-Identifier: Apache-2.0
"""Replaces the few torch.cuda functions that Megatron-Core 0.16.1 calls unconditionally, so that its models
train on a machine without GPUs. Call apply() before using Megatron."""

from __future__ import annotations

import torch
from torch.overrides import TorchFunctionMode


class _OnCpu(TorchFunctionMode):
    """device="cuda" means the CPU."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return function(*args, **kwargs)


def apply() -> None:
    if torch.cuda.is_available():
        return
    cuda = torch.cuda
    cuda.current_device = lambda: "cpu"
    cuda.synchronize = lambda *arguments, **options: None  # separate lambdas: torch.compile compares them
    cuda.set_device = lambda *arguments: None
    cuda.device_count = lambda: 1
    cuda.get_rng_state = lambda device="cuda": torch.get_rng_state()
    cuda.set_rng_state = lambda state, device="cuda": torch.set_rng_state(state)
    cuda.manual_seed = lambda seed: torch.manual_seed(seed)
    cuda.is_current_stream_capturing = lambda: False
    from megatron.core.tensor_parallel import random

    random._get_cuda_rng_state = lambda device="cuda", clone=False, graph_safe=False: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, device=-1, graph_safe=False: torch.set_rng_state(state)
    torch.Tensor.cuda = lambda self, *arguments, **options: self
    name_of = torch.Tensor.type

    def type_(self, *arguments, **options):
        name = name_of(self, *arguments, **options)
        return name if arguments or options or ".cuda." in name else name.replace("torch.", "torch.cuda.", 1)

    torch.Tensor.type = type_  # Megatron compares it with "torch.cuda.FloatTensor"
    _OnCpu().__enter__()
