"""Small random models of the families of ``transformers`` with deformable attention, and an input for each."""

from __future__ import annotations

from collections.abc import Callable

import torch
import transformers
from torch import nn

SIZE = (64, 96)
LABELS = 5


def resnet(prefix: str = "", kind: str = "basic"):
    config = getattr(transformers, f"{prefix}ResNetConfig")
    return config(
        embedding_size=8, hidden_sizes=[16, 16, 32, 64], depths=[1, 1, 1, 1], layer_type=kind,
        out_features=["stage2", "stage3", "stage4"],
    )  # fmt: skip


def hgnet(out_features=("stage2", "stage3", "stage4")):
    return transformers.HGNetV2Config(
        embedding_size=8, stem_channels=[3, 8, 8], hidden_sizes=[16, 32, 32, 64], depths=[1, 1, 1, 1],
        stage_in_channels=[8, 16, 32, 32], stage_mid_channels=[8, 8, 16, 16], stage_out_channels=[16, 32, 32, 64],
        stage_num_blocks=[1, 1, 1, 1], stage_downsample=[False, True, True, True],
        stage_light_block=[False, False, True, True], stage_kernel_size=[3, 3, 3, 3],
        stage_numb_of_layers=[1, 1, 1, 1], out_features=list(out_features),
    )  # fmt: skip


def swin(embed_dim: int = 12):
    return transformers.SwinConfig(
        image_size=64, embed_dim=embed_dim, depths=[1, 1, 1, 1], num_heads=[2, 2, 2, 2], window_size=4,
        out_features=["stage1", "stage2", "stage3", "stage4"], drop_path_rate=0.0,
    )  # fmt: skip


BERT = {
    "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16, "vocab_size": 50,
    "max_position_embeddings": 40, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip

RT_DETR = {
    "d_model": 32, "encoder_hidden_dim": 32, "encoder_in_channels": [16, 32, 64], "encoder_layers": 1,
    "encoder_ffn_dim": 32, "decoder_layers": 2, "decoder_ffn_dim": 32, "decoder_attention_heads": 4,
    "encoder_attention_heads": 4, "num_queries": 9, "decoder_in_channels": [32, 32, 32], "hidden_expansion": 0.5,
    "num_denoising": 0, "num_labels": LABELS,
}  # fmt: skip
DETR = {
    "d_model": 32, "encoder_layers": 1, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "num_queries": 7, "dropout": 0.0, "num_labels": LABELS,
}  # fmt: skip
HGNET_CHANNELS = {"encoder_in_channels": [32, 32, 64]}


def build(model: str, config: str, **parameters) -> nn.Module:
    if not hasattr(transformers, config):
        raise LookupError(f"{config} is not in transformers {transformers.__version__}")
    made = getattr(transformers, config)(**parameters)
    torch.manual_seed(0)
    return getattr(transformers, model)(made)


def rt_detr(prefix: str, **changes) -> nn.Module:
    return build(f"{prefix}ForObjectDetection", f"{prefix}Config", **(RT_DETR | changes))


def deformable_detr() -> nn.Module:
    return build(
        "DeformableDetrForObjectDetection", "DeformableDetrConfig", backbone_config=resnet(), num_feature_levels=4,
        **DETR,
    )  # fmt: skip


def grounding_dino(prefix: str) -> nn.Module:
    return build(
        f"{prefix}ForObjectDetection", f"{prefix}Config", backbone_config=swin(),
        text_config=transformers.BertConfig(**BERT), max_text_len=12, fusion_droppath=0.0, **DETR,
    )  # fmt: skip


def lw_detr() -> nn.Module:
    backbone = transformers.LwDetrViTConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, mlp_ratio=2, image_size=64, pretrain_image_size=64,
        patch_size=8, num_windows=4, window_block_indices=[0], out_indices=[1, 2],
    )  # fmt: skip
    return build(
        "LwDetrForObjectDetection", "LwDetrConfig", backbone_config=backbone, projector_scale_factors=[2.0, 0.5],
        d_model=32, decoder_ffn_dim=32, decoder_layers=2, decoder_self_attention_heads=4,
        decoder_cross_attention_heads=4, num_queries=7, group_detr=2, num_labels=LABELS,
    )  # fmt: skip


def rf_detr() -> nn.Module:
    backbone = transformers.RfDetrDinov2Config(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, mlp_ratio=2, image_size=64, patch_size=8,
        num_windows=2, out_indices=[1, 2],
    )  # fmt: skip
    return build(
        "RfDetrForObjectDetection", "RfDetrConfig", backbone_config=backbone, dropout=0.0,
        d_model=32, decoder_ffn_dim=32, decoder_layers=2, decoder_self_attention_heads=4,
        decoder_cross_attention_heads=4, num_queries=7, group_detr=2, num_labels=LABELS,
    )  # fmt: skip


