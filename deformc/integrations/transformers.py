"""The deformable attention of models of Hugging Face ``transformers``, computed by :func:`deformc.ms_deform_attn`.

Only the call that does the sampling is replaced, in one model object. The modules around it stay as they are: they hold
the parameters, and it is by their classes that ``transformers`` records attentions.
"""

from __future__ import annotations

import dataclasses
import sys
import types
from collections.abc import Callable, Iterator

from torch import Tensor, nn

from deformc.ops.ms_deform_attn import ms_deform_attn

_FUNCTIONS = ("multi_scale_deformable_attention", "multi_scale_deformable_attention_v2")


@dataclasses.dataclass(frozen=True)
class Replacement:
    """One call that was replaced: the module it is made in, and what was called."""

    module: str
    kind: str


class Report:
    """What :func:`accelerate` replaced in a model, and the way back.

    Attributes:
        replaced: the calls that were replaced.
        already: names of modules whose call had been replaced before.
    """

    def __init__(self, model_name: str) -> None:
        self.model_name = model_name
        self.replaced: tuple[Replacement, ...] = ()
        self.already: tuple[str, ...] = ()
        self._undo: list[Callable[[], None]] = []

    def undo(self) -> None:
        """Put back what this call of :func:`accelerate` replaced.

        Raises:
            RuntimeError: other code has replaced one of the calls since; those not yet put back stay replaced.
        """
        while self._undo:
            self._undo[-1]()
            self._undo.pop()
        self.replaced = ()

    def __str__(self) -> str:
        lines = [f"{self.model_name}: {len(self.replaced)} calls of deformable attention replaced"]
        if self.already:
            lines[0] += f", {len(self.already)} were already"
        kinds: dict[str, list[str]] = {}
        for replacement in self.replaced:
            kinds.setdefault(replacement.kind, []).append(replacement.module)
        for kind, modules in kinds.items():
            lines.append(f"  {kind}")
            lines += [f"    {module}" for module in modules]
        return "\n".join(lines)

    __repr__ = __str__


def accelerate(model: nn.Module) -> Report:
    """Let the deformable attention of a ``transformers`` model be computed by deformc, in place.

    Works for every model whose attention is one of the forms that ``transformers`` 5 has: Deformable DETR, RT-DETR,
    RT-DETRv2, D-FINE, DEIMv2, LW-DETR, RF-DETR, Grounding DINO, MM Grounding DINO, OmDet-Turbo, Mask2Former, OneFormer
    and PP-DocLayout. Other models, of the same class too, are not touched. Parameters and the keys of the state dict
    stay the same. Call it before ``torch.compile`` or ``torch.export``. A second call changes nothing.

    Args:
        model: the model, or a module that has it as a part.

    Returns:
        A report of what was replaced; its ``undo()`` puts it back.

    Raises:
        RuntimeError: the model has no deformable attention, or one whose form is not known.
    """
    report = Report(type(model).__name__)
    replaced, already, unknown = [], [], []
    for name, module in list(model.named_modules()):
        if not _is_deformable_attention(module):
            continue
        form = _form_of(module)
        if form is None:
            unknown.append(f"{name} ({type(module).__name__})")
        elif form.is_replaced(module):
            already.append(name)
        else:
            report._undo.append(form.replace(module))
            replaced.append(Replacement(name, form.describe(module)))
    if unknown:
        report.undo()
        raise RuntimeError(
            f"accelerate: {report.model_name} has deformable attention of a form that is not known, in "
            f"{', '.join(unknown)}; nothing was replaced"
        )
    if not replaced and not already:
        raise RuntimeError(f"accelerate: {report.model_name} has no multi-scale deformable attention to replace")
    report.replaced, report.already = tuple(replaced), tuple(already)
    return report


# ---- the replaced calls ----------------------------------------------------------------------------------------------


class MultiScaleDeformableAttention(nn.Module):
    """Takes the place of the modules of this name: the sampling alone, without parameters."""

    def forward(
        self,
        value: Tensor,
        value_spatial_shapes: Tensor,
        value_spatial_shapes_list: list[tuple[int, int]],
        level_start_index: Tensor,
        sampling_locations: Tensor,
        attention_weights: Tensor,
        im2col_step: int,
    ) -> Tensor:
        return ms_deform_attn(value, value_spatial_shapes_list, sampling_locations, attention_weights)


def multi_scale_deformable_attention(
    value: Tensor,
    value_spatial_shapes: list[tuple[int, int]],
    sampling_locations: Tensor,
    attention_weights: Tensor,
) -> Tensor:
    return ms_deform_attn(value, value_spatial_shapes, sampling_locations, attention_weights)


def multi_scale_deformable_attention_v2(
    value: Tensor,
    value_spatial_shapes: list[tuple[int, int]],
    sampling_locations: Tensor,
    attention_weights: Tensor,
    num_points_list: list[int],
    method: str = "default",
) -> Tensor:
    mode = "bilinear" if method == "default" else method
    return ms_deform_attn(
        value, value_spatial_shapes, sampling_locations, attention_weights, num_points=num_points_list, mode=mode
    )


# ---- the forms -------------------------------------------------------------------------------------------------------


