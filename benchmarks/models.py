"""Detection and segmentation models of ``transformers``, untouched and accelerated.

Sizes of published models, random weights, one image; nothing is downloaded. A row is verified call by call: what
deformc gives for the tensors of every attention against what the model's own code gives for them. Whole outputs would
not do, for most of these models choose their queries by score, and rounding is enough to choose others.
"""

import contextlib
import dataclasses
import functools
import os
import sys
from collections.abc import Callable, Iterator
from unittest import mock

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks._common import FORWARD, Case, expect_close
from benchmarks.runner import THREADS, Column

try:
    import transformers

    from deformc.integrations import transformers as integration
except ImportError:
    transformers = None

MODELS = f"models of transformers, float32, {THREADS} threads"
ATTENTION, WHOLE = "deformable attention", "whole model"


@dataclasses.dataclass(frozen=True)
class Problem:
    name: str
    model: str  # class of transformers
    size: tuple[int, int]

    def __str__(self) -> str:
        height, width = self.size
        return f"{self.name} {height}x{width}"


PROBLEMS = [
    Problem("Deformable DETR, ResNet-50", "DeformableDetrForObjectDetection", (800, 1066)),
    Problem("RT-DETR, ResNet-50", "RTDetrForObjectDetection", (640, 640)),
    Problem("RT-DETRv2, ResNet-50", "RTDetrV2ForObjectDetection", (640, 640)),
    Problem("D-FINE, HGNetV2", "DFineForObjectDetection", (640, 640)),
    Problem("DEIMv2, HGNetV2", "Deimv2ForObjectDetection", (640, 640)),
    Problem("LW-DETR small", "LwDetrForObjectDetection", (640, 640)),
    Problem("RF-DETR base", "RfDetrForObjectDetection", (560, 560)),
    Problem("Grounding DINO, Swin-T", "GroundingDinoForObjectDetection", (800, 1066)),
    Problem("MM Grounding DINO, Swin-T", "MMGroundingDinoForObjectDetection", (800, 1066)),
    Problem("OmDet-Turbo, Swin-T", "OmDetTurboForObjectDetection", (640, 640)),
    Problem("Mask2Former, Swin-T", "Mask2FormerForUniversalSegmentation", (800, 1066)),
    Problem("OneFormer, Swin-T", "OneFormerForUniversalSegmentation", (800, 1066)),
    Problem("PP-DocLayoutV2", "PPDocLayoutV2ForObjectDetection", (800, 800)),
    Problem("PP-DocLayoutV3", "PPDocLayoutV3ForObjectDetection", (800, 800)),
    Problem("PP-DocLayoutV4", "PPDocLayoutV4ForObjectDetection", (800, 800)),
]
# One for each way in which a model calls its attention, but for segmentation, whose backbone is slow.
QUICK = ("RTDetrForObjectDetection", "DFineForObjectDetection", "RTDetrV2ForObjectDetection")


def cases(quick: bool, device: str = "cpu") -> list[Case]:
    if transformers is None or device != "cpu":
        return []
    problems = [problem for problem in PROBLEMS if hasattr(transformers, problem.model)]
    if quick:
        problems = [dataclasses.replace(problem, size=(128, 160)) for problem in problems if problem.model in QUICK]
    return [Case(MODELS, problem, FORWARD) for problem in problems]


def run(case: Case) -> list[Column]:
    return [
        Column("accelerated", functools.partial(predict, case.problem, accelerated=True)),
        Column("untouched", functools.partial(predict, case.problem)),
    ]


def verify(case: Case) -> None:
    def compared(original: Callable, ours: Callable, *arguments) -> Tensor:
        expected = original(*arguments)
        expect_close("deformc", {"attention": ours(*arguments)}, {"attention": expected}, torch.float32)
        return expected

    with intercepted(untouched(case.problem), compared):
        predict(case.problem)


def details(case: Case) -> dict[str, str]:
    """The share of the model's time that goes into its attention's sampling."""

    def marked(original: Callable, ours: Callable, *arguments) -> Tensor:
        with record_function(ATTENTION):
            return original(*arguments)

    with intercepted(untouched(case.problem), marked):
        before = share(case.problem, ATTENTION)
    after = share(case.problem, "deformc::ms_deform_attn", accelerated=True)
    return {"attention, untouched": f"{before:.0%}", "attention, accelerated": f"{after:.1%}"}


def share(problem: Problem, event: str, accelerated: bool = False) -> float:
    with profile(activities=[ProfilerActivity.CPU]) as profiler, record_function(WHOLE):
        predict(problem, accelerated)
    times = {average.key: average.cpu_time_total for average in profiler.key_averages()}
    return times[event] / times[WHOLE]


