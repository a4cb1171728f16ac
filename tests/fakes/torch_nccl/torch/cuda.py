import json
import os
import time
from contextlib import contextmanager

_clock_ms = 0.0
_capturing = None


class nccl:  # noqa: N801
    @staticmethod
    def version():
        return (2, 27, 5)


def set_device(device):
    assert device[0] == "cuda"


def synchronize():
    pass


class Stream:
    def wait_stream(self, other):
        pass


def current_stream():
    return Stream()


@contextmanager
def stream(chosen):
    yield


class CUDAGraph:
    def __init__(self):
        self.calls = 0

    def replay(self):
        global _clock_ms
        if os.environ.get("NCCL_NTHREADS") == "256" and Event.made:
            time.sleep(60)
        factors = json.loads(os.environ.get("FAKE_FACTORS", "{}"))
        ms = 0.01 * self.calls
        for setting, factor in factors.items():
            name, _, value = setting.partition("=")
            ms *= factor if os.environ.get(name) == value else 1
        _clock_ms += ms


@contextmanager
def graph(into, pool=None, stream=None, capture_error_mode="global"):
    global _capturing
    assert capture_error_mode == "thread_local"
    _capturing = into
    yield
    _capturing = None


def count_call():
    if _capturing is not None:
        _capturing.calls += 1


class Event:
    made = 0

    def __init__(self, enable_timing=False):
        assert enable_timing
        Event.made += 1

    def record(self):
        self.at = _clock_ms

    def elapsed_time(self, other):
        return other.at - self.at
