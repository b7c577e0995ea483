# SPDX-License-Identifier: Apache-2.0
"""Checksums of bodies. ISA-L computes CRC32C where it is installed; the standard library has the others."""

from __future__ import annotations

import base64
import ctypes
import functools
import hashlib
import zlib
from typing import Any

CRC32C_POLYNOMIAL = 0x82F63B78  # Castagnoli, bits reversed
CRC32_POLYNOMIAL = 0xEDB88320


def _load_isal() -> Any:
    """ISA-L's crc32_iscsi(buffer, int length, crc), or None. Debian has it in libisal2."""
    for name in ("libisal.so.2", "libisal.so"):
        try:
            function = ctypes.CDLL(name).crc32_iscsi
        except (OSError, AttributeError):
            continue
        function.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_uint]
        function.restype = ctypes.c_uint
        return function
    return None


_isal = _load_isal()
_ISAL_BYTES_MAX = 1 << 30  # its length is an int


@functools.cache
def _tables() -> list[list[int]]:
    """For the fallback: eight tables, one for each byte of a word."""
    first = []
    for value in range(256):
        for _ in range(8):
            value = (value >> 1) ^ (CRC32C_POLYNOMIAL if value & 1 else 0)
        first.append(value)
    tables = [first]
    for _ in range(7):
        tables.append([first[value & 0xFF] ^ (value >> 8) for value in tables[-1]])
    return tables


def _crc32c_python(data: memoryview, crc: int) -> int:
    t0, t1, t2, t3, t4, t5, t6, t7 = _tables()
    crc ^= 0xFFFFFFFF
    words = len(data) // 8 * 8
    for index in range(0, words, 8):
        a, b, c, d, e, f, g, h = data[index : index + 8]
        a ^= crc & 0xFF
        b ^= crc >> 8 & 0xFF
        c ^= crc >> 16 & 0xFF
        d ^= crc >> 24
        crc = t7[a] ^ t6[b] ^ t5[c] ^ t4[d] ^ t3[e] ^ t2[f] ^ t1[g] ^ t0[h]
    for byte in data[words:]:
        crc = t0[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    return crc ^ 0xFFFFFFFF


def crc32c_is_fast() -> bool:
    return _isal is not None


def crc32c(data: Any, crc: int = 0) -> int:
    """The CRC32C of `data`, which follows bytes that have the CRC32C `crc`. Without ISA-L: some 20 MB/s."""
    view = memoryview(data).cast("B")
    if _isal is None:
        return _crc32c_python(view, crc)
    if view.readonly:
        view = memoryview(bytearray(view))  # ctypes takes writable memory only
    crc ^= 0xFFFFFFFF
    for begin in range(0, len(view), _ISAL_BYTES_MAX):
        piece = view[begin : begin + _ISAL_BYTES_MAX]
        crc = _isal(ctypes.addressof(ctypes.c_char.from_buffer(piece)), len(piece), crc)
    return crc ^ 0xFFFFFFFF


def _multiply(a: int, b: int, polynomial: int) -> int:
    """Of two polynomials, modulo the CRC's; bit 31 is x^0, as in a reversed CRC."""
    product = 0
    for bit in range(31, -1, -1):
        if a >> bit & 1:
            product ^= b
        b = (b >> 1) ^ (polynomial if b & 1 else 0)
    return product


@functools.lru_cache(maxsize=4096)
def _shift(bytes_count: int, polynomial: int) -> int:
    """x^(8 * bytes_count), modulo the CRC's polynomial."""
    result, base, exponent = 1 << 31, 1 << 30, 8 * bytes_count
    while exponent:
        if exponent & 1:
            result = _multiply(result, base, polynomial)
        base = _multiply(base, base, polynomial)
        exponent >>= 1
    return result


def combine(first: int, second: int, second_bytes: int, polynomial: int = CRC32C_POLYNOMIAL) -> int:
    """The CRC of two texts, one behind the other, computed from the CRC of each."""
    return _multiply(_shift(second_bytes, polynomial), first, polynomial) ^ second


# S3's name: (bytes of the digest, may it be FULL_OBJECT, may it be COMPOSITE). The standard library has no CRC64NVME.
ALGORITHMS: dict[str, tuple[int, bool, bool]] = {
    "CRC32C": (4, True, True),
    "CRC32": (4, True, True),
    "SHA1": (20, False, True),
    "SHA256": (32, False, True),
}


class _Crc:
    def __init__(self, function: Any) -> None:
        self._function = function
        self.value = 0

    def update(self, data: Any) -> None:
        self.value = self._function(data, self.value)

    def digest(self) -> bytes:
        return self.value.to_bytes(4, "big")


def new(algorithm: str) -> Any:
    """With update() and digest(), for "MD5" or one of ALGORITHMS."""
    if algorithm == "CRC32C":
        return _Crc(crc32c)
    if algorithm == "CRC32":
        return _Crc(zlib.crc32)
    return hashlib.new(algorithm.lower(), usedforsecurity=False)


def encode(digest: bytes) -> str:
    return base64.b64encode(digest).decode()


def decode_any(text: str) -> bytes | None:
    """None: not base64."""
    try:
        return base64.b64decode(text, validate=True)
    except ValueError:
        return None


def decode(text: str, size: int) -> bytes | None:
    """None: not base64, or not of that size."""
    digest = decode_any(text)
    return digest if digest is not None and len(digest) == size else None


def of_parts(algorithm: str, digests: list[bytes]) -> str:
    """A COMPOSITE checksum: the checksum of the parts' checksums, and how many there are."""
    whole = new(algorithm)
    whole.update(b"".join(digests))
    return f"{encode(whole.digest())}-{len(digests)}"


def of_whole(algorithm: str, parts: list[tuple[bytes, int]]) -> str:
    """A FULL_OBJECT checksum, combined from (digest, bytes) of each part; for the CRCs only."""
    polynomial = CRC32C_POLYNOMIAL if algorithm == "CRC32C" else CRC32_POLYNOMIAL
    crc = 0
    for digest, size in parts:
        crc = combine(crc, int.from_bytes(digest, "big"), size, polynomial)
    return encode(crc.to_bytes(4, "big"))
