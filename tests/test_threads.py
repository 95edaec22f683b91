"""Right with any number of threads, PyTorch's and the caller's, the same every time, and after a fork."""

import multiprocessing
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from common import FLOAT32, assert_close, gradients, tensors_of
from specs import SPECS

PROBLEMS = [pytest.param(spec, sample, id=f"{spec}-{sample.name}") for spec in SPECS for sample in spec.parallel]
parametrize_problems = pytest.mark.parametrize(("spec", "sample"), PROBLEMS)


def assert_results_close(actual, expected):
    assert_close(actual[0], expected[0])
    for name in expected[1]:
        assert_close(actual[1][name], expected[1][name], name)


def with_gradients(spec, arguments, function=None):
    return gradients(function or spec.function, arguments, tensors_of(spec, arguments))


@pytest.fixture
def restore_threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("threads", [1, 2, 3, 16])
@parametrize_problems
def test_number_of_torch_threads(restore_threads, spec, sample, threads):
    arguments = sample.make("cpu", FLOAT32, 0)
    expected = with_gradients(spec, arguments, spec.reference)
    torch.set_num_threads(threads)
    assert_results_close(with_gradients(spec, arguments), expected)


@pytest.mark.parametrize("threads", [1, 2])
@parametrize_problems
def test_every_run_is_the_same(restore_threads, spec, sample, threads):
    """Bit by bit, and whether deterministic algorithms were asked for or not."""
    torch.set_num_threads(threads)
    arguments = sample.make("cpu", FLOAT32, 0)
    output, expected = with_gradients(spec, arguments)
    for run in range(20):
        torch.use_deterministic_algorithms(run % 2 == 0)
        try:
            again, actual = with_gradients(spec, arguments)
        finally:
            torch.use_deterministic_algorithms(False)
        assert torch.equal(again, output)
        for name, gradient in expected.items():
            assert torch.equal(actual[name], gradient), name


@pytest.mark.parametrize("deterministic", [False, True])
@parametrize_problems
def test_the_backward_op_is_told_to_be_deterministic(spec, sample, deterministic):
    arguments = sample.make("cpu", FLOAT32, 0)
    flags = []

    class Record(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function is spec.backward_op:
                flags.append(args[-1])
            return function(*args, **kwargs or {})

    torch.use_deterministic_algorithms(deterministic)
    try:
        with Record():
            with_gradients(spec, arguments)
    finally:
        torch.use_deterministic_algorithms(False)
    assert flags == [deterministic]


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_concurrent_calls(spec):
    """Eight Python threads with different problems, each right every time; they must not share workspace."""
    jobs = [sample.make("cpu", FLOAT32, seed) for sample in spec.parallel for seed in range(4)]
    results = [with_gradients(spec, arguments, spec.reference) for arguments in jobs]
    with ThreadPoolExecutor(8) as pool:
        for index, result in enumerate(
            pool.map(lambda i: with_gradients(spec, jobs[i % len(jobs)]), range(10 * len(jobs)))
        ):
            assert_results_close(result, results[index % len(jobs)])


def _in_child(results, jobs):
    torch.set_num_threads(1)  # the threads of the parent are not in the child: torch's own operators hang without this
    results.put([torch.equal(with_gradients(spec, arguments)[0], output) for spec, arguments, output in jobs])


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="no fork on this system")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_fork_after_use(restore_threads):
    """Workers of a DataLoader are such children."""
    torch.set_num_threads(1)  # so that both sums have the same order
    jobs = []
    for spec in SPECS:
        arguments = spec.parallel[0].make("cpu", FLOAT32, 0)
        jobs.append((spec, arguments, with_gradients(spec, arguments)[0]))
    torch.set_num_threads(2)
    for spec, arguments, _ in jobs:
        with_gradients(spec, arguments)
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()
    children = [context.Process(target=_in_child, args=(results, jobs)) for _ in range(2)]
    for child in children:
        child.start()
    for child in children:
        child.join(60)
        hangs = child.is_alive()
        child.kill()
        assert not hangs
        assert child.exitcode == 0
        assert all(results.get())
