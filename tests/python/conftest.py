# SPDX-License-Identifier: Apache-2.0
"""The package's unit tests use a fake library, which is compiled here against the real header."""

from __future__ import annotations

import ctypes
import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "api" / "python"))


@pytest.fixture(scope="session")
def fake_path(tmp_path_factory):
    path = tmp_path_factory.mktemp("fake") / "libropeteam.so"
    compiler = os.environ.get("CC", "cc")
    source = pathlib.Path(__file__).with_name("fake_ropeteam.c")
    include = ROOT / "api" / "include"
    command = [compiler, "-std=gnu11", "-Wall", "-Werror", "-shared", "-fPIC", f"-I{include}"]
    subprocess.run([*command, str(source), "-o", str(path)], check=True)
    return path


@pytest.fixture
def fake(fake_path, monkeypatch):
    """The fake library, loaded instead of the real one for one test; returns its controls."""
    from ropeteam import _native

    monkeypatch.setenv("ROPETEAM_LIBRARY", str(fake_path))
    monkeypatch.setattr(_native, "_loaded", None)
    controls = ctypes.CDLL(str(fake_path))
    controls.fake_token.restype = ctypes.c_char_p
    controls.fake_socket.restype = ctypes.c_char_p
    controls.fake_timeout.restype = ctypes.c_int64
    controls.fake_begun_agreement.restype = ctypes.c_uint64
    controls.fake_fail(b"", 0)
    controls.fake_reset()
    return controls


@pytest.fixture
def ranks(fake):
    """ranks(count) opens a world of that many ranks over the fake library; they are closed at the end."""
    import ropeteam

    clients = []

    def opened(count):
        clients.extend(ropeteam.open(rank=rank, world_size=count) for rank in range(count))
        return clients[-count:]

    yield opened
    for client in clients:
        client.close()
