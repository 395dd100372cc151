"""torchrec's jagged and keyed tensors are supported out of the box."""

import library_batches as made
from class_trips import Case, by_device_and_start_method, by_device_and_way, check, check_workers

CASES = [
    Case(made.kjt, made.kjt_to),
    Case(made.kjt_with_caches, made.kjt_to),
    Case(made.kjt_of_variable_strides, made.kjt_to, stays=True),
    Case(made.jagged),
    Case(made.keyed),
    Case(made.torchrec_batch),
]


@by_device_and_way(*CASES)
def test_a_batch_arrives_as_by_its_own_to(case, way, device):
    check(case, way, device)


@by_device_and_start_method
def test_worker_batches_arrive_as_by_to(method, device):
    check_workers(CASES, method, device)
