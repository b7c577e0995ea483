# SPDX-License-Identifier: Apache-2.0
"""Random changes in files of DeepSpeed's and Megatron-Core's checkpoints and in DCP's metadata: each load
gives a value or one of the package's errors. SEEDS in the environment sets how many changes are tried."""

from __future__ import annotations

import argparse
import io
import os
import pickle
import random
from collections import OrderedDict

import numpy
import pytest
import torch
from attack_files import dcp_files, pickle_of, read_metadata, saved, with_pickle
from ropeteam import Corrupt, Unsupported
from ropeteam.torch._pt import DEEPSPEED, MEGATRON, load_pt

pytestmark = pytest.mark.filterwarnings("ignore")
SEEDS = int(os.environ.get("SEEDS", "300"))


def deepspeeds_file() -> bytes:
    weight = torch.nn.Parameter(torch.randn(4, 3))
    state = {"step": torch.tensor(3.0), "exp_avg": torch.zeros(12, dtype=torch.bfloat16)}
    module = OrderedDict({"0.weight": weight, "0.bias": weight.detach()[0]})
    groups = [{"lr": 1e-2, "betas": (0.9, 0.999), "params": [0, 1]}]
    return saved(
        {
            "module": module,
            "optimizer": {"state": {0: state}, "param_groups": groups},
            "param_shapes": [OrderedDict({"0.weight": torch.Size([4, 3])})],
            "dtype": torch.bfloat16,
            "ds_config": {"bf16": {"enabled": True}, "none": None},
            "args": argparse.Namespace(seed=1, big=2**70),
            "mine": [numpy.arange(6.0).reshape(2, 3), numpy.float32(1.5), numpy.array(["a", "bc"])],
        }
    )


def megatrons_object() -> bytes:
    rng = {
        "random_rng_state": random.Random(1).getstate(),
        "np_rng_state": numpy.random.RandomState(1).get_state(),
        "torch_rng_state": torch.get_rng_state(),
        "rng_tracker_states": {"model-parallel-rng": torch.arange(16, dtype=torch.uint8)},
    }
    return saved([rng, io.BytesIO(b"extra state"), b"bytes", {1, 2}])


def changed(data: bytes, rng: random.Random) -> bytes:
    out = bytearray(data)
    for _ in range(rng.choice([1, 1, 1, 2, 5])):
        at, to = sorted(rng.randrange(len(out) + 1) for _ in range(2))
        to = min(to, at + rng.choice([1, 1, 2, 8, 100]))
        way = rng.randrange(6)
        if way == 0:
            del out[at:to]
        elif way == 1:
            out[at:at] = out[at:to]
        elif way == 2:
            out[at:to] = rng.randbytes(to - at)
        elif way == 3:
            out[at:at] = rng.choice([b"R", b"b", b"0", b"(", b"t", b"\x81", b"u", b"e", b"\x93", b"Q", b"."])
        elif way == 4 and at < len(out):
            out[at] ^= 1 << rng.randrange(8)
        elif way == 5:
            source = rng.randrange(len(data))
            out[at:to] = data[source : source + to - at]
        if not out:
            return b"."
    return bytes(out)


def loads_or_refuses(load) -> bool:
    try:
        load()
        return True
    except (Corrupt, Unsupported) as error:
        assert str(error)
        return False


@pytest.mark.parametrize("classes, file", [(DEEPSPEED, deepspeeds_file), (MEGATRON, megatrons_object)])
@pytest.mark.parametrize("part", ["file", "pickle"])
def test_a_changed_file_gives_a_value_or_a_clean_error(classes, file, part):
    whole = file()
    assert loads_or_refuses(lambda: load_pt(memoryview(whole), classes))
    inner = pickle_of(whole)
    loaded = 0
    for seed in range(SEEDS):
        rng = random.Random(seed)
        made = changed(whole, rng) if part == "file" else with_pickle(changed(inner, rng), whole)
        loaded += loads_or_refuses(lambda data=made: load_pt(memoryview(data), classes))
    assert 0 < loaded < SEEDS, "some changes are harmless, and some are not"


def test_changed_metadata_give_metadata_or_a_clean_error(tmp_path):
    state = {"w": torch.ones(2, 3), "list": [torch.ones(1), "text", 1.5]}
    encoded = dcp_files(state, tmp_path)[".metadata"]
    loaded = sum(
        loads_or_refuses(lambda data=changed(encoded, random.Random(seed)): read_metadata(data))
        for seed in range(SEEDS)
    )
    assert 0 < loaded < SEEDS


def test_numpys_plain_values_and_the_other_contents_come_back():
    first = load_pt(memoryview(deepspeeds_file()), DEEPSPEED)
    array, scalar, texts = first["mine"]
    assert type(array) is numpy.ndarray and array.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert type(scalar) is numpy.float32 and scalar == 1.5 and texts.tolist() == ["a", "bc"]
    assert first["args"] == argparse.Namespace(seed=1, big=2**70) and first["dtype"] is torch.bfloat16
    rng, extra, data, numbers = load_pt(memoryview(megatrons_object()), MEGATRON)
    assert numpy.random.RandomState(2).set_state(rng["np_rng_state"]) is None
    assert rng["np_rng_state"][1].tolist() == numpy.random.RandomState(1).get_state()[1].tolist()
    assert rng["random_rng_state"] == random.Random(1).getstate()
    assert (extra.read(), data, numbers) == (b"extra state", b"bytes", {1, 2})
    assert load_pt(memoryview(saved([b"", io.BytesIO()])), MEGATRON)[0] == b""
    for dtype in (">f8", "<i2", "|S3", "<U2", "?", "c16", "u8"):
        made = numpy.ones(3, dtype)
        again, kind = load_pt(memoryview(saved([made, made.dtype])))
        assert again.dtype == pickle.loads(pickle.dumps(made)).dtype and kind == made.dtype
        assert again.tolist() == made.tolist()
