"""An optimizer's state on the host between steps: weights bit-equal, and nothing read before it has
arrived.
"""

import copy
import gc
from functools import partial

import pytest
import torch
from doubles import assert_idle

from pinstage.errors import PoolClosedError
from pinstage.offload import optimizer_state

KIB = 1 << 10

OPTIMIZERS = {
    "adam": partial(torch.optim.Adam, foreach=False),
    "adam, foreach": partial(torch.optim.Adam, foreach=True),
    "adam, fused": partial(torch.optim.Adam, fused=True, amsgrad=True),
    "adamw": partial(torch.optim.AdamW, lr=1e-2),
    "sgd with momentum": partial(torch.optim.SGD, lr=1e-2, momentum=0.9),
    "sgd, fused": partial(torch.optim.SGD, lr=1e-2, momentum=0.9, fused=True),
    "adagrad": torch.optim.Adagrad,
    "rmsprop": partial(torch.optim.RMSprop, momentum=0.9, centered=True),
    "plain sgd": partial(torch.optim.SGD, lr=1e-2),
    "lbfgs": partial(torch.optim.LBFGS, max_iter=3),
}


@pytest.fixture(params=[None, (6, 6), (1000, 0), (0, 1000)], ids=str)
def target(request, late):
    """Run a test with copies that are done at once, and with copies that are late out, back, or
    both.
    """
    return request.param and late(*request.param)


def make(name):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Tanh(), torch.nn.Linear(64, 32))
    return model, OPTIMIZERS[name](model.parameters())


def train(model, optimizer, steps, first=0):
    for number in range(first, first + steps):
        torch.manual_seed(number)
        x = torch.randn(8, 32)

        def closure(x=x):
            optimizer.zero_grad()
            loss = (model(x) - x).square().mean()
            loss.backward()
            return loss

        if isinstance(optimizer, torch.optim.LBFGS):
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()


def assert_trained(model, steps, name="adam"):
    """Check that the weights are those of a plain run."""
    expected, plain = make(name)
    train(expected, plain, steps)
    assert all(map(torch.equal, model.parameters(), expected.parameters()))


@pytest.fixture
def adam(pool):
    """A model after a step, its optimizer, and the handle of the optimizer's state. After two steps
    more, the weights must be those of a plain run.
    """
    model, optimizer = make("adam")
    offloaded = optimizer_state(optimizer, pool, min_bytes=KIB)
    train(model, optimizer, 1)
    yield model, optimizer, offloaded
    steps = int(optimizer.state[model[0].bias]["step"])
    train(model, optimizer, 2, steps)
    assert_trained(model, steps + 2)
    offloaded.close()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_weights_are_bit_equal_to_a_plain_run(pool, name):
    model, optimizer = make(name)
    offloaded = optimizer_state(optimizer, pool, min_bytes=KIB)
    train(model, optimizer, 6)
    assert_trained(model, 6, name)
    large = 2 * 32 * 64 * 4
    if name == "lbfgs":
        large = offloaded.stats().host_bytes
    states = {"plain sgd": 0, "lbfgs": 1, "rmsprop": 3, "adam, fused": 3, "adagrad": 1}
    expected_bytes = large * states.get(name, 1 if "sgd" in name else 2)
    assert (offloaded.stats().host_bytes, offloaded.stats().stayed_at_cap_bytes) == (
        expected_bytes,
        0,
    )


def test_state_cannot_be_read_between_steps_by_accident(adam):
    model, optimizer, _ = adam
    average = optimizer.state[model[0].weight]["exp_avg"]
    assert (average.device.type, average.shape) == ("meta", model[0].weight.shape)
    with pytest.raises((RuntimeError, NotImplementedError)):
        average.sum().item()
    assert optimizer.state[model[0].bias]["exp_avg"].device.type == "cpu"  # small


def test_state_that_is_there_already_leaves_at_once(pool):
    model, optimizer = make("adam")
    train(model, optimizer, 2)
    offloaded = optimizer_state(optimizer, pool, min_bytes=KIB)
    assert offloaded.stats().host_bytes == 4 * 32 * 64 * 4
    train(model, optimizer, 2, 2)
    assert_trained(model, 4)


