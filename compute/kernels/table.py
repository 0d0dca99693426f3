"""The table of all kernels, in the order of a token's pass. Kernels that only training uses come last."""

from __future__ import annotations

from cbtop.compute.kernels.activation import GEGLU, SWIGLU
from cbtop.compute.kernels.activation_backward import GEGLU_BACKWARD, SWIGLU_BACKWARD
from cbtop.compute.kernels.adam_w import ADAM_W
from cbtop.compute.kernels.add_rms_norm import ADD_RMS_NORM
from cbtop.compute.kernels.add_rms_norm_int8 import ADD_RMS_NORM_INT8
from cbtop.compute.kernels.attention import ATTENTION
from cbtop.compute.kernels.attention_backward import ATTENTION_BACKWARD
from cbtop.compute.kernels.attention_bf16 import ATTENTION_BF16
from cbtop.compute.kernels.base import Kernel
from cbtop.compute.kernels.combine import COMBINE
from cbtop.compute.kernels.cross_entropy import CROSS_ENTROPY
from cbtop.compute.kernels.cross_entropy_backward import CROSS_ENTROPY_BACKWARD
from cbtop.compute.kernels.embedding import EMBEDDING, INTERLEAVED_EMBEDDING
from cbtop.compute.kernels.expert_gated import EXPERT_GATED, EXPERT_GATED_INT8
from cbtop.compute.kernels.expert_linear import EXPERT_LINEAR, EXPERT_LINEAR_INT8
from cbtop.compute.kernels.gated import GATED, GATED_INT8
from cbtop.compute.kernels.kv_write import KV_WRITE
from cbtop.compute.kernels.layer_norm import LAYER_NORM
from cbtop.compute.kernels.layer_norm_backward import LAYER_NORM_BACKWARD
from cbtop.compute.kernels.linear import LINEAR
from cbtop.compute.kernels.linear_backward import LINEAR_BACKWARD
from cbtop.compute.kernels.linear_bf16 import LINEAR_BF16
from cbtop.compute.kernels.linear_int8 import LINEAR_INT8
from cbtop.compute.kernels.qkv import QKV, QKV_INT8
from cbtop.compute.kernels.quantize_rows import QUANTIZE_ROWS
from cbtop.compute.kernels.residual_add import RESIDUAL_ADD
from cbtop.compute.kernels.rms_norm import RMS_NORM
from cbtop.compute.kernels.rms_norm_backward import RMS_NORM_BACKWARD
from cbtop.compute.kernels.rms_norm_int8 import RMS_NORM_INT8
from cbtop.compute.kernels.rope import ROPE_NEOX, ROPE_NORMAL
from cbtop.compute.kernels.route import ROUTE
from cbtop.compute.kernels.sampling import DRAWN, GREEDY
from cbtop.compute.kernels.soft_cap import SOFT_CAP
from cbtop.compute.kernels.take_rows import TAKE_ROWS
from cbtop.compute.kernels.weight_gradient import WEIGHT_GRADIENT

KERNELS: tuple[Kernel, ...] = (
    EMBEDDING,
    INTERLEAVED_EMBEDDING,
    RMS_NORM,
    RMS_NORM_INT8,
    LAYER_NORM,
    *LINEAR.values(),
    QUANTIZE_ROWS,
    *LINEAR_INT8.values(),
    *LINEAR_BF16.values(),
    *QKV.values(),
    *QKV_INT8.values(),
    ROPE_NORMAL,
    ROPE_NEOX,
    KV_WRITE,
    ATTENTION,
    ATTENTION_BF16,
    ROUTE,
    TAKE_ROWS,
    SWIGLU,
    GEGLU,
    *GATED.values(),
    *GATED_INT8.values(),
    *EXPERT_GATED.values(),
    *EXPERT_GATED_INT8.values(),
    *EXPERT_LINEAR.values(),
    *EXPERT_LINEAR_INT8.values(),
    COMBINE,
    RESIDUAL_ADD,
    ADD_RMS_NORM,
    ADD_RMS_NORM_INT8,
    SOFT_CAP,
    GREEDY,
    DRAWN,
    CROSS_ENTROPY,
    CROSS_ENTROPY_BACKWARD,
    RMS_NORM_BACKWARD,
    LAYER_NORM_BACKWARD,
    *LINEAR_BACKWARD.values(),
    WEIGHT_GRADIENT,
    SWIGLU_BACKWARD,
    GEGLU_BACKWARD,
    ATTENTION_BACKWARD,
    ADAM_W,
)
