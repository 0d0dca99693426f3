"""Stand-ins for vLLM and SGLang with the names and signatures that our code uses.

Neither can be installed without libraries of a GPU. Names and signatures are those of vLLM 0.11 and later (version 1
of its engine) and of SGLang 0.5 and later.
"""

from __future__ import annotations

import sys
import textwrap
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cbtop.protocol.messages import Node
from cbtop.protocol.ring import FLAG_AMOUNTS
from cbtop.protocol.vocabulary import NodeKind
from tests.profiler.memory import Memory

NODE = (1 << 24) - 1

# A llama as vLLM and SGLang write it. The tokens of all sequences are in one row, and norms also get the residual.
MODEL = """
import torch
from torch import nn

class _Linear(nn.Module):
    def __init__(self, columns, rows):
        super().__init__()
        self.input_size, self.output_size = columns, rows
        self.input_size_per_partition, self.output_size_per_partition = columns, rows
        self.weight = nn.Parameter(torch.randn(rows, columns) / columns**0.5)
    def forward(self, x):
        return x @ self.weight.T, None

class QKVParallelLinear(_Linear): pass
class RowParallelLinear(_Linear): pass
class MergedColumnParallelLinear(_Linear): pass

class RMSNorm(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
    def forward(self, x, residual=None):
        if residual is not None:
            x = residual = x + residual
        normed = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight
        return normed if residual is None else (normed, residual)

class SiluAndMul(nn.Module):
    def forward(self, x):
        gate, up = x.chunk(2, -1)
        return nn.functional.silu(gate) * up

class RotaryEmbedding(nn.Module):
    def forward(self, positions, query, key):
        return query, key

class ATTENTION(nn.Module):
    def forward(self, query, key, value, *more):
        return nn.functional.scaled_dot_product_attention(query[None], key[None], value[None], is_causal=True)[0]

class VocabParallelEmbedding(nn.Module):
    def __init__(self, words, size):
        super().__init__()
        self.num_embeddings, self.embedding_dim = words, size
        self.weight = nn.Parameter(torch.randn(words, size))
    def forward(self, input_ids):
        return nn.functional.embedding(input_ids, self.weight)

class ParallelLMHead(VocabParallelEmbedding):
    def forward(self, input_ids):
        raise RuntimeError("LMHead's weights should be used in the sampler.")

class LlamaAttention(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.qkv_proj = QKVParallelLinear(size, 3 * size)
        self.o_proj = RowParallelLinear(size, size)
        self.rotary_emb = RotaryEmbedding()
        self.attn = ATTENTION()
    def forward(self, positions, hidden_states, *more):
        query, key, value = self.qkv_proj(hidden_states)[0].chunk(3, -1)
        query, key = self.rotary_emb(positions, query, key)
        return self.o_proj(self.attn(query, key, value, *more))[0]

class LlamaMLP(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.gate_up_proj = MergedColumnParallelLinear(size, 4 * size)
        self.down_proj = RowParallelLinear(2 * size, size)
        self.act_fn = SiluAndMul()
    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_up_proj(x)[0]))[0]

class LlamaDecoderLayer(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.self_attn = LlamaAttention(size)
        self.mlp = LlamaMLP(size)
        self.input_layernorm, self.post_attention_layernorm = RMSNorm(size), RMSNorm(size)
    def forward(self, positions, hidden_states, residual, *more):
        if residual is None:
            residual, hidden_states = hidden_states, self.input_layernorm(hidden_states)
        else:
            hidden_states, residual = self.input_layernorm(hidden_states, residual)
        hidden_states = self.self_attn(positions, hidden_states, *more)
        hidden_states, residual = self.post_attention_layernorm(hidden_states, residual)
        return self.mlp(hidden_states), residual

class LlamaModel(nn.Module):
    def __init__(self, words, size, layers):
        super().__init__()
        self.embed_tokens = VocabParallelEmbedding(words, size)
        self.layers = nn.ModuleList(LlamaDecoderLayer(size) for _ in range(layers))
        self.norm = RMSNorm(size)
    def forward(self, input_ids, positions, *more):
        hidden_states, residual = self.embed_tokens(input_ids), None
        for layer in self.layers:
            hidden_states, residual = layer(positions, hidden_states, residual, *more)
        return self.norm(hidden_states, residual)[0]

class LogitsProcessor(nn.Module):
    def forward(self, first, second, *more):
        head, hidden_states = (first, second) if isinstance(first, nn.Module) else (more[0], second)
        return hidden_states @ head.weight.T

class _LlamaForCausalLM(nn.Module):
    def __init__(self, words=31, size=8, layers=2):
        super().__init__()
        torch.manual_seed(5)
        self.model = LlamaModel(words, size, layers)
        self.lm_head = ParallelLMHead(words, size)
        self.logits_processor = LogitsProcessor()
"""

