"""An optimizer's state on the host between steps: weights bit-equal, and nothing read before it has
arrived.
"""

import copy
import gc

import pytest
import torch
from doubles import QueuedTarget, assert_idle, known

from pinstage.offload import optimizer_state

KIB = 1 << 10

OPTIMIZERS = {
    "adam": lambda parameters: torch.optim.Adam(parameters, foreach=False),
    "adam, foreach": lambda parameters: torch.optim.Adam(parameters, foreach=True),
    "adam, fused": lambda parameters: torch.optim.Adam(parameters, fused=True, amsgrad=True),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
    "sgd with momentum": lambda parameters: torch.optim.SGD(parameters, lr=1e-2, momentum=0.9),
    "sgd, fused": lambda parameters: torch.optim.SGD(parameters, lr=1e-2, momentum=0.9, fused=True),
    "adagrad": torch.optim.Adagrad,
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters, momentum=0.9, centered=True),
    "plain sgd": lambda parameters: torch.optim.SGD(parameters, lr=1e-2),
    "lbfgs": lambda parameters: torch.optim.LBFGS(parameters, max_iter=3),
}


@pytest.fixture(params=[None, (6, 6), (1000, 0), (0, 1000)], ids=str)
def target(request, monkeypatch):
    """Run a test with copies that are done at once, and with copies that are late out, back, or
    both.
    """
    if request.param is None:
        yield None
        return
    late = QueuedTarget(*request.param)
    monkeypatch.setattr("pinstage.offload._optimizer.shared_targets", known(late))
    yield late
    late.run_all()
    assert late.lost == 0


@pytest.fixture
def pool(make_pool, target):
    pool = make_pool(1 << 20)
    yield pool
    assert_idle(pool, target)


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


def assert_same_weights(model, other):
    assert all(map(torch.equal, model.parameters(), other.parameters()))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_weights_are_bit_equal_to_a_plain_run(pool, name):
    expected, plain = make(name)
    train(expected, plain, 6)
    model, optimizer = make(name)
    offloaded = optimizer_state(optimizer, pool, min_bytes=KIB)
    train(model, optimizer, 6)
    assert_same_weights(model, expected)
    large = 2 * 32 * 64 * 4
    if name == "lbfgs":
        large = offloaded.stats().host_bytes
    states = {"plain sgd": 0, "lbfgs": 1, "rmsprop": 3, "adam, fused": 3, "adagrad": 1}
    expected_bytes = large * states.get(name, 1 if "sgd" in name else 2)
    assert (offloaded.stats().host_bytes, offloaded.stats().stayed_at_cap_bytes) == (
        expected_bytes,
        0,
    )
    offloaded.close()


def test_state_cannot_be_read_between_steps_by_accident(pool):
    model, optimizer = make("adam")
    offloaded = optimizer_state(optimizer, pool, min_bytes=KIB)
    train(model, optimizer, 1)
    average = optimizer.state[model[0].weight]["exp_avg"]
    assert (average.device.type, average.shape) == ("meta", model[0].weight.shape)
    with pytest.raises((RuntimeError, NotImplementedError)):
        average.sum().item()
    assert optimizer.state[model[0].bias]["exp_avg"].device.type == "cpu"  # small
    offloaded.close()


def test_state_that_is_there_already_leaves_at_once(pool):
    model, optimizer = make("adam")
    train(model, optimizer, 2)
    offloaded = optimizer_state(optimizer, pool, min_bytes=KIB)
    assert offloaded.stats().host_bytes == 4 * 32 * 64 * 4
    train(model, optimizer, 2, 2)
    expected, plain = make("adam")
    train(expected, plain, 4)
    assert_same_weights(model, expected)
    offloaded.close()


@pytest.mark.parametrize("name", ["adam", "sgd with momentum"])
def test_a_state_dict_midway_is_exact_and_loadable(pool, name):
    expected, plain = make(name)
    train(expected, plain, 3)
    saved = copy.deepcopy(plain.state_dict()), copy.deepcopy(expected.state_dict())
    train(expected, plain, 3, 3)
    model, optimizer = make(name)
    offloaded = optimizer_state(optimizer, pool, min_bytes=KIB)
    train(model, optimizer, 3)
    found = optimizer.state_dict()
    for one, other in zip(found["state"].values(), saved[0]["state"].values(), strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[key], other[key]) for key in one)
    assert offloaded.stats().host_bytes == 0
    train(model, optimizer, 3, 3)
    assert_same_weights(model, expected)
    assert offloaded.stats().host_bytes > 0
    model.load_state_dict(saved[1])
    optimizer.load_state_dict(saved[0])
    assert offloaded.stats().host_bytes > 0
    train(model, optimizer, 3, 3)
    assert_same_weights(model, expected)
    offloaded.close()