def _is_deformable_attention(module: nn.Module) -> bool:
    """Whether it is one of the modules that hold the projections, by their names in ``transformers``."""
    return "multiscaledeformableattention" in type(module).__name__.lower() and any(True for _ in module.children())


def _set(module: nn.Module, name: str, ours: object) -> Callable[[], None]:
    """Set an attribute. Returns how to undo it, which refuses to touch what other code has set since."""
    own = module.__dict__ | module._modules
    absent = name not in own
    setattr(module, name, ours)

    def undo() -> None:
        if getattr(module, name) is not ours:
            raise RuntimeError(f"undo: other code has replaced the {name} of a {type(module).__name__} since")
        if absent:
            delattr(module, name)
        else:
            setattr(module, name, own[name])

    return undo


class _InnerModule:
    """``self.attn(...)``, a module of the class MultiScaleDeformableAttention."""

    @staticmethod
    def matches(module: nn.Module) -> bool:
        return type(getattr(module, "attn", None)).__name__ == "MultiScaleDeformableAttention"

    @staticmethod
    def is_replaced(module: nn.Module) -> bool:
        return isinstance(module.attn, MultiScaleDeformableAttention)

    @staticmethod
    def replace(module: nn.Module) -> Callable[[], None]:
        return _set(module, "attn", MultiScaleDeformableAttention().train(module.attn.training))

    @staticmethod
    def describe(module: nn.Module) -> str:
        return "module MultiScaleDeformableAttention"


class _Attribute:
    """``self.ms_deformable_attn_core(...)``, an attribute that holds a function."""

    @staticmethod
    def matches(module: nn.Module) -> bool:
        return callable(module.__dict__.get("ms_deformable_attn_core"))

    @staticmethod
    def is_replaced(module: nn.Module) -> bool:
        return module.ms_deformable_attn_core is multi_scale_deformable_attention_v2

    @staticmethod
    def replace(module: nn.Module) -> Callable[[], None]:
        return _set(module, "ms_deformable_attn_core", multi_scale_deformable_attention_v2)

    @staticmethod
    def describe(module: nn.Module) -> str:
        return "attribute ms_deformable_attn_core"


class _Global:
    """A function of the model's Python module, called by its global name: the instance gets a ``forward`` of its own.

    A ``forward`` that other code put there (hooks of the package ``accelerate`` do) is left alone: what it calls cannot
    be seen from here, so such a module is one of unknown form.
    """

    @staticmethod
    def matches(module: nn.Module) -> bool:
        own = module.__dict__.get("forward")
        return (own is None and _global_name(type(module)) is not None) or isinstance(own, _Forward)

    @staticmethod
    def is_replaced(module: nn.Module) -> bool:
        return isinstance(module.__dict__.get("forward"), _Forward)

    @staticmethod
    def replace(module: nn.Module) -> Callable[[], None]:
        return _set(module, "forward", _Forward(module))

    @staticmethod
    def describe(module: nn.Module) -> str:
        return f"function {_global_name(type(module))}"


class _Forward:
    """The ``forward`` of a module's class with our function under the global name that it calls.

    The class's code runs over a copy of its globals in which that name is ours. The copy is a registered module, for
    that is where ``torch.compile`` looks up the globals of a function it traces. What is changed in the original module
    later is not seen. An object rather than a bound method, because a method is pickled as its name alone and would
    come back as the class's.
    """

    def __init__(self, module: nn.Module) -> None:
        original = type(module).forward
        self.module = module
        self.function = types.FunctionType(
            original.__code__,
            _with_our_functions(original.__module__).__dict__,
            original.__name__,
            original.__defaults__,
            original.__closure__,
        )
        self.function.__kwdefaults__ = original.__kwdefaults__
        self.function.__annotations__ = original.__annotations__

    def __call__(self, *arguments, **keywords):
        return self.function(self.module, *arguments, **keywords)

    def __reduce__(self):
        return _Forward, (self.module,)  # for deepcopy and pickle: made anew for the copy, which needs only its class


def _global_name(cls: type) -> str | None:
    """Under which name a module's class calls the function, if it does."""
    if not isinstance(cls.forward, types.FunctionType):
        return None
    names = cls.forward.__code__.co_names
    return next((name for name in reversed(_FUNCTIONS) if name in names), None)


def _with_our_functions(name: str) -> types.ModuleType:
    """A copy of a module in which the functions of deformable attention are ours."""
    copy_name = f"{__name__}.{name.replace('.', '_')}"
    if copy_name not in sys.modules:
        copy = types.ModuleType(copy_name, f"{name} with deformc's deformable attention")
        copy.__dict__.update({key: value for key, value in vars(sys.modules[name]).items() if key not in vars(copy)})
        for function in _FUNCTIONS:
            if hasattr(copy, function):
                setattr(copy, function, globals()[function])
        sys.modules[copy_name] = copy
    return sys.modules[copy_name]


def _form_of(module: nn.Module):
    return next((form for form in (_InnerModule, _Attribute, _Global) if form.matches(module)), None)


def attention_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules of a model that :func:`accelerate` looks at, with their names."""
    return ((name, module) for name, module in model.named_modules() if _is_deformable_attention(module))
