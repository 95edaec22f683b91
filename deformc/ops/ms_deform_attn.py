from deformc.reference.ms_deform_attn import ms_deform_attn  # noqa: F401  (stands in until the op is there)