# ---- models and their inputs -----------------------------------------------------------------------------------------


@torch.no_grad()
def predict(problem: Problem, accelerated: bool = False) -> object:
    model = accelerated_model(problem) if accelerated else untouched(problem)
    return model(**inputs(problem))


@functools.lru_cache(maxsize=1)
def untouched(problem: Problem) -> nn.Module:
    torch.manual_seed(0)
    return getattr(transformers, problem.model)(config(problem)).eval()


@functools.lru_cache(maxsize=1)
def accelerated_model(problem: Problem) -> nn.Module:
    torch.manual_seed(0)
    model = getattr(transformers, problem.model)(config(problem)).eval()
    integration.accelerate(model)
    return model


def config(problem: Problem):
    """The defaults of ``transformers`` are the sizes of a published model where nothing is said here."""
    changes = {}
    if problem.model.startswith("DeformableDetr"):
        changes["backbone_config"] = transformers.ResNetConfig(out_features=["stage2", "stage3", "stage4"])
    elif problem.model.startswith(("Mask2Former", "OneFormer")):
        changes["backbone_config"] = swin("stage1", "stage2", "stage3", "stage4")
    elif "GroundingDino" in problem.model:
        changes["backbone_config"] = swin("stage2", "stage3", "stage4")
    elif problem.model.startswith("OmDetTurbo"):
        changes["backbone_config"] = swin("stage2", "stage3", "stage4")
        changes["apply_layernorm_after_vision_backbone"] = False
    elif problem.model.startswith("LwDetr"):
        changes["projector_scale_factors"] = [1.0]
    elif problem.model.startswith("PPDocLayoutV"):
        changes["anchor_image_size"] = None
        if problem.model.startswith("PPDocLayoutV2"):
            classes = 20  # as many as the reading order knows by default; each has a threshold and a place in it
            changes |= {"num_labels": classes, "class_thresholds": [0.5] * classes, "class_order": list(range(classes))}
    name = problem.model.removesuffix("ForObjectDetection").removesuffix("ForUniversalSegmentation")
    return getattr(transformers, f"{name}Config")(**changes)


def swin(*out_features: str):
    return transformers.SwinConfig(depths=[2, 2, 6, 2], window_size=7, out_features=list(out_features))


@functools.lru_cache(maxsize=1)
def inputs(problem: Problem) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    tensors = {"pixel_values": torch.randn(1, 3, *problem.size, generator=generator)}
    if "GroundingDino" in problem.model:
        words = torch.tensor([[101, 4937, 1012, 2158, 1012, 102]])  # "cat. man."
        tensors |= {"input_ids": words, "attention_mask": torch.ones_like(words)}
    elif problem.model.startswith("OmDetTurbo"):
        classes = torch.tensor([[49406, 2368, 49407], [49406, 786, 49407]])
        tensors |= {
            "classes_input_ids": classes,
            "classes_attention_mask": torch.ones_like(classes),
            "classes_structure": torch.tensor([2]),
            "tasks_input_ids": classes[:1],
            "tasks_attention_mask": torch.ones_like(classes[:1]),
        }
    elif problem.model.startswith("OneFormer"):
        tensors["task_inputs"] = torch.arange(77)[None]
    return tensors


# ---- the calls -------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def intercepted(model: nn.Module, call: Callable) -> Iterator[None]:
    """Let ``call(original, ours, *arguments)`` compute the attention of an untouched model."""
    with contextlib.ExitStack() as stack:
        patched = set()
        for _, module in integration.attention_modules(model):
            code = sys.modules[type(module).__module__]
            if hasattr(module, "attn"):
                owner, name, ours = module.attn, "forward", integration.MultiScaleDeformableAttention().forward
            elif hasattr(module, "ms_deformable_attn_core"):
                owner, name = module, "ms_deformable_attn_core"
                ours = integration.multi_scale_deformable_attention_v2
            elif hasattr(code, "multi_scale_deformable_attention_v2"):
                owner, name = code, "multi_scale_deformable_attention_v2"
                ours = integration.multi_scale_deformable_attention_v2
            else:
                owner, name = code, "multi_scale_deformable_attention"
                ours = integration.multi_scale_deformable_attention
            if (owner, name) not in patched:
                patched.add((owner, name))
                ours = functools.partial(call, getattr(owner, name), ours)
                stack.enter_context(mock.patch.object(owner, name, ours))
        yield
