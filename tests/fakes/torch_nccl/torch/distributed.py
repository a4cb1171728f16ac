import os
import signal
import sys
import time
from pathlib import Path

from torch import cuda

_rank = 0


class FileStore:
    def __init__(self, path, world_size):
        assert Path(path).parent.is_dir() and world_size > 0


def init_process_group(backend, *, store, rank, world_size, timeout, device_id):
    global _rank
    assert backend == "nccl" and 0 <= rank < world_size and device_id == ("cuda", rank)
    _rank = rank
    print("NCCL version 2.27.5 (fake), written to the same pipe", flush=True)


def all_reduce(tensor):
    if os.environ.get("NCCL_NTHREADS") == "512":
        time.sleep(60)
    late = Path(os.environ.get("FAKE_LATE_ONCE", "/"))
    if os.environ.get("NCCL_NTHREADS") == "64" and _rank == 0 and not late.exists():
        late.touch()
        time.sleep(60)
    if os.environ.get("NCCL_NTHREADS") == "128":
        if _rank == 1:
            print("Segmentation fault (fake)", file=sys.stderr, flush=True)
            os.killpg(0, signal.SIGSEGV)
        time.sleep(60)
    cuda.count_call()


def all_gather_into_tensor(whole, part):
    assert whole[0] % part[0] == 0
    if os.environ.get("NCCL_ALGO") == "Tree":
        raise RuntimeError(
            "NCCL error in: NCCLUtils.cpp:77, invalid usage (run with NCCL_DEBUG=WARN for details), NCCL version\n"
            "ncclInvalidUsage: This usually reflects invalid usage of NCCL library.\nLast error:\n"
            "Error : no algorithm/protocol available for function AllGather with datatype ncclBfloat16."
        )
    cuda.count_call()
