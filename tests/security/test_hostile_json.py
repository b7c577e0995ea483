# SPDX-License-Identifier: Apache-2.0
"""JSON of a shard as an attacker would write it: its index, a step's metadata, and plain state. Each gives a
value or one of the package's errors. hypothesis makes it; EXAMPLES in the environment sets how much."""

from __future__ import annotations

import json
import os
import random

import numpy
import pytest
import torch
from ropeteam import Corrupt, NotFound, Unsupported
from ropeteam._values import decode_index, decode_metadata, encode_json, new_tensor, object_info
from ropeteam.torch._plain import flatten, unflatten
from ropeteam.torch._state import _restore_rng

hypothesis = pytest.importorskip("hypothesis")
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as some  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
# The same examples in every run.
examples = settings(
    max_examples=int(os.environ.get("EXAMPLES", "150")), deadline=None, derandomize=True, database=None
)

NUMBERS = some.one_of(some.integers(-2, 6), some.sampled_from([2**31, 2**40, 2**63, -(2**63), 10**30]))
PLAIN = some.one_of(some.none(), some.booleans(), NUMBERS, some.floats(), some.text(max_size=5))
JSON = some.recursive(
    PLAIN,
    lambda inner: some.lists(inner, max_size=4) | some.dictionaries(some.text(max_size=3), inner, max_size=3),
)
SHAPES = some.lists(NUMBERS, max_size=3)
DTYPES = some.sampled_from(["float32", "bfloat16", "int8", "Tensor", "save", "no_such"])
ENTRIES = some.fixed_dictionaries(
    {},
    optional={
        "kind": some.sampled_from(["tensor", "json", "bytes"]) | JSON,
        "dtype": DTYPES | JSON,
        "shape": SHAPES | JSON,
        "global": SHAPES | JSON,
        "runs": some.lists(SHAPES, max_size=3) | JSON,
        "at": some.tuples(NUMBERS, some.text(max_size=3)) | JSON,
    },
)
INDEXES = some.fixed_dictionaries(
    {
        "version": some.sampled_from([1, 2, 2, 2]) | JSON,
        "objects": some.dictionaries(some.text(max_size=3), ENTRIES) | JSON,
    },
    optional={"world_size": NUMBERS | JSON},
)

KINDS = [
    "dict",
    "OrderedDict",
    "Counter",
    "defaultdict",
    "tuple",
    "set",
    "frozenset",
    "Size",
    "range",
    "slice",
    "deque",
]
KINDS += [
    "int",
    "float",
    "complex",
    "bytes",
    "bytearray",
    "ndarray",
    "scalar",
    "numpy.dtype",
    "numpy.random",
    "random",
]
KINDS += ["torch.dtype", "torch.device", "torch.layout", "torch.Generator", "pickle", "tensor", "other"]
FIELDS = [
    "items",
    "maxlen",
    "factory",
    "value",
    "hex",
    "base64",
    "tensor",
    "name",
    "dtype",
    "shape",
    "data",
    "state",
]
FIELDS += ["kind", "device", "bit_generator", "pos", "key", "parameter", "requires_grad"]
TEXTS = some.sampled_from(
    ["t", "u", "cpu", "meta", "cuda:7", "<f8", "|O", "i4,O", "V9999999", "float32", "load", "MT19937"]
)
STATES = some.recursive(
    PLAIN | TEXTS,
    lambda inner: some.one_of(
        some.lists(inner, max_size=4),
        some.builds(
            lambda kind, fields: {"$": kind, **fields},
            some.sampled_from(KINDS),
            some.dictionaries(some.sampled_from(FIELDS), inner, max_size=4),
        ),
    ),
    max_leaves=12,
)


def good_state() -> dict:
    return {
        "lr": 0.1,
        "counts": (1, {2, 3}),
        "numpy": [numpy.arange(6.0).reshape(2, 3), numpy.float32(1.5), numpy.random.RandomState(1)],
        "generators": [numpy.random.Generator(numpy.random.Philox(1)), random.Random(1), torch.Generator()],
        "types": [torch.float16, torch.device("cpu"), range(3), 1j, b"bytes", 2**70, float("nan")],
        "weight": torch.ones(2),
    }


