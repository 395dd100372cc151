"""Without each private name of torch and CPython in turn, pinstage works or refuses, with a
message.
"""

import json
import re
import subprocess
from pathlib import Path

import pytest
import torch
import warm
from torch_names import CASES, WORKS

from pinstage._compat import calls, probes, views
from pinstage.errors import PinstageError, StagingWarning


@pytest.fixture(scope="module")
def found():
    """The results of each case, read from the running program."""
    program = Path(__file__).parent / "helpers" / "torch_names.py"
    results = {}
    with subprocess.Popen(warm.command(program), stdout=subprocess.PIPE, text=True) as process:

        def result(name):
            while name not in results:
                line = process.stdout.readline()
                assert line, f"the program ended before it came to {name!r}"
                read = json.loads(line)
                results[read["name"]] = read
            assert "raised" not in results[name], results[name]["raised"]
            return results[name]

        yield result
        process.kill()


every_case = pytest.mark.parametrize("name", CASES)


@every_case
def test_without_a_private_name_batches_arrive_intact(found, name):
    assert (found(name)["wrong"], found(name)["in use"]) == ([], 0)


@every_case
def test_without_a_private_name_the_rest_works_clearly(found, name):
    for what, expected in (WORKS | CASES[name].instead).items():
        assert re.fullmatch(expected, found(name)["outcomes"][what]), what


@every_case
def test_a_slower_way_is_told_once(found, name):
    expected = CASES[name].told
    told = found(name)["told"]
    assert len(told) == (expected is not None), told
    assert all(re.match(expected, text) for text in told)


@every_case
def test_the_doctor_names_each_missing_name(found, name):
    here, usually = found(name)["doctor"], found("nothing")["doctor"]
    assert ", ".join(sorted(set(here) - set(usually))) == (CASES[name].doctor or "")


# -- streams: a stand-in for torch.cuda, so that no GPU is needed ----------------------------------


class Stream:
    def __init__(self, device=None, stream_id=None, device_index=0, device_type=1):
        self.stream_id = next(Stream.numbers) if stream_id is None else stream_id
        self.device_index, self.device_type = device_index, device_type
        self.cuda_stream = 0x1000 * self.stream_id

    def __eq__(self, other):
        return self.stream_id == other.stream_id

    __hash__ = None


@pytest.fixture
def cuda(monkeypatch):
    """Let torch have one GPU; return its current stream, in a list."""
    Stream.numbers = iter(range(1, 100))
    current = [Stream(stream_id=0)]

    def set_stream(stream):
        current[0] = stream

    monkeypatch.setattr("torch.cuda.current_device", lambda: 0)
    monkeypatch.setattr("torch.cuda.current_stream", lambda device: current[0])
    monkeypatch.setattr("torch.cuda.Stream", Stream)
    monkeypatch.setattr("torch.cuda.set_stream", set_stream)
    private = {
        "_cuda_getDevice": lambda: 0,
        "_cuda_getCurrentStream": lambda device: calls.ids_of(current[0]),
        "_cuda_getCurrentRawStream": lambda device: current[0].cuda_stream,
        "_cuda_setStream": lambda *ids: set_stream(Stream(None, *ids)),
    }
    for name, function in private.items():
        monkeypatch.setattr(f"torch._C.{name}", function, raising=False)
    calls.cuda_calls.cache_clear()
    monkeypatch.setattr(probes, "_warned", set())
    yield current
    calls.cuda_calls.cache_clear()


def test_streams_are_set_by_private_functions_where_possible(cuda):
    assert calls.cuda_calls().set_stream is torch._C._cuda_setStream
    assert cuda[0].stream_id == 0


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("_cuda_getDevice", None),
        ("_cuda_getDevice", lambda: 1),
        ("_cuda_getCurrentStream", None),
        ("_cuda_getCurrentStream", lambda device: (0, 0)),
        ("_cuda_getCurrentStream", lambda device: (7, 0, 1)),
        ("_cuda_getCurrentRawStream", None),
        ("_cuda_getCurrentRawStream", lambda device: 7),
        ("_cuda_setStream", None),
    ],
)
def test_without_them_public_functions_set_streams(cuda, monkeypatch, name, other):
    if other is None:
        monkeypatch.delattr(f"torch._C.{name}")
    else:
        monkeypatch.setattr(f"torch._C.{name}", other)
    with pytest.warns(
        StagingWarning, match=r"by torch.cuda.set_stream, which takes longer: torch "
    ):
        found = calls.cuda_calls()
    calls.cuda_calls.cache_clear()
    calls.cuda_calls()  # does not warn again
    assert cuda[0].stream_id == 0
    assert (found.device(), found.stream(0)) == (0, (0, 0, 1))
    found.set_stream(5, 0, 1)
    assert (cuda[0].stream_id, found.raw_stream(0)) == (5, 0x5000)


# -- names that no probe can test ------------------------------------------------------------------


def test_mode_tensors_do_not_count_as_memory():
    class Ours(torch.Tensor):
        pass

    with pytest.raises(
        PinstageError, match=r"it made a Ours; leave the mode \(FakeTensorMode, say\)"
    ):
        views.check_is_plain(torch.ones(2).as_subclass(Ours))
