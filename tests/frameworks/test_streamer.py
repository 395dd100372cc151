"""Weights from Run:ai's Model Streamer, whose memory limit is smaller than the file."""

import pytest
import torch
from safetensors.torch import save_file

import pinstage as ps

MIB = 1 << 20


@pytest.fixture
def state():
    """Tensors of 51 MiB together, in groups of at most 16 MiB."""
    generator = torch.Generator().manual_seed(0)
    return {
        f"layer.{count}": torch.randn(count, 128, 128, generator=generator)
        for count in range(1, 41)
    }


@pytest.fixture
def stream(state, tmp_path, monkeypatch):
    """Return a function that loads the state from its file by a streamer with some options."""
    monkeypatch.setenv("RUNAI_STREAMER_MEMORY_LIMIT", str(16 * MIB))
    from runai_model_streamer import SafetensorsStreamer

    save_file(state, tmp_path / "state.safetensors")

    def load(**options):
        loaded = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
        with ps.Stager("cpu", max_bytes=32 * MIB) as stager, SafetensorsStreamer() as streamer:
            streamer.stream_file(str(tmp_path / "state.safetensors"), **options)
            stager.load_weights(loaded, streamer.get_tensors())
        return loaded

    return load


def test_all_bits_of_a_streamed_file_arrive(state, stream):
    loaded = stream()
    assert [name for name, tensor in state.items() if not torch.equal(loaded[name], tensor)] == []


def test_tensors_that_the_streamer_overwrites_are_refused(stream):
    with pytest.raises(RuntimeError, match=r"layer\.\d+ was overwritten after it was read"):
        stream(owned=False)
