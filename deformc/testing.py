"""Checks of custom operators for those who test theirs: :func:`opcheck`."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

__all__ = ["opcheck"]

ALL_TEST_UTILS = (
    "test_schema",
    "test_autograd_registration",
    "test_faketensor",
    "test_aot_dispatch_static",
    "test_aot_dispatch_dynamic",
)
# torch's own test of the registration raises NotImplementedError for tensors of other devices.
_KNOWN_TO_TORCH = {"cpu", "cuda", "xpu"}


def opcheck(
    op: torch._ops.OpOverload,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    test_utils: Sequence[str] = ALL_TEST_UTILS,
    rtol: float | None = None,
    atol: float | None = None,
) -> dict[str, str]:
    """:func:`torch.library.opcheck`, for tensors of any device.

    torch's ``test_autograd_registration`` knows CPU, CUDA and XPU tensors and raises ``NotImplementedError`` for
    others, such as those of Apple GPUs. For them the same property is asserted here: the operator has a kernel for the
    device's autograd key, its results require a gradient if an argument does, and the backward pass gives each
    argument a gradient of its shape, dtype and device.

    Args:
        op: the overload, such as ``torch.ops.deformc.deform_conv2d.default``.
        args, kwargs: arguments of one call.
        test_utils: names of the tests to run.
        rtol, atol: of the comparison of compiled with eager results; both or none.

    Returns:
        The name of each test with ``"SUCCESS"``.

    Raises:
        torch.testing._internal.optests.OpCheckError: a test of torch failed.
        AssertionError: the operator's autograd is not registered as it should be.
    """
    kwargs = dict(kwargs or {})
    tensors = [leaf for leaf in pytree.arg_tree_leaves(*args, **kwargs) if isinstance(leaf, Tensor)]
    devices = {tensor.device.type for tensor in tensors}
    own = devices - _KNOWN_TO_TORCH and "test_autograd_registration" in test_utils
    torchs = [name for name in test_utils if not (own and name == "test_autograd_registration")]
    results = torch.library.opcheck(op, tuple(args), kwargs, test_utils=torchs, rtol=rtol, atol=atol) if torchs else {}
    if own:
        if any(tensor.requires_grad for tensor in tensors):
            for device in sorted(devices - _KNOWN_TO_TORCH):
                _check_autograd_registration(op, args, kwargs, device)
        results["test_autograd_registration"] = "SUCCESS"
    return results


def _check_autograd_registration(op: torch._ops.OpOverload, args: Sequence[Any], kwargs: dict, device: str) -> None:
    name = op.name()
    key = f"Autograd{device.upper()}"
    has_kernel = any(
        torch._C._dispatch_has_kernel_for_dispatch_key(name, one)
        for one in (key, "Autograd", "CompositeImplicitAutograd")
    )
    inputs = [leaf for leaf in pytree.arg_tree_leaves(*args, **kwargs) if isinstance(leaf, Tensor)]
    given = {id(tensor) for tensor in inputs}
    # Without a kernel of its own, results can only require a gradient by a kernel of the device that records autograd
    # itself; torch's fallback would hide it.
    mode = torch._C._get_autograd_fallback_mode()
    torch._C._set_autograd_fallback_mode("nothing")
    try:
        outputs = [leaf for leaf in pytree.tree_leaves(op(*args, **kwargs)) if isinstance(leaf, Tensor)]
    finally:
        torch._C._set_autograd_fallback_mode(mode)
    recorded = [output for output in outputs if output.requires_grad and id(output) not in given]
    if not has_kernel:
        assert not recorded, (
            f"{name}: a result requires a gradient, but the operator has no kernel for {key} or Autograd; autograd "
            f"belongs there and not into the kernel for {device}"
        )
        return
    assert recorded, f"{name}: an argument requires a gradient, and no result does for {device} tensors"
    wanted = [tensor for tensor in inputs if tensor.requires_grad]
    gradients = torch.autograd.grad(recorded, wanted, [torch.ones_like(one) for one in recorded], allow_unused=True)
    for tensor, gradient in zip(wanted, gradients, strict=True):
        if gradient is not None:
            assert (gradient.device, gradient.dtype, gradient.shape) == (tensor.device, tensor.dtype, tensor.shape), (
                f"{name}: a gradient of shape {list(gradient.shape)}, {gradient.dtype}, {gradient.device} for an "
                f"argument of shape {list(tensor.shape)}, {tensor.dtype}, {tensor.device}"
            )
