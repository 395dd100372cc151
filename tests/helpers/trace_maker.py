"""Small hand-made traces in the PyTorch profiler's format: times in microseconds, all figures
known.
"""

import gzip
import json

HOST, THREAD = 4242, 4242
BASE_US = 4302434813144.0
"""The start of real traces: a time so large that a float resolves only a thousandth of a
microsecond.
"""

_ENDS = {"HtoD": "({kind} -> Device)", "DtoH": "(Device -> {kind})", "DtoD": "(Device -> Device)"}


class TraceMaker:
    """Events of one process; methods return the object itself, so that a trace reads as one
    expression.
    """

    def __init__(self, **header):
        self.header = header
        self.events = []
        self._correlation = 100

    def add(self, category, name, start, lasts, *, pid=HOST, tid=THREAD, **args):
        """Add an event of any category."""
        event = {
            "ph": "X", "cat": category, "name": name, "pid": pid, "tid": tid, "ts": BASE_US + start,
            "dur": lasts, "args": args,
        }  # fmt: skip
        self.events.append(event)
        return self

    def kernel(self, start, lasts, *, device=0, stream=7):
        return self.add(
            "kernel", "gemm", start, lasts, pid=device, tid=stream, device=device, stream=stream
        )

    def copy(
        self,
        start,
        lasts,
        nbytes,
        *,
        way="HtoD",
        kind="Pageable",
        asked=None,
        device=0,
        call_lasts=5,
    ):
        """Add a copy on the device and, if `asked` is a time, its call on the host."""
        self._correlation += 1
        name = f"Memcpy {way} {_ENDS[way].format(kind=kind)}"
        ids = {"device": device, "correlation": self._correlation}
        self.add("gpu_memcpy", name, start, lasts, pid=device, tid=7, bytes=nbytes, stream=7, **ids)
        if asked is not None:
            self.call("cudaMemcpyAsync", asked, call_lasts, correlation=self._correlation)
        return self

    def call(self, name, start, lasts, *, tid=THREAD, correlation=1):
        return self.add("cuda_runtime", name, start, lasts, tid=tid, correlation=correlation)

    def op(self, name, start, lasts, *, tid=THREAD):
        return self.add("cpu_op", name, start, lasts, tid=tid)

    def step(self, number, start, lasts):
        return self.add("user_annotation", f"ProfilerStep#{number}", start, lasts)

    def steps(self, count, lasts):
        """Add steps, one after the other, and yield when each of them starts."""
        for start in range(0, count * lasts, lasts):
            self.step(start // lasts, start, lasts)
            yield start

    def wait(self, start, lasts):
        name = "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__"
        return self.add("user_annotation", name, start, lasts)

    def text(self):
        meta = {"ph": "M", "name": "process_name", "ts": BASE_US, "args": {"name": "python"}}
        events = {"traceEvents": [meta, *self.events], "traceName": "t"}
        return json.dumps({"schemaVersion": 1, **self.header, **events}, indent=1)

    def write(self, path):
        data = self.text().encode()
        path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
        return path


def naive_loop(steps=6, leaves=50, *, leaf_bytes=4096, leaf_us=20, kernel_us=2000, **header):
    """Return a loop that stages each leaf by its own `.to()` while the GPU waits, and then trains.

    Every step lasts ``leaves * leaf_us + kernel_us``: staging, all of it stall, then kernels.
    """
    trace = TraceMaker(deviceProperties=[{"id": 0, "name": "NVIDIA H200"}], **header)
    for start in trace.steps(steps, leaves * leaf_us + kernel_us):
        for leaf in range(leaves):
            at = start + leaf * leaf_us
            trace.op("aten::to", at, leaf_us).copy(at + 10, 2, leaf_bytes, asked=at + 5)
        trace.kernel(start + leaves * leaf_us, kernel_us)
    return trace
