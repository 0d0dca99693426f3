"""Tests of the classification of modules (which brick a module is).

The classification uses only the path and the class, without torch.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

from cbtop.profiler.instrument.classification import Described, classify
from cbtop.protocol.vocabulary import BrickCategory

# Expected bricks in a layer. Each line: path of the module, its class, class of its parent, and the brick.
IN_LAYER = {
    "llama": """
        self_attn LlamaAttention LlamaDecoderLayer AttentionBlock
        mlp LlamaMLP LlamaDecoderLayer FeedForwardBlock
        self_attn.q_proj Linear LlamaAttention QkvProjection
        self_attn.k_proj Linear LlamaAttention QkvProjection
        self_attn.v_proj Linear LlamaAttention QkvProjection
        self_attn.o_proj Linear LlamaAttention OutputProjection
        mlp.gate_proj Linear LlamaMLP GateProjection
        mlp.up_proj Linear LlamaMLP UpProjection
        mlp.down_proj Linear LlamaMLP DownProjection
        mlp.act_fn SiLUActivation LlamaMLP Activation
        input_layernorm LlamaRMSNorm LlamaDecoderLayer RmsNorm""",
    "llama, as Meta wrote it": """
        attention Attention TransformerBlock AttentionBlock
        feed_forward FeedForward TransformerBlock FeedForwardBlock
        attention.wq Linear Attention QkvProjection
        attention.wo Linear Attention OutputProjection
        feed_forward.w1 Linear FeedForward GateProjection
        feed_forward.w2 Linear FeedForward DownProjection
        feed_forward.w3 Linear FeedForward UpProjection
        attention_norm RMSNorm TransformerBlock RmsNorm""",
    "llama, in vLLM": """
        self_attn.qkv_proj QKVParallelLinear LlamaAttention QkvProjection
        self_attn.rotary_emb RotaryEmbedding LlamaAttention RopeEmbedding
        self_attn.o_proj RowParallelLinear LlamaAttention OutputProjection
        mlp.gate_up_proj MergedColumnParallelLinear LlamaMLP GateUpProjection
        self_attn.attn Attention LlamaAttention Attention (fused)
        input_layernorm RMSNorm LlamaDecoderLayer RmsNorm
        mlp.act_fn SiluAndMul LlamaMLP Activation""",
    "deepseek, in vLLM": """
        self_attn.fused_qkv_a_proj MergedColumnParallelLinear DeepseekV2MLAAttention QkvProjection
        self_attn.mla_attn.mla_attn MLAAttention MultiHeadLatentAttentionWrapper Attention (fused)
        mlp.gate ReplicatedLinear DeepseekV2MoE MoeRouter
        mlp.experts FusedMoE DeepseekV2MoE MoeExperts
        mlp.experts SharedFusedMoE DeepseekV2MoE MoeExperts
        mlp.shared_experts.down_proj RowParallelLinear DeepseekV2MLP DownProjection""",
    "mixtral, in SGLang": """
        self_attn.attn RadixAttention MixtralAttention Attention (fused)
        self_attn.attn_mqa RadixAttention DeepseekV2AttentionMLA Attention (fused)
        block_sparse_moe.topk TopK MixtralMoE MoeRouter
        block_sparse_moe.gate ReplicatedLinear MixtralMoE MoeRouter
        block_sparse_moe.experts EPMoE MixtralMoE MoeExperts""",
    "gpt2": """
        attn.c_attn Conv1D GPT2Attention QkvProjection
        attn.c_proj Conv1D GPT2Attention OutputProjection
        mlp.c_fc Conv1D GPT2MLP UpProjection
        mlp.c_proj Conv1D GPT2MLP DownProjection
        mlp.act NewGELUActivation GPT2MLP Activation
        ln_1 LayerNorm GPT2Block LayerNorm
        attn.resid_dropout Dropout GPT2Attention Dropout""",
    "gpt-neo": """
        attn.attention.q_proj Linear GPTNeoSelfAttention QkvProjection
        attn.attention.out_proj Linear GPTNeoSelfAttention OutputProjection
        mlp.c_fc Linear GPTNeoMLP UpProjection""",
    "gpt-neox": """
        attention.query_key_value Linear GPTNeoXAttention QkvProjection
        attention.dense Linear GPTNeoXAttention OutputProjection
        mlp.dense_h_to_4h Linear GPTNeoXMLP UpProjection
        mlp.dense_4h_to_h Linear GPTNeoXMLP DownProjection""",
    "gptj": """
        attn.out_proj Linear GPTJAttention OutputProjection
        mlp.fc_in Linear GPTJMLP UpProjection
        mlp.fc_out Linear GPTJMLP DownProjection""",
    "falcon": """
        self_attention.query_key_value FalconLinear FalconAttention QkvProjection
        self_attention.dense FalconLinear FalconAttention OutputProjection""",
    "bloom": """
        self_attention.query_key_value Linear BloomAttention QkvProjection
        mlp.gelu_impl BloomGelu BloomMLP Activation""",
    "opt": """
        self_attn.out_proj Linear OPTAttention OutputProjection
        fc1 Linear OPTDecoderLayer UpProjection
        fc2 Linear OPTDecoderLayer DownProjection
        self_attn_layer_norm LayerNorm OPTDecoderLayer LayerNorm""",
    "phi": """
        self_attn.dense Linear PhiAttention OutputProjection
        mlp.fc1 Linear PhiMLP UpProjection
        self_attn.q_layernorm LayerNorm PhiAttention LayerNorm""",
    "phi3": """
        self_attn.qkv_proj Linear Phi3Attention QkvProjection
        mlp.gate_up_proj Linear Phi3MLP GateUpProjection""",
    "qwen3": """
        self_attn.q_norm Qwen3RMSNorm Qwen3Attention RmsNorm""",
    "qwen2-moe": """
        mlp Qwen2MoeSparseMoeBlock Qwen2MoeDecoderLayer -
        mlp.gate Qwen2MoeTopKRouter Qwen2MoeSparseMoeBlock MoeRouter
        mlp.experts Qwen2MoeExperts Qwen2MoeSparseMoeBlock MoeExperts
        mlp.shared_expert.down_proj Linear Qwen2MoeMLP DownProjection
        mlp.shared_expert_gate Linear Qwen2MoeSparseMoeBlock Linear""",
    "mixtral, before its experts were one": """
        block_sparse_moe.gate Linear MixtralSparseMoeBlock MoeRouter
        block_sparse_moe.experts ModuleList MixtralSparseMoeBlock -
        block_sparse_moe.experts.3 MixtralBlockSparseTop2MLP ModuleList MoeExperts""",
    "deepseek-v2": """
        self_attn.q_a_proj Linear DeepseekV2Attention QkvProjection
        self_attn.kv_a_proj_with_mqa Linear DeepseekV2Attention QkvProjection
        self_attn.kv_b_proj Linear DeepseekV2Attention QkvProjection
        self_attn.kv_a_layernorm DeepseekV2RMSNorm DeepseekV2Attention RmsNorm
        mlp.gate DeepseekV2TopkRouter DeepseekV2Moe MoeRouter
        mlp.shared_experts.up_proj Linear DeepseekV2MLP UpProjection""",
    "gpt-oss": """
        mlp.router GptOssTopKRouter GptOssMLP MoeRouter
        mlp.experts GptOssExperts GptOssMLP MoeExperts""",
    "bert": """
        attention BertAttention BertLayer -
        attention.self BertSelfAttention BertAttention AttentionBlock
        attention.self.query Linear BertSelfAttention QkvProjection
        attention.output.dense Linear BertSelfOutput OutputProjection
        attention.output.LayerNorm LayerNorm BertSelfOutput LayerNorm
        intermediate.dense Linear BertIntermediate UpProjection
        intermediate.intermediate_act_fn GELUActivation BertIntermediate Activation
        output.dense Linear BertOutput DownProjection""",
    "t5": """
        layer.0 T5LayerSelfAttention ModuleList -
        layer.0.SelfAttention T5Attention T5LayerSelfAttention AttentionBlock
        layer.1.DenseReluDense T5DenseActDense T5LayerFF FeedForwardBlock
        layer.0.SelfAttention.q Linear T5Attention QkvProjection
        layer.0.SelfAttention.o Linear T5Attention OutputProjection
        layer.0.SelfAttention.relative_attention_bias Embedding T5Attention Embedding
        layer.0.layer_norm T5LayerNorm T5LayerSelfAttention RmsNorm
        layer.1.DenseReluDense.wi Linear T5DenseActDense UpProjection
        layer.1.DenseReluDense.wi_0 Linear T5DenseGatedActDense GateProjection
        layer.1.DenseReluDense.wo Linear T5DenseActDense DownProjection""",
    "bart": """
        encoder_attn.k_proj Linear BartAttention QkvProjection
        encoder_attn.out_proj Linear BartAttention OutputProjection
        activation_fn GELUActivation BartDecoderLayer Activation""",
    "mamba": """
        mixer MambaMixer MambaBlock Mixer
        mixer.in_proj Linear MambaMixer Linear
        mixer.out_proj Linear MambaMixer Linear
        mixer.conv1d Conv1d MambaMixer Conv1d
        norm MambaRMSNorm MambaBlock RmsNorm""",
    "rwkv": """
        attention RwkvSelfAttention RwkvBlock Mixer
        attention.key Linear RwkvSelfAttention Linear
        feed_forward RwkvFeedForward RwkvBlock FeedForwardBlock
        feed_forward.key Linear RwkvFeedForward Linear""",
    "qwen3-next": """
        linear_attn Qwen3NextGatedDeltaNet Qwen3NextDecoderLayer Mixer
        linear_attn.norm Qwen3NextRMSNormGated Qwen3NextGatedDeltaNet RmsNorm
        linear_attn.out_proj Linear Qwen3NextGatedDeltaNet Linear""",
    "modernbert": """
        attn.Wqkv Linear ModernBertAttention QkvProjection
        attn.Wo Linear ModernBertAttention OutputProjection
        mlp.Wi Linear ModernBertMLP GateUpProjection
        mlp.Wo Linear ModernBertMLP DownProjection""",
    "quantised": """
        self_attn.q_proj Linear4bit LlamaAttention QkvProjection
        mlp.down_proj QuantLinear LlamaMLP DownProjection""",
    "nanoGPT": """
        attn.c_attn Linear CausalSelfAttention QkvProjection
        attn.c_proj Linear CausalSelfAttention OutputProjection
        mlp.c_proj Linear MLP DownProjection""",
    "torch": """
        self_attn MultiheadAttention TransformerEncoderLayer MultiheadAttention
        linear1 Linear TransformerEncoderLayer UpProjection
        linear2 Linear TransformerEncoderLayer DownProjection
        mlp.0 Linear Sequential UpProjection
        mlp.3 Linear Sequential DownProjection""",
    "nobody's": """
        flux_capacitor FluxCapacitor Block FluxCapacitor
        mlp.gate Linear Glu Linear
        norm_scale GroupNorm Block GroupNorm""",
}
OUTSIDE = """
    model.embed_tokens Embedding LlamaModel Embedding
    model.embed_tokens Gemma2TextScaledWordEmbedding Gemma2Model Embedding
    model.rotary_emb LlamaRotaryEmbedding LlamaModel RotaryTables
    model.norm LlamaRMSNorm LlamaModel RmsNorm
    lm_head Linear LlamaForCausalLM LmHead
    embed_out Linear GPTNeoXForCausalLM LmHead
    model.embed_tokens VocabParallelEmbedding LlamaModel Embedding
    model.embed_tokens VocabParallelEmbeddingWithLoRA LlamaModel Embedding
    lm_head ParallelLMHead LlamaForCausalLM LmHead
    logits_processor LogitsProcessor LlamaForCausalLM LmHead
    logits_processor LogitsProcessorWithLoRA LlamaForCausalLM LmHead
    projector.mlp MLP Projector -
    classification_head.out_proj Linear BartClassificationHead Linear
    transformer.wpe Embedding GPT2Model Embedding
    pooler.dense Linear BertPooler Linear
    visual.patch_embed.proj Conv3d PatchEmbed Conv3d
    embeddings BertEmbeddings BertModel -