VLLM = {
    "__init__.py": '__version__ = "0.32.0"',
    "compilation/backends.py": """
class CompilerManager:
    def compile(self, graph, example_inputs):
        return graph
""",
    "model_executor/models/llama.py": MODEL.replace("ATTENTION", "Attention")
    + """
class LlamaForCausalLM(_LlamaForCausalLM):
    def forward(self, input_ids, positions, intermediate_tensors=None, inputs_embeds=None):
        return self.model(input_ids, positions)
    def compute_logits(self, hidden_states):
        return self.logits_processor(self.lm_head, hidden_states)
""",
    "plugins/__init__.py": """
from importlib.metadata import entry_points
def load_general_plugins():
    for plugin in entry_points(group="vllm.general_plugins"):
        plugin.load()()
""",
    "config/compilation.py": """
import enum
class CompilationMode(enum.IntEnum):
    NONE, STOCK_TORCH_COMPILE, DYNAMO_TRACE_ONCE, VLLM_COMPILE = range(4)
class CUDAGraphMode(enum.Enum):
    NONE = 0
    PIECEWISE = 1
    FULL = 2
    FULL_DECODE_ONLY = (FULL, NONE)
    FULL_AND_PIECEWISE = (FULL, PIECEWISE)
""",
    "v1/core/sched/output.py": """
from dataclasses import dataclass, field
@dataclass
class NewRequestData:
    req_id: str
    num_computed_tokens: int = 0
@dataclass
class CachedRequestData:
    req_ids: list = field(default_factory=list)
    num_computed_tokens: list = field(default_factory=list)
    num_output_tokens: list = field(default_factory=list)
@dataclass
class SchedulerOutput:
    scheduled_new_reqs: list
    scheduled_cached_reqs: CachedRequestData
    num_scheduled_tokens: dict
    total_num_scheduled_tokens: int
    scheduled_spec_decode_tokens: dict = field(default_factory=dict)
""",
    "v1/worker/gpu_model_runner.py": """
from types import SimpleNamespace
import torch
from vllm.config.compilation import CompilationMode, CUDAGraphMode
from vllm.model_executor.models.llama import LlamaForCausalLM

class CUDAGraphWrapper:
    def __init__(self, runnable): self.runnable = runnable
    def unwrap(self): return self.runnable
    def __getattr__(self, name): return getattr(self.runnable, name)
    def __call__(self, input_ids, positions, **more): return torch.zeros(len(input_ids), 8)  # a replay

class GPUModelRunner:
    def __init__(self, enforce_eager=True, spec_lengths=None):
        self.vllm_config = SimpleNamespace(compilation_config=SimpleNamespace(
            mode=CompilationMode.NONE if enforce_eager else CompilationMode.VLLM_COMPILE,
            cudagraph_mode=CUDAGraphMode.NONE if enforce_eager else CUDAGraphMode.FULL_AND_PIECEWISE))
        self.enforce_eager, self.spec_lengths, self.execute_model_state = enforce_eager, spec_lengths, None

    def load_model(self, load_dummy_weights=False):
        self.model = LlamaForCausalLM()
        if not self.enforce_eager:
            self.model = CUDAGraphWrapper(self.model)

    def get_model(self):
        return self.model.unwrap() if isinstance(self.model, CUDAGraphWrapper) else self.model

    def _prepare_inputs(self, scheduler_output, num_scheduled_tokens):
        return torch.arange(scheduler_output.total_num_scheduled_tokens) % 31

    def _dummy_run(self, num_tokens):
        ids = torch.zeros(num_tokens, dtype=torch.long)
        return self.get_model()(input_ids=ids, positions=ids)

    @torch.inference_mode()
    def execute_model(self, scheduler_output, intermediate_tensors=None):
        if self.execute_model_state is not None:
            raise RuntimeError("State error: sample_tokens() must be called after execute_model() returns None.")
        if not scheduler_output.total_num_scheduled_tokens:
            return "nothing"
        if scheduler_output.scheduled_new_reqs and scheduler_output.scheduled_new_reqs[0].req_id == "bad":
            raise ValueError("out of memory")
        ids = self._prepare_inputs(scheduler_output, scheduler_output.num_scheduled_tokens)
        self.execute_model_state = self.model.compute_logits(self.model(input_ids=ids, positions=ids))
        return None

    @torch.inference_mode
    def sample_tokens(self, grammar_output):
        chosen = self._sample(self.execute_model_state, None)
        self.execute_model_state = None
        if self.spec_lengths:
            chosen = [[1] * length for length in self.spec_lengths]
        return SimpleNamespace(sampled_token_ids=chosen)

    def _sample(self, logits, spec_decode_metadata):
        return logits.argmax(-1)
""",
    "v1/core/sched/scheduler.py": """
from types import SimpleNamespace
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput

class Scheduler:
    def __init__(self, preempts=(), max_running=256):
        self.requests, self.waiting, self.running, self.preempts = {}, [], [], preempts
        self.kv_cache_manager = SimpleNamespace(usage=0.25)
        self.max_num_running_reqs, self.max_num_scheduled_tokens = max_running, 64

    def has_requests(self):
        return bool(self.requests)

    def add_request(self, request):
        self.requests[request.request_id] = request
        self.waiting.append(request)

    def schedule(self):
        room = self.max_num_running_reqs - len(self.running)
        new, self.waiting = self.waiting[:room], self.waiting[room:]
        self.running += new
        tokens = {one.request_id: 1 for one in self.running}
        found = SchedulerOutput([NewRequestData(one.request_id, 16) for one in new], CachedRequestData(), tokens, 1)
        found.preempted_req_ids = set(self.preempts) & set(tokens)
        return found

    def update_from_output(self, scheduler_output, model_runner_output):
        outputs = []
        for request in list(self.running):
            request.left -= 1
            reason = None if request.left else "length"
            if reason:
                self.running.remove(request)
                del self.requests[request.request_id]
            outputs.append(SimpleNamespace(request_id=request.request_id, new_token_ids=[7], finish_reason=reason))
        return {0: SimpleNamespace(outputs=outputs)}

    def finish_requests(self, request_ids, finished_status):
        for name in request_ids:
            request = self.requests.pop(name)
            self.running = [one for one in self.running if one is not request]
            self.waiting = [one for one in self.waiting if one is not request]
""",
    "v1/engine/core.py": """
from vllm.v1.core.sched.scheduler import Scheduler
class EngineCore:
    def __init__(self, **how):
        self.scheduler = Scheduler(**how)
        self.step_fn = self.step
    def step(self):
        if not self.scheduler.has_requests():
            return {}, False
        return self.scheduler.update_from_output(self.scheduler.schedule(), None), True
    def step_with_batch_queue(self):
        return self.step()
""",
    "v1/engine/output_processor.py": """
class OutputProcessor:
    def process_outputs(self, engine_core_outputs, engine_core_timestamp=None, iteration_stats=None):
        return [one.request_id for one in engine_core_outputs]
""",
}

