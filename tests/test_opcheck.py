"""opcheck, all of it: schema, autograd registration, fakes, AOTDispatch with fixed and dynamic sizes."""

from common import every_dtype_of_core, float32_only, parametrize_samples, random_like, subsets, tensors_of, with_grad

from deformc.testing import ALL_TEST_UTILS
from deformc.testing import opcheck as check

# The rest compares compiled with eager results by a rule to which NaN equals nothing: test_compile.py does it for them.
REGISTRATION = ("test_schema", "test_autograd_registration", "test_faketensor")


def opcheck(sample, op, arguments):
    check(op, arguments, test_utils=REGISTRATION if "nan_result" in sample.tags else ALL_TEST_UTILS)


def op_level(sample):
    return sample.op_level


def core(sample):
    return sample.core and sample.op_level


@parametrize_samples(op_level, every_dtype_of_core)
def test_every_gradient(device, spec, sample, dtypes):
    arguments = sample.make(device, dtypes, 0)
    arguments = with_grad(arguments, tensors_of(spec, arguments))
    opcheck(sample, spec.op, spec.op_arguments(arguments))


@parametrize_samples(core, float32_only)
def test_no_gradient_and_one_at_a_time(device, spec, sample, dtypes):
    arguments = sample.make(device, dtypes, 0)
    for wanted in subsets(tensors_of(spec, arguments)):
        if len(wanted) <= 1:
            opcheck(sample, spec.op, spec.op_arguments(with_grad(arguments, wanted)))


@parametrize_samples(op_level, every_dtype_of_core)
def test_backward_op(device, spec, sample, dtypes):
    arguments = sample.make(device, dtypes, 0)
    grad_output = random_like(spec.function(**arguments))
    needs = frozenset(tensors_of(spec, arguments))
    opcheck(sample, spec.backward_op, spec.backward_arguments(arguments, grad_output, needs))


@parametrize_samples(core, float32_only)
def test_backward_op_one_gradient_at_a_time(device, spec, sample, dtypes):
    arguments = sample.make(device, dtypes, 0)
    grad_output = random_like(spec.function(**arguments))
    for name in tensors_of(spec, arguments):
        opcheck(sample, spec.backward_op, spec.backward_arguments(arguments, grad_output, frozenset({name})))
