"""A model with the sizes of a 7B in Q4_K_M. Its weights are random blocks made on the device."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from cbtop.compute.decoder.base import LayerWeights, Model, Norm, Projection, Rope
from cbtop.compute.gpu.device import Gpu
from cbtop.compute.gpu.matrix import DeviceMatrix
from cbtop.compute.quantization.base import BlockFormat
from cbtop.compute.quantization.q4_k import Q4_K
from cbtop.compute.quantization.q6_k import Q6_K

# The sizes of the model Qwen2 7B.
HIDDEN, HEADS, KV_HEADS, HEAD_DIM, FEED_FORWARD, LAYERS, VOCABULARY = 3584, 28, 4, 128, 18944, 28, 152064
SCALE = 2.0**-14  # The scale of all blocks of weights. It is chosen so that the results of products are about 1.
# for each format, the offsets in bytes of the binary16 scales in a block
SCALES_AT = {Q4_K.code: (0, 2), Q6_K.code: (208,)}


def matrix(gpu: Gpu, rows: int, columns: int, block_format: BlockFormat, *, takes_int8: bool = True) -> DeviceMatrix:
    """Return a matrix of random codes, scales and minima in a block format. Its binary16 scales are all SCALE."""
    cupy, layout = gpu.cupy, block_format.planes
    assert layout is not None
    blocks = cupy.random.randint(
        0, 256, (rows * columns // block_format.block_elements, block_format.block_bytes), "u1"
    )
    for at in SCALES_AT[block_format.code]:
        blocks[:, at : at + 2] = cupy.asarray(np.array([SCALE], np.float16).view(np.uint8))
    planes = gpu.zeros(layout.size_bytes(len(blocks), block_format.block_elements), "u1")
    layout.fill(blocks, planes)
    return DeviceMatrix(block_format, planes, rows, columns, takes_int8)


def model_7b(gpu: Gpu, layers: int = LAYERS, *, takes_int8: bool = True, ranks: int = 1) -> Model:
    """Return a model with the sizes of Qwen2.5-7B.

    As in llama.cpp's Q4_K_M, half of the value and down projections are Q6_K. If `ranks` is above 1, the ranks share
    every layer, and the model is the part of one rank.
    """
    own_heads, own_kv_heads, inner = HEADS // ranks, KV_HEADS // ranks, FEED_FORWARD // ranks
    no_bias = gpu.array(np.zeros(0, np.float32))
    ones = Norm(gpu.array(np.ones(HIDDEN, np.float32)))

    def product(rows: int, columns: int, block_format: BlockFormat, bias: Any = no_bias) -> Projection:
        return Projection(matrix(gpu, rows, columns, block_format, takes_int8=takes_int8), bias)  # type: ignore[arg-type]

    def layer(index: int) -> LayerWeights:
        more = Q6_K if index < layers // 8 or index >= 7 * layers // 8 or index % 3 == 2 else Q4_K
        biases = [gpu.array(np.zeros(heads * HEAD_DIM, np.float32)) for heads in (own_heads, own_kv_heads)]
        return LayerWeights(
            attention_norm=ones,
            q=product(own_heads * HEAD_DIM, HIDDEN, Q4_K, biases[0]),
            k=product(own_kv_heads * HEAD_DIM, HIDDEN, Q4_K, biases[1]),
            v=product(own_kv_heads * HEAD_DIM, HIDDEN, more, biases[1]),
            q_norm=None,
            k_norm=None,
            output=product(HIDDEN, own_heads * HEAD_DIM, Q4_K),
            attention_post_norm=None,
            ffn_norm=ones,
            gate=product(inner, HIDDEN, Q4_K),
            up=product(inner, HIDDEN, Q4_K),
            down=product(HIDDEN, inner, more),
            router=None,
            ffn_post_norm=None,
            slides=False,
        )

    rope = Rope("neox", HEAD_DIM, 1e6, 1.0, 1.0, None, None, 32768, 0.0, (32.0, 1.0))
    made = Model(
        name="random 7B", architecture="qwen2", quantization="Q4_K_M", hidden=HIDDEN, heads=own_heads,
        kv_heads=own_kv_heads, head_dim=HEAD_DIM, feed_forward=inner, vocabulary=VOCABULARY,
        context_length=32768, window=0, epsilon=1e-6, rope=rope, sliding_rope=rope, activation="silu",
        embedding_scale=1.0, attention_scale=HEAD_DIM**-0.5, attention_cap=0.0, logit_cap=0.0, experts=None,
        embedding=matrix(gpu, VOCABULARY, HIDDEN, Q4_K, takes_int8=False),  # type: ignore[arg-type]
        layers=tuple(layer(index) for index in range(layers)), final_norm=ones,
        lm_head=matrix(gpu, VOCABULARY, HIDDEN, Q6_K, takes_int8=takes_int8),  # type: ignore[arg-type]
        parameters=0, weights_bytes=0,
    )  # fmt: skip
    return replace(made, weights_bytes=read_bytes(made))


def read_bytes(model: Model) -> int:
    """Return the bytes of weights that are read for one token.

    The embedding is left out, because a token reads only one row of it.
    """
    products = [
        one.weight.size_bytes
        for layer in model.layers
        for one in (layer.q, layer.k, layer.v, layer.output, layer.gate, layer.up, layer.down)
    ]
    return sum(products) + model.lm_head.size_bytes