SGLANG = {
    "srt/models/llama.py": MODEL.replace("ATTENTION", "RadixAttention")
    + """
class LlamaForCausalLM(_LlamaForCausalLM):
    def forward(self, input_ids, positions, forward_batch):
        hidden_states = self.model(input_ids, positions, forward_batch)
        return self.logits_processor(input_ids, hidden_states, self.lm_head, forward_batch)
""",
    "srt/model_executor/forward_batch_info.py": """
from dataclasses import dataclass
from enum import IntEnum, auto
import torch
class ForwardMode(IntEnum):
    EXTEND, DECODE, MIXED, IDLE, TARGET_VERIFY = auto(), auto(), auto(), auto(), auto()
    def is_extend(self): return self in (ForwardMode.EXTEND, ForwardMode.MIXED, ForwardMode.TARGET_VERIFY)
    def is_decode(self): return self == ForwardMode.DECODE
    def is_mixed(self): return self == ForwardMode.MIXED
    def is_idle(self): return self == ForwardMode.IDLE
    def is_target_verify(self): return self == ForwardMode.TARGET_VERIFY
@dataclass
class ForwardBatch:
    forward_mode: ForwardMode
    batch_size: int
    input_ids: torch.Tensor
    seq_lens_sum: int
    extend_num_tokens: int = None
    extend_prefix_lens_cpu: list = None
""",
    "srt/model_executor/model_runner.py": """
from dataclasses import dataclass
from types import SimpleNamespace
import torch
from sglang.srt.models.llama import LlamaForCausalLM
@dataclass
class ModelRunnerOutput:
    logits_output: object
    can_run_graph: bool
class ModelRunner:
    def __init__(self, is_draft_worker=False, **args):
        off = {"disable_cuda_graph": True, "disable_piecewise_cuda_graph": True, "enable_torch_compile": False}
        self.server_args = SimpleNamespace(**(off | args))
        self.load_model()
        self.model.forward(torch.zeros(3, dtype=torch.long), torch.zeros(3), None)  # it captures, or warms up
    def load_model(self):
        self.model = LlamaForCausalLM()
    @torch.no_grad()
    def forward(self, forward_batch, skip_attn_backend_init=None, pp_proxy_tensors=None):
        if forward_batch.forward_mode.is_decode() and not self.server_args.disable_cuda_graph:
            return ModelRunnerOutput(torch.zeros(len(forward_batch.input_ids), 31), True)
        ids = forward_batch.input_ids
        return ModelRunnerOutput(self.model.forward(ids, torch.arange(len(ids)), forward_batch), False)
    def sample(self, logits_output, forward_batch):
        return logits_output.argmax(-1)
""",
    "srt/managers/tp_worker.py": """
from sglang.srt.model_executor.model_runner import ModelRunner
class TpModelWorker:
    def __init__(self, **args):
        self.model_runner = ModelRunner(**args)
    def forward_batch_generation(self, forward_batch, is_verify=False):
        output = self.model_runner.forward(forward_batch)
        if is_verify:
            return output.logits_output
        return self.model_runner.sample(output.logits_output, forward_batch)
""",
}
PACKAGES = {"vllm": VLLM, "sglang": SGLANG}