@pytest.mark.parametrize("name", ["adam", "sgd with momentum"])
def test_a_state_dict_midway_is_exact_and_loadable(pool, name):
    plain_model, plain = make(name)
    train(plain_model, plain, 3)
    saved = copy.deepcopy(plain.state_dict()), copy.deepcopy(plain_model.state_dict())
    model, optimizer = make(name)
    offloaded = optimizer_state(optimizer, pool, min_bytes=KIB)
    train(model, optimizer, 3)
    found = optimizer.state_dict()
    torch.testing.assert_close(found["state"], saved[0]["state"], rtol=0, atol=0)
    assert offloaded.stats().host_bytes == 0
    train(model, optimizer, 3, 3)
    assert_trained(model, 6, name)
    assert offloaded.stats().host_bytes > 0
    model.load_state_dict(saved[1])
    optimizer.load_state_dict(saved[0])
    assert offloaded.stats().host_bytes > 0
    train(model, optimizer, 3, 3)
    assert_trained(model, 6, name)


def test_the_state_can_be_read_inside_the_block(adam):
    model, optimizer, offloaded = adam
    host_bytes = offloaded.stats().host_bytes
    with offloaded:
        assert offloaded.stats().host_bytes == 0
        assert optimizer.state[model[0].weight]["exp_avg"].abs().sum() > 0
    assert offloaded.stats().host_bytes == host_bytes > 0


def test_offload_undoes_an_onload(adam):
    *_, offloaded = adam
    offloaded.onload()
    assert offloaded.stats().device_bytes == offloaded.stats().host_bytes > 0
    offloaded.offload()
    assert offloaded.stats().device_bytes == 0


def test_what_does_not_fit_stays_and_is_counted(make_pool, target):
    pool = make_pool(20 * KIB)
    model, optimizer = make("adam")
    offloaded = optimizer_state(optimizer, pool, min_bytes=KIB)
    train(model, optimizer, 4)
    assert_trained(model, 4)
    assert (offloaded.stats().host_bytes, offloaded.stats().stayed_at_cap_bytes) == (
        16 * KIB,
        16 * KIB,
    )
    offloaded.close()
    assert_idle(pool, target)


@pytest.mark.parametrize("target", [None])  # late copies keep slabs in flight
def test_the_pool_allocates_nothing_after_the_first_step(adam, pool):
    model, optimizer, _ = adam
    misses = pool.stats().misses
    train(model, optimizer, 4, 1)
    assert pool.stats().misses == misses


def test_after_close_the_state_stays_on_the_device(adam):
    model, optimizer, offloaded = adam
    offloaded.close()
    offloaded.close()
    with offloaded:
        pass
    train(model, optimizer, 1, 1)
    assert offloaded.stats().host_bytes == 0


def test_a_refused_optimizer_steps_as_before(make_pool):
    model, optimizer = make("adam")
    train(model, optimizer, 1)
    closed = make_pool(1 << 20)
    closed.close()
    with pytest.raises(PoolClosedError):
        optimizer_state(optimizer, closed, min_bytes=KIB)
    train(model, optimizer, 1)


def test_tensors_that_share_memory_stay(pool):
    model, optimizer = make("adam")
    train(model, optimizer, 1)
    state, other = (optimizer.state[layer.weight] for layer in (model[0], model[2]))
    state["exp_avg"], state["exp_avg_sq"] = torch.stack([state["exp_avg"], state["exp_avg_sq"]])
    other["exp_avg_sq"] = other["exp_avg"]
    offloaded = optimizer_state(optimizer, pool, min_bytes=KIB)
    assert offloaded.stats().host_bytes == 0


@pytest.mark.parametrize(
    "make_state",
    [
        lambda: torch.arange(1024.0)[-1:].expand(1024),
        lambda: torch.randn(8, dtype=torch.complex64).conj(),
    ],
    ids=["repeated elements", "lazily conjugated"],
)
def test_unusual_tensors_stay_and_keep_their_values(pool, make_state):
    state = make_state()
    expected, parameter = state.clone(), torch.nn.Parameter(torch.zeros_like(state))
    optimizer = torch.optim.SGD([parameter])
    optimizer.state[parameter]["average"] = state
    with optimizer_state(optimizer, pool, min_bytes=0) as offloaded:
        assert offloaded.stats().host_bytes == 0
        assert torch.equal(optimizer.state[parameter]["average"], expected)


def test_a_dropped_optimizer_returns_its_slabs(pool, target):
    model, optimizer = make("adam")
    torch.optim.lr_scheduler.ConstantLR(optimizer)  # makes a cycle of it
    optimizer_state(optimizer, pool, min_bytes=KIB)
    train(model, optimizer, 2)
    assert pool.stats().leased_slabs > 0
    del optimizer
    gc.collect()
    assert_idle(pool, target)


def test_what_is_no_optimizer_is_refused(pool):
    with pytest.raises(
        TypeError, match=r"cannot offload the state of a Linear: pass an optimizer of torch\.optim"
    ):
        optimizer_state(torch.nn.Linear(1, 1), pool)
