"""transformers' caches, outputs and encodings are supported out of the box."""

import library_batches as made
import pytest
import torch
from class_trips import (
    DEVICES,
    Case,
    assert_alike,
    by_device_and_start_method,
    by_device_and_way,
    check,
    check_workers,
    target,
)

import pinstage as ps


def cache_to(cache, device):
    """Move a cache as if it had been filled on the device; caches have no ``to``."""
    for layer in cache.layers:
        layer.keys, layer.values, layer.device = (
            layer.keys.to(device),
            layer.values.to(device),
            device,
        )
    return cache


def pair_to(cache, device):
    cache_to(cache.self_attention_cache, device)
    cache_to(cache.cross_attention_cache, device)
    return cache


def output_to(output, device):
    output.logits = output.logits.to(device)
    cache_to(output.past_key_values, device)
    return output


CASES = [
    Case(made.dynamic_cache, cache_to),
    Case(made.encoder_decoder_cache, pair_to),
    Case(made.model_output, output_to),
    Case(made.encoding),
]


@by_device_and_way(*CASES)
def test_a_batch_arrives_as_it_was(case, way, device):
    check(case, way, device)


@by_device_and_start_method
def test_batches_arrive_from_workers_as_they_were(method, device):
    check_workers(CASES, method, device)


@pytest.mark.parametrize("device", DEVICES)
def test_a_staged_cache_goes_on(device):
    device = target(device)
    with ps.Stager(device, max_bytes="1MiB") as stager:
        staged = stager.to_device(made.dynamic_cache(1))
    assert staged.layers[0].device == staged.layers[0].keys.device == device
    token = torch.ones(3, 4, 1, 2, device=device)
    keys, _ = staged.update(token, token, 0)
    assert keys.shape == (3, 4, 4, 2)
    assert_alike(made.dynamic_cache(1).layers[0].keys, made.values(1, 4, 3, 2))
