"""As much of torch as the collective bench uses, with made-up times and failures that the NCCL variables choose.

Each replay of a graph takes 1 ms times `FAKE_FACTORS` (JSON: "NAME=value" to factor) of what is set; `Tree`
cannot all-gather; `NCCL_NTHREADS=512` hangs in warm-up and `=256` in the measurement; `=128` kills rank 1;
`=64` hangs in warm-up where the file that `FAKE_LATE_ONCE` names is not there yet.
"""

from torch import cuda as cuda

__version__ = "fake"
bfloat16 = "bfloat16"


class version:  # noqa: N801
    cuda = "fake"


def device(kind: str, index: int) -> tuple[str, int]:
    return kind, index


def zeros(size: int, dtype: str, device: tuple[str, int]) -> list[int]:
    assert isinstance(size, int) and dtype == bfloat16
    return [size]