def test_the_state_can_be_read_inside_the_block(pool):
    expected, plain = make("adam")
    train(expected, plain, 4)
    model, optimizer = make("adam")
    offloaded = optimizer_state(optimizer, pool, min_bytes=KIB)
    train(model, optimizer, 2)
    host_bytes = offloaded.stats().host_bytes
    with offloaded:
        assert offloaded.stats().host_bytes == 0
        assert optimizer.state[model[0].weight]["exp_avg"].abs().sum() > 0
    assert offloaded.stats().host_bytes == host_bytes > 0
    train(model, optimizer, 2, 2)
    assert_same_weights(model, expected)
    offloaded.close()


def test_offload_undoes_an_onload(pool):
    expected, plain = make("adam")
    train(expected, plain, 4)
    model, optimizer = make("adam")
    offloaded = optimizer_state(optimizer, pool, min_bytes=KIB)
    train(model, optimizer, 2)
    offloaded.onload()
    assert offloaded.stats().device_bytes == offloaded.stats().host_bytes > 0
    offloaded.offload()
    assert offloaded.stats().device_bytes == 0
    train(model, optimizer, 2, 2)
    assert_same_weights(model, expected)
    offloaded.close()


def test_what_does_not_fit_stays_and_is_counted(make_pool, target):
    pool = make_pool(20 * KIB)
    expected, plain = make("adam")
    train(expected, plain, 4)
    model, optimizer = make("adam")
    offloaded = optimizer_state(optimizer, pool, min_bytes=KIB)
    train(model, optimizer, 4)
    assert_same_weights(model, expected)
    assert (offloaded.stats().host_bytes, offloaded.stats().stayed_at_cap_bytes) == (
        16 * KIB,
        16 * KIB,
    )
    offloaded.close()
    assert_idle(pool, target)


def test_the_pool_allocates_nothing_after_the_first_step(pool, target):
    model, optimizer = make("adam")
    offloaded = optimizer_state(optimizer, pool, min_bytes=KIB)
    train(model, optimizer, 1)
    if target is not None:
        target.run_all()
    misses = pool.stats().misses
    train(model, optimizer, 4, 1)
    if target is None:  # late copies keep slabs in flight
        assert pool.stats().misses == misses
    offloaded.close()


def test_after_close_the_state_stays_on_the_device(pool):
    model, optimizer = make("adam")
    offloaded = optimizer_state(optimizer, pool, min_bytes=KIB)
    train(model, optimizer, 2)
    offloaded.close()
    offloaded.close()
    train(model, optimizer, 2, 2)
    assert offloaded.stats().host_bytes == 0
    expected, plain = make("adam")
    train(expected, plain, 4)
    assert_same_weights(model, expected)


def test_tensors_that_share_memory_stay(pool):
    model, optimizer = make("adam")
    train(model, optimizer, 1)
    weight = model[0].weight
    state = optimizer.state[weight]
    together = torch.stack([state["exp_avg"], state["exp_avg_sq"]])
    state["exp_avg"], state["exp_avg_sq"] = together
    optimizer.state[model[2].weight]["exp_avg_sq"] = optimizer.state[model[2].weight]["exp_avg"]
    offloaded = optimizer_state(optimizer, pool, min_bytes=KIB)
    assert offloaded.stats().host_bytes == 0
    offloaded.close()


def test_tensors_that_repeat_elements_stay(pool):
    parameter = torch.nn.Parameter(torch.zeros(1024))
    optimizer = torch.optim.SGD([parameter])
    repeated = torch.arange(1024.0)[-1:].expand(1024)
    optimizer.state[parameter]["average"] = repeated
    with optimizer_state(optimizer, pool, min_bytes=0) as offloaded:
        assert offloaded.stats().host_bytes == 0
        assert torch.equal(optimizer.state[parameter]["average"], repeated)


def test_lazily_conjugated_tensors_are_not_mistaken(pool):
    parameter = torch.nn.Parameter(torch.zeros(8, dtype=torch.complex64))
    optimizer = torch.optim.SGD([parameter])
    state = torch.randn(8, dtype=torch.complex64)
    optimizer.state[parameter]["average"] = state.clone().conj()
    with optimizer_state(optimizer, pool, min_bytes=0):
        assert torch.equal(optimizer.state[parameter]["average"], state.conj())


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