def write_engine(name: str, directory: Path, **replaced: str) -> None:
    """Write the package that stands in for an engine (vLLM or SGLang) to `directory`.

    `replaced` maps files to other sources.
    """
    for path, source in (PACKAGES[name] | replaced).items():
        file = directory / name / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(textwrap.dedent(source))
    for folder in [directory / name, *(path for path in (directory / name).rglob("*") if path.is_dir())]:
        (folder / "__init__.py").touch()


@contextmanager
def importable(name: str, directory: Path) -> Iterator[None]:
    """Make the stand-in for an engine in `directory` importable inside this context. Remove it afterwards."""
    sys.path.insert(0, str(directory))
    try:
        yield
    finally:
        sys.path.remove(str(directory))
        for module in [module for module in sys.modules if module.partition(".")[0] == name]:
            del sys.modules[module]


def steps_of(memory: Memory) -> list[tuple[str, int]]:
    """Return the phase and the number of tokens of each step, in the order in which the steps ended."""
    nodes = {node.id: node for node in memory.said if isinstance(node, Node)}
    return [
        (nodes[tag & NODE].name, elements)
        for tag, _, _, elements in memory.records
        if tag & NODE
        and not tag & FLAG_AMOUNTS
        and nodes[tag & NODE].kind is NodeKind.STEP
        and nodes[tag & NODE].parent is None
    ]


def places_of(memory: Memory) -> Counter[str]:
    """Count records by the path of their node, beginning with the step, for example `decode / 0 / RmsNorm`."""
    nodes = {node.id: node for node in memory.said if isinstance(node, Node)}

    def path(node: Node) -> str:
        return node.name if node.parent is None else f"{path(nodes[node.parent])} / {node.name}"

    return Counter(
        path(nodes[tag & NODE]) for tag, *_ in memory.records if tag & NODE and not tag & FLAG_AMOUNTS
    )  # Only records of nodes count. Other records report losses or amounts.


def places_of_a_step(phase: str) -> dict[str, int]:
    """Return how often each path occurs in one step of the stand-ins' model."""
    layer = ("QkvProjection", "RopeEmbedding", "Attention (fused)", "OutputProjection")
    layer += ("GateUpProjection", "Activation", "DownProjection")
    places = {f"{index} / {brick}": 1 for index in (0, 1) for brick in layer}
    places |= {"0": 1, "1": 1, "0 / RmsNorm": 2, "1 / RmsNorm": 2}
    places |= {"RmsNorm": 1, "Embedding": 1, "LmHead": 1, "Sampling": 1}
    return {phase: 1} | {f"{phase} / {place}": count for place, count in places.items()}