def omdet_turbo() -> nn.Module:
    text = transformers.CLIPTextConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, vocab_size=50,
        projection_dim=16, max_position_embeddings=20,
    )  # fmt: skip
    backbone = swin()
    backbone.out_features = ["stage2", "stage3", "stage4"]
    return build(
        "OmDetTurboForObjectDetection", "OmDetTurboConfig", text_config=text, backbone_config=backbone,
        apply_layernorm_after_vision_backbone=False, text_projection_in_dim=16, text_projection_out_dim=16,
        task_encoder_hidden_dim=16, class_embed_dim=16, num_queries=7, encoder_hidden_dim=32,
        vision_features_channels=[32, 32, 32], encoder_in_channels=[24, 48, 96], encoder_attention_heads=4,
        encoder_dim_feedforward=32, decoder_hidden_dim=32, decoder_num_heads=4, decoder_num_layers=2,
        decoder_dim_feedforward=32,
    )  # fmt: skip


def mask2former() -> nn.Module:
    return build(
        "Mask2FormerForUniversalSegmentation", "Mask2FormerConfig", backbone_config=swin(), feature_size=32,
        mask_feature_size=32, hidden_dim=32, encoder_feedforward_dim=32, encoder_layers=2, decoder_layers=2,
        num_attention_heads=4, dim_feedforward=32, num_queries=7, num_labels=LABELS,
    )  # fmt: skip


def oneformer() -> nn.Module:
    return build(
        "OneFormerForUniversalSegmentation", "OneFormerConfig", backbone_config=swin(), conv_dim=32, mask_dim=32,
        hidden_dim=32, encoder_feedforward_dim=32, encoder_layers=2, decoder_layers=3, num_attention_heads=4,
        dim_feedforward=32, num_queries=7, dropout=0.0, query_dec_layers=1, task_seq_len=10, text_encoder_width=32,
        text_encoder_context_length=10, text_encoder_num_layers=1, text_encoder_vocab_size=50, text_encoder_n_ctx=4,
        num_labels=LABELS,
    )  # fmt: skip


def pp_doclayout(version: int) -> nn.Module:
    prefix = f"PPDocLayoutV{version}"
    changes = {"encoder_in_channels": [32, 32, 64], "backbone_config": hgnet(), "anchor_image_size": None}
    if version == 2:
        changes["reading_order_config"] = {
            "hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 32, "num_hidden_layers": 1,
            "coordinate_size": 5, "shape_size": 6, "num_classes": LABELS, "max_position_embeddings": 40,
            "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
        }  # fmt: skip
        changes |= {"class_thresholds": [0.0] * LABELS, "class_order": list(range(LABELS))}
    if version == 3:
        changes |= {"backbone_config": hgnet(("stage1", "stage2", "stage3", "stage4")), "x4_feat_dim": 16}
    return rt_detr(prefix, **changes)


FAMILIES: dict[str, Callable[[], nn.Module]] = {
    "deformable_detr": deformable_detr,
    "rt_detr": lambda: rt_detr("RTDetr", backbone_config=resnet("RTDetr", "bottleneck")),
    "rt_detr_v2": lambda: rt_detr("RTDetrV2", backbone_config=resnet("RTDetr", "bottleneck")),
    "rt_detr_v2_discrete": lambda: rt_detr(
        "RTDetrV2", backbone_config=resnet("RTDetr", "bottleneck"), decoder_method="discrete"
    ),
    "d_fine": lambda: rt_detr("DFine", backbone_config=hgnet(), decoder_n_points=[3, 6, 3], **HGNET_CHANNELS),
    "deimv2": lambda: rt_detr("Deimv2", backbone_config=hgnet(), decoder_n_points=[3, 6, 3], **HGNET_CHANNELS),
    "lw_detr": lw_detr,
    "rf_detr": rf_detr,
    "grounding_dino": lambda: grounding_dino("GroundingDino"),
    "mm_grounding_dino": lambda: grounding_dino("MMGroundingDino"),
    "omdet_turbo": omdet_turbo,
    "mask2former": mask2former,
    "oneformer": oneformer,
    "pp_doclayout_v2": lambda: pp_doclayout(2),
    "pp_doclayout_v3": lambda: pp_doclayout(3),
    "pp_doclayout_v4": lambda: pp_doclayout(4),
}


def inputs_of(family: str, batch: int = 1, size: tuple[int, int] = SIZE) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    inputs = {"pixel_values": torch.randn(batch, 3, *size, generator=generator)}
    words = torch.tensor([[1, 5, 9, 7, 2]]).expand(batch, -1)
    if "grounding" in family:
        inputs |= {"input_ids": words, "attention_mask": torch.ones_like(words)}
    if family == "omdet_turbo":
        inputs |= {
            "classes_input_ids": torch.tensor([[1, 5, 49], [1, 7, 49]]),
            "classes_attention_mask": torch.ones(2, 3, dtype=torch.long),
            "classes_structure": torch.tensor([2]),
            "tasks_input_ids": torch.tensor([[1, 3, 49]]),
            "tasks_attention_mask": torch.ones(1, 3, dtype=torch.long),
        }
    if family == "oneformer":
        inputs["task_inputs"] = torch.arange(10)[None].expand(batch, -1)
    return inputs