"""
# By class: names of attributes that its modules have. Some classes are only recognised by these attributes.
HOLDS = {
    "Attention": {"wq", "wk", "wv", "wo"},
    "BertAttention": {"self", "output"},
    "BertEmbeddings": {"word_embeddings", "LayerNorm"},
    "BertSelfAttention": {"query", "key", "value", "dropout"},
    "CausalSelfAttention": {"c_attn", "c_proj"},
    "FeedForward": {"w1", "w2", "w3"},
    "LlamaAttention": {"q_proj", "k_proj", "v_proj", "o_proj"},
    "LlamaMLP": {"gate_proj", "up_proj", "down_proj", "act_fn"},
    "MLP": {"c_fc", "c_proj"},
    "MambaMixer": {"conv1d", "in_proj", "x_proj", "dt_proj", "out_proj"},
    "MultiheadAttention": {"out_proj"},
    "MixtralBlockSparseTop2MLP": {"w1", "w2", "w3"},
    "Qwen2MoeSparseMoeBlock": {"gate", "experts", "shared_expert"},
    "Qwen3NextGatedDeltaNet": {"in_proj_qkvz", "norm", "out_proj"},
    "RwkvFeedForward": {"key", "receptance", "value"},
    "RwkvSelfAttention": {"key", "value", "receptance", "output"},
    "T5DenseActDense": {"wi", "wo", "dropout", "act"},
    "T5LayerSelfAttention": {"SelfAttention", "layer_norm", "dropout"},
    "T5Attention": {"q", "k", "v", "o"},
}
SIBLINGS = {
    "w1": {"w2", "w3"},
    "linear1": {"linear2"},
    "linear2": {"linear1"},
    "gate": {"experts", "shared_experts"},
    "topk": {"experts"},
}


def _described(path: str, class_name: str, around: str, *, in_layer: bool) -> Described:
    siblings = frozenset() if around == "Glu" else frozenset(SIBLINGS.get(path.rpartition(".")[2], ()))
    return Described(path, (class_name, around), siblings, frozenset(HOLDS.get(class_name, ())), in_layer)


@pytest.mark.parametrize(
    ("line", "in_layer"),
    [
        *(
            (f"{architecture}: {line.strip()}", True)
            for architecture, lines in IN_LAYER.items()
            for line in lines.split("\n")
            if line.strip()
        ),
        *((f"outside: {line.strip()}", False) for line in OUTSIDE.split("\n") if line.strip()),
    ],
)
def test_a_module_is_the_brick_its_path_and_class_say(line: str, in_layer: bool) -> None:
    path, class_name, around, expected = line.rpartition(": ")[2].split(maxsplit=3)
    if in_layer:
        path = f"model.layers.3.{path}"
    kind = classify(_described(path, class_name, around, in_layer=in_layer))
    assert (kind.name if kind else "-") == expected


def test_the_category_is_that_of_what_the_brick_does() -> None:
    def category(path: str, *classes: str) -> BrickCategory:
        kind = classify(Described(f"layers.0.{path}", classes))
        assert kind
        return kind.category

    assert category("mlp.gate_up_proj", "Linear", "Phi3MLP") is BrickCategory.FFN
    assert category("mlp.experts", "MixtralExperts", "MixtralSparseMoeBlock") is BrickCategory.FFN
    assert category("norm", "GroupNorm", "Block") is BrickCategory.NORM
    assert category("self_attn", "MultiheadAttention", "TransformerEncoderLayer") is BrickCategory.ATTENTION
    assert category("flux", "FluxCapacitor", "Block") is BrickCategory.OTHER


def test_a_gate_beside_up_and_down_is_no_router() -> None:
    kind = classify(Described("layers.0.mlp.gate", ("Linear", "Mlp"), frozenset({"up", "down"})))
    assert kind
    assert kind.name == "GateProjection"


def test_a_first_matrix_without_a_third_is_the_way_up() -> None:
    kind = classify(Described("layers.0.ffn.w1", ("Linear", "FeedForward"), frozenset({"w2"})))
    assert kind
    assert kind.name == "UpProjection"


def test_a_product_with_a_row_for_each_word_is_the_head_whatever_its_name() -> None:
    described = Described("output", ("Linear", "Transformer"), in_layer=False, gives_vocabulary=True)
    kind = classify(described)
    assert kind
    assert kind.name == "LmHead"


def test_classifying_loads_no_torch() -> None:
    code = "import sys, cbtop.profiler.instrument.classification; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
