#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""extract_vmlinux.py VMLINUZ VMLINUX: the kernel inside a compressed boot image.

QEMU boots the bare ELF file by its PVH note. So the guest need not decompress it, which takes seconds on an
emulated processor. The layout is that of the Linux boot protocol (Documentation/arch/x86/boot.rst).
"""

from __future__ import annotations

import gzip
import lzma
import struct
import subprocess
import sys

SECTOR_BYTES = 512
HEADER_MAGIC_AT, HEADER_MAGIC = 0x202, b"HdrS"
SETUP_SECTORS_AT = 0x1F1
SETUP_SECTORS_IF_ZERO = 4
PAYLOAD_AT = 0x248  # offset and length of the payload, 32 bits each


def unzstd(payload: bytes) -> bytes:
    # zstd reports the size field after the frame as an error, but only after it has written everything.
    return subprocess.run(["zstd", "-dc"], input=payload, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=False).stdout


def unxz(payload: bytes) -> bytes:
    return lzma.LZMADecompressor().decompress(payload)  # stops at the stream's end; a size field follows it


def ungzip(payload: bytes) -> bytes:
    return gzip.decompress(payload[:-4])


FORMATS = ((b"\xfd7zXZ\0", unxz), (b"\x28\xb5\x2f\xfd", unzstd), (b"\x1f\x8b", ungzip))


def extract(image: bytes) -> bytes:
    if image[HEADER_MAGIC_AT:][:4] != HEADER_MAGIC:
        raise ValueError("not a Linux boot image")
    setup_sectors = image[SETUP_SECTORS_AT] or SETUP_SECTORS_IF_ZERO
    offset, length = struct.unpack_from("<II", image, PAYLOAD_AT)
    payload = image[(setup_sectors + 1) * SECTOR_BYTES + offset :][:length]
    for magic, unpack in FORMATS:
        if payload.startswith(magic):
            kernel = unpack(payload)
            if not kernel.startswith(b"\x7fELF"):
                raise ValueError("the payload is no ELF file")
            return kernel
    raise ValueError(f"payload begins with {payload[:8]!r}: no known compression")


def main() -> int:
    source, target = sys.argv[1:]
    try:
        with open(source, "rb") as file:
            kernel = extract(file.read())
    except (OSError, ValueError) as error:
        print(f"soft-roce: {source}: {error}", file=sys.stderr)
        return 1
    with open(target, "wb") as file:
        file.write(kernel)
    return 0


if __name__ == "__main__":
    sys.exit(main())