def changed(value, draw):
    """The same JSON with one of its values replaced by another."""
    if not isinstance(value, (dict, list)) or not value or draw(some.integers(0, 3)) == 0:
        return draw(STATES)
    keys = list(value) if isinstance(value, dict) else range(len(value))
    key = draw(some.sampled_from(keys))
    made = value.copy()
    made[key] = changed(value[key], draw)
    return made


def value_or_refusal(load):
    try:
        return load()
    except (Corrupt, NotFound, Unsupported) as error:
        assert str(error)
        return None


@examples
@given(INDEXES)
def test_an_index_gives_the_objects_or_a_clean_error(made):
    index = value_or_refusal(lambda: decode_index(json.dumps(made).encode()))
    if index is None:
        return
    assert index.world_size is None or 1 <= index.world_size <= 131072
    for name in index.objects:
        info = value_or_refusal(lambda name=name: object_info(name, 12, index.objects))
        if info is None or info.kind != "tensor":
            continue
        tensor = value_or_refusal(lambda info=info: new_tensor(info, "it"))
        assert tensor is None or tensor.nbytes == 12


@examples
@given(some.binary(max_size=60) | JSON.map(lambda value: json.dumps(value).encode()))
def test_metadata_are_a_mapping_or_a_clean_error(encoded):
    assert isinstance(value_or_refusal(lambda: decode_metadata(encoded)), (dict, type(None)))
    value_or_refusal(lambda: decode_index(encoded))


@examples
@given(STATES)
def test_a_state_of_any_kinds_is_a_value_or_a_clean_error(skeleton):
    tensors = {"t": torch.arange(8, dtype=torch.uint8), "u": torch.ones(2)}
    value_or_refusal(lambda: unflatten(skeleton, tensors))


@examples
@given(some.data())
def test_a_changed_state_is_a_value_or_a_clean_error(data):
    tensors, skeleton = flatten(good_state())
    skeleton = json.loads(encode_json(skeleton))
    assert unflatten(skeleton, tensors)["lr"] == 0.1
    value_or_refusal(lambda: unflatten(changed(skeleton, data.draw), tensors))


def test_what_is_nested_too_deeply_is_a_clean_error():
    deep = b"[" * 100_000
    for decode in (decode_index, decode_metadata):
        with pytest.raises(Corrupt):
            decode(deep)
    nested: list = []
    for _ in range(100_000):
        nested = [nested]
    with pytest.raises(Corrupt, match="recursion"):
        unflatten(nested, {})


def test_a_range_in_place_of_a_list_is_not_unrolled():
    endless = {"$": "range", "items": [0, 10**15, 1]}
    assert unflatten(endless, {}) == range(10**15)
    for kind in ("tuple", "set", "deque"):
        with pytest.raises(Corrupt, match="not a list"):
            unflatten({"$": kind, "items": endless, "maxlen": None}, {})


def test_a_shape_of_terabytes_is_refused_before_it_is_allocated():
    info = object_info("w", 4, {"w": {"kind": "tensor", "dtype": "float32", "shape": [2**40]}})
    with pytest.raises(Corrupt, match="takes 4398046511104 bytes, the object has 4"):
        new_tensor(info, "w")


@pytest.mark.parametrize("place", [-1, 625, 2**40, 1.0, "1"])
def test_numpys_generators_do_not_read_outside_their_buffer(place):
    # numpy takes any position, and reads there.
    state = numpy.random.RandomState(1).get_state(legacy=False)
    tensors, skeleton = flatten({"it": numpy.random.RandomState(1)})
    skeleton["it"]["state"]["state"]["pos"] = place
    with pytest.raises(Corrupt, match="position"):
        unflatten(skeleton, tensors)
    tensors, skeleton = flatten({"it": numpy.random.Generator(numpy.random.Philox(1))})
    skeleton["it"]["state"]["buffer_pos"] = place
    with pytest.raises(Corrupt, match="position"):
        unflatten(skeleton, tensors)

    class View(dict):
        value = dict.__getitem__

    with pytest.raises(Corrupt, match="position"):
        _restore_rng(View({"rng/numpy": ["MT19937", state["state"]["key"].tolist(), place, 0, 0.0]}))
