# SPDX-License-Identifier: Apache-2.0
"""fork_ranks.py COUNT PORT SCRIPT [ARGUMENTS...]: runs SCRIPT in COUNT ranks, instead of torchrun.

torch is imported once and not COUNT + 1 times. If a rank fails, the others are killed.
"""

import os
import runpy
import signal
import sys

import ropeteam.torch  # noqa: F401
import torch._dynamo  # noqa: F401  imported by an optimizer's first step
import torch.distributed.fsdp  # noqa: F401

count, port, script = int(sys.argv[1]), sys.argv[2], sys.argv[3]
ranks = set()
for rank in range(count):
    pid = os.fork()
    if pid == 0:
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(count))
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
        sys.argv = sys.argv[3:]
        runpy.run_path(script, run_name="__main__")
        sys.exit()
    ranks.add(pid)
failed = False
while ranks:
    pid, status = os.wait()
    ranks.discard(pid)
    if status != 0 and not failed:
        failed = True
        for other in ranks:
            os.kill(other, signal.SIGKILL)
sys.exit(failed)
