"""Right with any number of threads, PyTorch's and the caller's."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from common import assert_close, gradients, tensors_of
from specs import Dtypes
from specs.deform_conv2d import SPEC, problem

PROBLEMS = {
    "one_image": {"n": 1, "c": 34, "o": 20, "size": (37, 41)},
    "more_images_than_threads": {"n": 7, "c": 6, "o": 5, "size": (9, 8), "groups": 1, "offset_groups": 3},
    "grouped": {"n": 2, "c": 24, "o": 12, "size": (23, 19), "groups": 4, "offset_groups": 2, "mask": False},
    "smaller_than_threads": {"n": 1, "c": 1, "o": 1, "size": (1, 1)},
}


def make(name, seed=0):
    return problem(**PROBLEMS[name])("cpu", Dtypes(torch.float32, torch.float32, torch.float32), seed)


def assert_results_close(actual, expected):
    assert_close(actual[0], expected[0])
    for name in expected[1]:
        assert_close(actual[1][name], expected[1][name], name)


@pytest.fixture
def restore_threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("threads", [1, 2, 3, 16])
@pytest.mark.parametrize("name", PROBLEMS)
def test_number_of_torch_threads(restore_threads, name, threads):
    arguments = make(name)
    wanted = tensors_of(SPEC, arguments)
    expected = gradients(SPEC.reference, arguments, wanted)
    torch.set_num_threads(threads)
    assert_results_close(gradients(SPEC.function, arguments, wanted), expected)


def test_concurrent_calls():
    """Eight Python threads with different problems, each right every time."""
    jobs = [make(name, seed) for name in PROBLEMS for seed in range(4)]
    results = [gradients(SPEC.reference, arguments, tensors_of(SPEC, arguments)) for arguments in jobs]

    def run(index):
        arguments = jobs[index % len(jobs)]
        return gradients(SPEC.function, arguments, tensors_of(SPEC, arguments))

    with ThreadPoolExecutor(8) as pool:
        for index, result in enumerate(pool.map(run, range(10 * len(jobs)))):
            assert_results_close(result, results[index % len(jobs)])


def test_call_in_a_parallel_region():
    """Autograd runs a backward in a thread of its own; two at once must not share workspace."""
    jobs = [make("one_image", seed) for seed in range(4)]
    wanted = tensors_of(SPEC, jobs[0])
    expected = [gradients(SPEC.reference, arguments, wanted) for arguments in jobs]
    with ThreadPoolExecutor(4) as pool:
        for actual, right in zip(
            pool.map(lambda job: gradients(SPEC.function, job, wanted), jobs), expected, strict=True
        ):
            assert_results_close(actual, right)
