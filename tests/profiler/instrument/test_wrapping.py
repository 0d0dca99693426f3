"""Tests of a module with a replaced call.

Numbers, copies, pickles, lifetimes and compiled code are the same as without the replacement.
"""

from __future__ import annotations

import copy
import gc
import inspect
import io
import os
import pickle
import shutil
import sys
import threading
import types
import weakref
from _thread import get_ident
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, ClassVar

import pytest

pytest.importorskip("torch", reason="torch is not installed: make torch")

from cbtop.profiler.definitions import BrickDefinition
from cbtop.profiler.hot_path import HotPath, chosen
from cbtop.profiler.instrument import attach, install, module_tree, trouble, uninstall, wrapping
from cbtop.profiler.instrument.call_attribute import ATTRIBUTE, end, is_supported, stand_by, standing
from cbtop.profiler.instrument.capturing import Capture, captures
from cbtop.profiler.instrument.dynamo import keep_dynamo_out
from cbtop.profiler.instrument.functions import TimedFunctions
from cbtop.profiler.instrument.functions import timed as timed_function
from cbtop.profiler.instrument.steps import ModelSteps
from cbtop.profiler.instrument.swapping import swaps
from cbtop.profiler.instrument.timed_model import LOOK_EVERY
from cbtop.profiler.instrument.work import stored_bytes
from cbtop.profiler.instrument.wrapping import BrickCall, CallWrapper, elements_of
from cbtop.profiler.profiler import BrickProfiler
from cbtop.protocol.messages import Manifest, Node
from cbtop.protocol.ring import FLAG_AMOUNTS, FLAG_FAILED
from cbtop.protocol.vocabulary import BrickCategory, NodeKind
from tests.profiler.instrument.dynamo_state import forget_compiled, graphs_and_breaks
from tests.profiler.instrument.tiny import model_of, torch, transformers, words
from tests.profiler.memory import Memory

from torch import nn  # isort: skip
from torch.utils.checkpoint import checkpoint  # isort: skip
from tests.representatives import first_by_default

pytestmark = pytest.mark.usefixtures("without_gradients")

KINDS = ["llama", "qwen2", "gpt2", "mixtral", "gemma2"]


def _attributes(model: Any) -> list[str]:
    return [name for name, module in model.named_modules() if ATTRIBUTE in vars(module)]


def test_this_torch_is_supported() -> None:
    assert is_supported()


@pytest.mark.parametrize(
    ("how", "kind"),
    [("attached", kind) for kind in KINDS]
    + [pytest.param("installed", kind, marks=pytest.mark.slow if kind != "llama" else ()) for kind in KINDS],
)
def test_outputs_are_the_same_to_the_bit(kind: str, how: str, profiler: BrickProfiler, memory: Memory) -> None:
    model, inputs = model_of(kind), words(2, 7)
    logits, tokens = model(inputs).logits, model.generate(inputs, max_new_tokens=3, do_sample=False)
    if how == "attached":
        attach(model, profiler)
    else:
        install(profiler)
    assert torch.equal(model(inputs).logits, logits)
    assert torch.equal(model.generate(inputs, max_new_tokens=3, do_sample=False), tokens)
    assert memory.records


def _copied(model: Any) -> Any:
    return copy.deepcopy(model)


def _pickled(model: Any) -> Any:
    return pickle.loads(pickle.dumps(model))


def _saved(model: Any) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@first_by_default("again", [_copied, _pickled, _saved])
@pytest.mark.parametrize("kind", ["llama", pytest.param("gpt2", marks=pytest.mark.slow)])
def test_a_copy_runs_its_own_weights_and_is_not_attached(again: Any, kind: str, profiler: BrickProfiler) -> None:
    model, inputs = model_of(kind), words(1, 5)
    attach(model, profiler)
    before = model(inputs).logits  # This call replaces the calls of all modules.
    other = again(model)
    assert not _attributes(other)
    for weight in other.parameters():
        weight.zero_()
    assert not torch.equal(other(inputs).logits, before)
    assert torch.equal(model(inputs).logits, before)
    model.load_state_dict(model.state_dict())


class OwnState(nn.Module):
    """A module that returns all of its attributes as its state. torch's recurrent modules do the same."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Any) -> Any:
        return self.inner(x)

    def __getstate__(self) -> dict[str, Any]:
        return vars(self).copy()


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(OwnState() for _ in range(2))

    def forward(self, x: Any) -> Any:
        for layer in self.layers:
            x = layer(x)
        return x


class Shared(nn.Module):
    """A model with layers that another model may use, too."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Any) -> Any:
        for layer in self.layers:
            x = layer(x)
        return x


def test_a_pickle_of_a_module_with_its_own_getstate_does_not_need_cbtop(profiler: BrickProfiler) -> None:
    model = Stack()
    attach(model, profiler)
    model(torch.ones(1, 4))
    assert b"cbtop" not in pickle.dumps(model)


def _timed(memory: Memory) -> Counter[str]:
    """Return how often each path was recorded."""
    nodes = {node.id: node for node in memory.said if isinstance(node, Node)}

    def path(node: Node) -> str:
        name = f"{node.name} {node.label}".strip()
        return name if node.parent is None else f"{path(nodes[node.parent])}/{name}"

    kept = (tag for tag, *_ in memory.records if not tag & FLAG_AMOUNTS)
    return Counter(path(nodes[tag & ((1 << 24) - 1)]) for tag in kept)


@first_by_default("sample_every", [1, 2, 3])
def test_layers_that_two_models_share_are_timed_once_in_steps_of_either(sample_every: int, memory: Memory) -> None:
    profiler = BrickProfiler(recorder=memory, sample_every=sample_every)
    layers = [OwnState() for _ in range(2)]
    one, other = Shared(layers), Shared(layers)
    attachments = [attach(one, profiler), attach(other, profiler)]
    # The two models take turns in an irregular order.
    turns = [one, other, one, one, other, other, one, other, other, one, one, one]
    for model in turns:
        model(torch.ones(1, 4))
    found = _timed(memory)
    for step in ("forward", "forward Shared"):
        for layer in "01":
            assert found[f"{step}/{layer}/Linear inner"] == found[f"{step}/{layer}"] == found[step]
    assert not [where for where in found if where.count("Linear") > 1]
    assert (found["forward"], found["forward Shared"]) == (-(-7 // sample_every), -(-5 // sample_every))
    for attachment in attachments:
        attachment.detach()
    assert not _attributes(one)


def test_models_that_share_layers_across_threads_lose_no_calls(
    profiler: BrickProfiler, memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers, x = [OwnState() for _ in range(2)], torch.ones(1, 4)
    # In training mode, calls with gradients are a warm-up if an earlier test of this process has made an optimizer.
    models = [Shared(layers).eval() for _ in range(3)]
    attachments = [attach(model, profiler) for model in models]
    others = [threading.Thread(target=model, args=(x,)) for model in models[1:]]
    waiting, standing = list(others), wrapping.standing

    def meanwhile(module: object) -> Any:
        if waiting:  # Another thread interrupts here, after the attribute was read and before it is replaced.
            other = waiting.pop()
            other.start()
            other.join(0.1)  # Do not wait for ever, because the second thread may itself wait for this thread.
        return standing(module)

    with monkeypatch.context() as interleaved:
        interleaved.setattr(wrapping, "standing", meanwhile)
        models[0](x)
        for other in others:
            other.join()
    for model in models:
        model(x)
    found = _timed(memory)
    for step in ("forward", "forward Shared", "forward Shared 2"):
        assert [found[f"{step}{inside}"] for inside in ("", "/0", "/1", "/0/Linear inner")] == [2] * 4
    for attachment in attachments:
        attachment.detach()
    assert not _attributes(models[0])


def test_a_model_that_is_attached_again_keeps_its_name_and_its_nodes(profiler: BrickProfiler, memory: Memory) -> None:
    models, inputs = [model_of("llama"), model_of("llama"), model_of("llama")], words(1, 4)
    for model in models:
        attach(model, profiler)
        model(inputs)
    said, kept = list(memory.said), len(memory.records)
    for model in models:
        attach(model, profiler).detach()
    for model, name in zip(models, ("", "LlamaForCausalLM", "LlamaForCausalLM 2"), strict=True):
        assert attach(model, profiler).model == name
        model(inputs)
    assert memory.said == said
    assert len(memory.records) == 2 * kept


class Adapted(nn.Module):
    def __init__(self, base_layer: Any) -> None:
        super().__init__()
        self.base_layer, self.lora_A, self.lora_B = base_layer, nn.Linear(32, 4), nn.Linear(4, 32)

    def forward(self, x: Any) -> Any:
        return self.base_layer(x) + self.lora_B(self.lora_A(x))


@pytest.mark.parametrize("sample_every", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_what_the_host_changes_in_a_model_is_followed(sample_every: int, memory: Memory) -> None:
    profiler = BrickProfiler(recorder=memory, sample_every=sample_every)
    model, inputs = model_of("llama"), words(1, 4)
    attachment = attach(model, profiler)

    def seen(steps: int) -> set[str]:
        for _ in range(steps):
            model(inputs)
        memory.records.clear()
        for _ in range(sample_every):
            model(inputs)
        return set(_timed(memory))

    before = seen(2)
    nodes = len(memory.nodes)
    for layer in model.model.layers:
        layer.self_attn.q_proj = Adapted(layer.self_attn.q_proj)
        layer.mlp.up_proj = nn.Linear(32, 48, bias=False)
    assert seen(sample_every * LOOK_EVERY) == before
    # Only the three modules with an adapter get new nodes. Their work is unknown, so they cannot use the old nodes.
    assert len(memory.nodes) == nodes + 3
    del model.model.layers[0]
    for index, layer in enumerate(model.model.layers):
        layer.self_attn.layer_idx = index
    model.config.num_hidden_layers = 2
    assert {where.split("/")[1] for where in seen(sample_every * LOOK_EVERY) if "/" in where} >= {"0", "1"}
    assert not [where for where in seen(0) if "/2" in where]
    model.bfloat16()
    seen(sample_every * LOOK_EVERY)
    kinds = {node.id: node for node in memory.said if isinstance(node, Node)}
    heads = {tag & ((1 << 24) - 1) for tag, *_ in memory.records} & {i for i in kinds if kinds[i].name == "LmHead"}
    assert [kinds[head].work.bytes_per_call for head in heads] == [model.lm_head.weight.nbytes]
    attachment.detach()
    assert not _attributes(model)


def test_a_model_whose_weights_the_host_changes_is_said_anew_once(profiler: BrickProfiler, memory: Memory) -> None:
    model, inputs = model_of("llama"), words(1, 4)
    attach(model, profiler)
    for change in (lambda: None, model.bfloat16, lambda: None):
        change()
        for _ in range(LOOK_EVERY):
            model(inputs)
    said = [message for message in memory.said if isinstance(message, Manifest)]
    assert [manifest.quantization for manifest in said] == ["float32", "bfloat16"]
    assert said[1].weights_bytes == stored_bytes(model) < said[0].weights_bytes
    assert said[1] == replace(said[0], quantization="bfloat16", weights_bytes=said[1].weights_bytes)


def test_weights_that_the_host_resizes_in_place_are_followed(profiler: BrickProfiler, memory: Memory) -> None:
    model, inputs = model_of("llama"), words(1, 4)
    attach(model, profiler)
    for rows in (101, 303):
        model.lm_head.weight.data = torch.zeros(rows, 32)
        for _ in range(LOOK_EVERY):
            model(inputs)
    heads = [message for message in memory.said if isinstance(message, Node) and message.name == "LmHead"]
    assert {(head.work.flops_per_element, head.work.bytes_per_call) for head in heads if head.work} == {
        (2 * rows, rows * 32 * 4) for rows in (101, 303)
    }
    said = [message.parameters for message in memory.said if isinstance(message, Manifest)]
    assert [parameters - said[0] for parameters in said] == [0, 202 * 32]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_model_of_scripted_layers_has_steps_and_layers(profiler: BrickProfiler, memory: Memory) -> None:
    model = Shared([torch.jit.script(nn.Sequential(nn.Linear(4, 4))) for _ in range(2)])
    attach(model, profiler)
    model(torch.ones(1, 4))
    found = _timed(memory)
    assert (found["forward"], found["forward/0"], found["forward/1"]) == (1, 1, 1)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_traced_part_of_a_model_is_a_brick(profiler: BrickProfiler, memory: Memory) -> None:
    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            part = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
            self.backbone, self.fc = torch.jit.trace(part, torch.ones(1, 4)), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.fc(self.backbone(x))  # type: ignore[no-any-return]

    model = Reader()
    attach(model, profiler)
    model(torch.ones(1, 4))
    found = _timed(memory)
    assert (found["forward/Sequential (scripted) backbone"], found["forward/Linear fc"]) == (1, 1)


class Scripted(nn.Module):
    """A module that torch.jit can script.

    The module has no annotations of its own, so torch.jit finds those of its base class.
    """

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@first_by_default("how", ["attached", "installed", "disabled", "uninstalled"], 2)
def test_modules_that_were_called_are_scripted_as_without_us(
    how: str, profiler: BrickProfiler, memory: Memory
) -> None:
    alone, *layers = [Scripted() for _ in range(3)]
    model, x = Shared(layers), torch.ones(1, 4)
    if how == "attached":
        attach(model, profiler)
    else:
        install(profiler)
    want = model(x), alone(x)
    if how == "disabled":
        profiler.disable()
        model(x)
    elif how == "uninstalled":
        uninstall()
    assert torch.equal(torch.jit.script(model.layers[0])(x), model.layers[0](x))
    assert torch.equal(torch.jit.script(alone)(x), want[1])
    before = _timed(memory)
    assert torch.equal(model(x), want[0])
    assert (_timed(memory) - before)["forward/0"] == (how in ("attached", "installed"))


@first_by_default("sample_every", [1, 2])
def test_layers_that_are_called_outside_of_a_step_are_not_recorded(sample_every: int, memory: Memory) -> None:
    profiler = BrickProfiler(recorder=memory, sample_every=sample_every)

    class Checkpointed(Stack):
        def forward(self, x: Any) -> Any:
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=False)
            return x

    model = Checkpointed().eval()  # in training mode, gradients without an optimizer are training steps
    attachment = attach(model, profiler)
    with torch.enable_grad():
        for _ in range(4):
            # In this backward pass, each layer computes its forward a second time.
            model(torch.ones(1, 4, requires_grad=True)).sum().backward()
            model.layers[0](torch.ones(1, 4))
    found = _timed(memory)
    steps = 4 // sample_every
    assert found == dict.fromkeys(
        ("forward", *(f"forward/{layer}{inner}" for layer in "01" for inner in ("", "/Linear inner"))), steps
    )
    attachment.detach()


@pytest.mark.parametrize("again", [_copied, _pickled])
def test_a_copy_that_takes_every_attribute_along_runs_its_own_weights(again: Any, profiler: BrickProfiler) -> None:
    model, x = Stack(), torch.ones(1, 4)
    attach(model, profiler)
    before = model(x)
    other = again(model)
    for weight in other.parameters():
        weight.zero_()
    assert not other(x).any()
    assert torch.equal(model(x), before)


def _replicated(module: Any) -> Any:
    """Replicate a module with separate weights, as nn.DataParallel does on several devices."""
    replica = module._replicate_for_data_parallel()
    for name, weight in module.named_parameters(recurse=False):
        setattr(replica, name, torch.zeros_like(weight))
    for name, child in module.named_children():
        setattr(replica, name, _replicated(child))
    return replica


@first_by_default("how", ["attached", "installed"])
def test_replicas_run_their_own_weights_and_a_warning_says_none_is_shown(
    how: str,
    profiler: BrickProfiler,
    memory: Memory,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(trouble, "_said", {})
    model, x = Stack(), torch.ones(1, 4)
    if how == "attached":
        attach(model, profiler)
    else:
        install(profiler)
    before = model(x)
    layer = _replicated(model.layers[0])
    assert not layer(x).any()
    model(x)
    recorded = _timed(memory)["forward"]
    for _ in range(2):
        assert not _replicated(model)(x).any()
        assert torch.equal(model(x), before)
    assert _timed(memory)["forward"] == recorded == 2
    assert [record.getMessage() for record in caplog.records if record.name == "cbtop"] == [
        "cbtop: the model is no longer shown: ValueError: nn.DataParallel copies its model at each call: "
        "it cannot be instrumented (DistributedDataParallel can)"
    ]


def test_attaching_walks_through_a_model_as_often_as_it_has_parts(
    profiler: BrickProfiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    walked: list[int] = []
    walk = module_tree._modules_of
    monkeypatch.setattr(module_tree, "_modules_of", lambda root: walked.append(id(root)) or walk(root))
    model = Stack()
    attach(model, profiler)
    assert walked.count(id(model)) == 1


@first_by_default("is_frozen", [False, True])
def test_many_new_objects_trigger_no_collection_and_frozen_ones_stay_frozen(
    is_frozen: bool, profiler: BrickProfiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cbtop.profiler.instrument.garbage.MANY_OBJECTS", 1)
    model = Stack()
    gc.collect()
    if is_frozen:
        gc.freeze()
    frozen = gc.get_freeze_count()
    try:
        attach(model, profiler)
        assert gc.isenabled()
        assert frozen - 1000 < gc.get_freeze_count() <= frozen  # A few frozen objects are freed in any case.
        assert is_frozen or not any([one is model for one in gc.get_objects(generation=0)])
    finally:
        gc.unfreeze()


@pytest.mark.slow
def test_a_model_that_the_host_drops_is_freed(profiler: BrickProfiler) -> None:
    gc.collect()
    gc.disable()
    try:
        model = Stack()
        attach(model, profiler)
        model(torch.ones(1, 4))
        weights = [weakref.ref(weight) for weight in model.parameters()]
        del model
        assert [weight() for weight in weights] == [None] * len(weights)
    finally:
        gc.enable()


def test_a_call_detached_while_its_module_runs_is_recorded_and_then_replaced(
    profiler: BrickProfiler, memory: Memory
) -> None:
    model, inputs = model_of("llama"), words(1, 4)
    attachment = attach(model, profiler)
    model(inputs)
    inner, calls = model.model.layers[1].mlp.down_proj, [weakref.ref(call) for call in attachment.steps.calls]
    before = len(memory.records)

    def detaching(module: Any, args: Any) -> None:
        attachment.detach()
        gc.collect()

    handle = inner.register_forward_pre_hook(detaching)
    expected = model(inputs).logits
    handle.remove()
    gc.collect()

    recorded = len(memory.records) - before
    assert recorded > 0
    assert [call for call in calls if call() is not None] == []
    attach(model, profiler)  # The scopes of the nodes still exist, but the wrapped calls that started steps are gone.
    for _ in range(3):
        assert torch.equal(model(inputs).logits, expected)
    assert len(memory.records) > before + 3 * recorded


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_detaching_leaves_no_attribute_and_no_function_behind(
    kind: str, profiler: BrickProfiler, memory: Memory
) -> None:
    model, inputs = model_of(kind), words(1, 5)
    touched = [nn.functional, nn.Module, sys.modules[type(model).__module__], *model.modules()]
    touched += [base for module in model.modules() for base in type(module).__mro__]

    def seen() -> list[dict[str, Any]]:
        return [dict(vars(one)) for one in touched]

    before = seen()
    attachment = attach(model, profiler)
    model(inputs)
    changed = [one for one, then in zip(touched, before, strict=True) if dict(vars(one)) != then]
    assert {id(one) for one in changed} == {id(nn.Module)}
    attachment.detach()
    assert seen() == before
    count = len(memory.records)
    model.generate(inputs, max_new_tokens=2)
    assert len(memory.records) == count


def test_uninstalling_leaves_the_class_as_it_was(profiler: BrickProfiler) -> None:
    model = model_of("llama")
    install(profiler)
    model(words(1, 5))
    nn.Linear(2, 2)(torch.ones(1, 2))
    uninstall()
    assert getattr(nn.Module, ATTRIBUTE) is None
    assert not [name for name, module in model.named_modules() if vars(module).get(ATTRIBUTE)]


def test_disabled_nothing_stands_in_but_at_the_model_itself(memory: Memory) -> None:
    profiler = BrickProfiler(recorder=memory, enabled=False)
    model = model_of("llama")
    attachment = attach(model, profiler)
    model(words(1, 5))
    assert not memory.records
    assert [name for name, module in model.named_modules() if standing(module) is not None] == ["", "model"]
    profiler.enable()
    model(words(1, 5))
    assert memory.records
    profiler.disable()
    model(words(1, 5))
    assert len([name for name, module in model.named_modules() if standing(module) is not None]) == 2
    attachment.detach()


def test_hooks_of_the_host_run_as_they_did(profiler: BrickProfiler) -> None:
    model, seen = Stack(), []
    model.layers[0].register_forward_hook(lambda module, args, result: seen.append(1))
    attach(model, profiler)
    model(torch.ones(1, 4))
    assert seen == [1]


def test_an_exception_in_a_layer_reaches_the_host_and_the_next_step_is_whole(
    profiler: BrickProfiler, memory: Memory
) -> None:
    model = Stack()
    attach(model, profiler)
    with pytest.raises(RuntimeError, match="shapes"):
        model(torch.ones(1, 3))
    model(torch.ones(1, 4))
    assert len({node[3] for node in memory.nodes if node[1] is None}) == 1
    assert profiler.stats is not None


def test_a_model_of_no_layers_cannot_be_attached(profiler: BrickProfiler) -> None:
    with pytest.raises(ValueError, match="no list of layers"):
        attach(nn.Linear(2, 2), profiler)


class Counting:
    """A backend of torch.compile that runs graphs without generating code, and counts them."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.graphs += 1
        return graph.forward


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv_proj, self.o_proj = nn.Linear(8, 24), nn.Linear(8, 8)
        self.up_proj, self.down_proj = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Any) -> Any:
        q, k, v = (part.unflatten(-1, (2, 4)).transpose(1, 2) for part in self.qkv_proj(x).chunk(3, dim=-1))
        x = x + self.o_proj(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down_proj(self.up_proj(x))


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(8)

    def forward(self, x: Any) -> Any:
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


def _whole(model: Any, **way: Any) -> Any:
    return torch.compile(model, **way)


def _in_place(model: Any, **way: Any) -> Any:
    model.compile(**way)
    return model


def _regional(model: Any, **way: Any) -> Any:
    for layer in model.layers:
        layer.compile(**way)
    return model


def _function(model: Any, **way: Any) -> Any:
    return torch.compile(lambda x: model(x), **way)


def _call(model: Any, **way: Any) -> Any:
    # `generate` of transformers compiles this call if the cache is static.
    return torch.compile(model.__call__, **way)


WAYS: dict[str, dict[str, Any]] = {"default": {}, "fullgraph": {"fullgraph": True}, "dynamic": {"dynamic": True}}
# By default, run two cases, which differ in the moment of compilation and in what is compiled. The other combinations
# are slow tests.
BY_DEFAULT = {("before", _in_place), ("installed", _regional)}
COMPILED = [
    pytest.param(
        when, compiled, way, id=f"{when}-{compiled.__name__}-{way}",
        marks=() if way == "default" and (when, compiled) in BY_DEFAULT else pytest.mark.slow,
    )
    for when in ("before", "after", "installed")
    for compiled in (_whole, _in_place, _regional, _function, _call)
    for way in WAYS
]  # fmt: skip


@pytest.mark.parametrize(("when", "compiled", "way"), COMPILED)
def test_compiled_numbers_and_graphs_are_those_of_the_bare_model(
    way: str, compiled: Any, when: str, profiler: BrickProfiler
) -> None:
    def run(instrumented: bool) -> tuple[list[Any], int, int]:
        forget_compiled()
        torch.manual_seed(1)
        model, backend = Decoder(), Counting()
        if instrumented and when == "installed":
            install(profiler)
        if instrumented and when == "before":
            attach(model, profiler)
        called = compiled(model, backend=backend, **WAYS[way])
        found = []
        for at, length in enumerate([3, 3, 4, 4]):
            if instrumented and at == 1 and when == "after":
                attach(model, profiler)
            if instrumented and at == 2:
                profiler.disable()
            found.append(called(torch.ones(1, length, 8)))
        return found, backend.graphs, graphs_and_breaks()[1]

    bare, ours = run(instrumented=False), run(instrumented=True)
    assert all(torch.equal(a, b) for a, b in zip(bare[0], ours[0], strict=True))
    assert ours[1:] == bare[1:]


# By default, this test uses two ways to compile that BY_DEFAULT does not contain.
WHEN_LOOKED_AT = {("before", _whole), ("installed", _call)}


class CallingBlock(Block):
    """A decoder layer with its own `__call__`, as in transformers 5.17."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return super().__call__(*args, **kwargs)


@first_by_default(
    ("when", "compiled"),
    [
        pytest.param(when, compiled, marks=() if (when, compiled) in WHEN_LOOKED_AT else pytest.mark.slow)
        for when in ("before", "installed")
        for compiled in (_whole, _in_place, _regional, _function, _call)
    ],
)
def test_layers_dynamo_inspects_are_compiled_once_if_recorded_or_captured(
    compiled: Any, when: str, memory: Memory
) -> None:
    def run(profiler: BrickProfiler | None) -> tuple[list[Any], int, int]:
        forget_compiled()
        torch.manual_seed(1)
        model, backend = Decoder(), Counting()
        model.layers = nn.ModuleList(CallingBlock() for _ in range(2))
        if profiler is not None and when == "installed":
            install(profiler)
        if profiler is not None and when == "before":
            attach(model, profiler)
        called = compiled(model, backend=backend)
        found = [called(torch.ones(1, 3, 8)) for _ in range(3)]
        captures[get_ident()] = Capture(list)
        found.append(called(torch.ones(1, 3, 8)))
        captures.clear()
        if profiler is not None:
            profiler.disable()
        found.append(called(torch.ones(1, 3, 8)))
        return found, backend.graphs, graphs_and_breaks()[1]

    bare, ours = run(None), run(BrickProfiler(recorder=memory, sample_every=2))
    uninstall()
    assert all(torch.equal(a, b) for a, b in zip(bare[0], ours[0], strict=True))
    assert ours[1:] == bare[1:]


def test_layers_dynamo_inspects_are_timed_like_others_and_then_restored(
    profiler: BrickProfiler, memory: Memory
) -> None:
    model = Decoder()
    model.layers = nn.ModuleList(CallingBlock() for _ in range(2))
    attachments = [attach(model, profiler)]
    model(torch.ones(1, 3, 8))
    model.layers[0].compile(backend="eager")  # While this call runs, the program compiles one layer.
    model(torch.ones(1, 3, 8))
    nodes = {node[0]: node for node in memory.nodes}
    ran = [nodes[tag & ((1 << 24) - 1)][3] for tag, *_ in memory.records if not tag & FLAG_AMOUNTS]
    assert ran.count("forward") == 2
    assert len([node for node in memory.nodes if node[2] is NodeKind.LAYER]) == 2
    assert ran.count("DownProjection") == 4 - 1  # A compiled layer is recorded as a whole, without its bricks.
    attachments[0].detach()
    assert not isinstance(model.layers[0].__dict__["_compiled_call_impl"], CallWrapper)
    assert "_compiled_call_impl" not in model.layers[1].__dict__
    model(torch.ones(1, 3, 8))


def test_layers_dynamo_inspects_can_be_shared_by_models_that_come_and_go(profiler: BrickProfiler) -> None:
    layers: list[nn.Module] = [CallingBlock(), CallingBlock()]
    one, other = Shared(layers), Shared(layers)
    x = torch.ones(1, 3, 8)
    bare = one(x)
    first = attach(one, profiler)
    attach(other, profiler)
    first.detach()
    assert torch.equal(other(x), bare)
    attach(one, profiler)  # At this moment, the calls of the other model are replaced.
    assert torch.equal(one(x), bare)
    assert torch.equal(other(x), bare)


def _counted() -> tuple[int, int]:
    """Return the numbers of graphs and of graph breaks that Dynamo has counted since the last call."""
    found = graphs_and_breaks()
    forget_compiled()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("when", ["before", "installed"])
def test_generating_with_a_static_cache_compiles_as_it_does_without_us(
    when: str, profiler: BrickProfiler, memory: Memory
) -> None:
    def run(instrumented: bool) -> tuple[Any, tuple[int, int]]:
        model = model_of("llama", num_hidden_layers=2)
        config = transformers.CompileConfig(backend="eager", mode=None, fullgraph=True)
        config._compile_all_devices = True  # Without this setting, transformers compiles only on GPUs.
        if instrumented and when == "before":
            attach(model, profiler)
        if instrumented and when == "installed":
            install(profiler)
        _counted()
        how = {"cache_implementation": "static", "compile_config": config, "max_new_tokens": 5, "do_sample": False}
        found = torch.cat([model.generate(words(1, 4), **how), model.generate(words(1, 4), **how)])
        return found, _counted()

    bare, ours = run(instrumented=False), run(instrumented=True)
    assert torch.equal(bare[0], ours[0])
    assert bare[1][0] > 0
    assert ours[1] == bare[1]
    nodes = {node[0]: node for node in memory.nodes}
    ran = [nodes[tag & ((1 << 24) - 1)][3] for tag, *_ in memory.records if not tag & FLAG_AMOUNTS]
    assert (ran.count("prefill"), ran.count("decode")) == (2, 8)


@pytest.mark.slow
@pytest.mark.parametrize("compiled", [_whole, pytest.param(_function, marks=pytest.mark.slow)])
def test_objects_made_in_compiled_code_are_compiled_as_without_cbtop(compiled: Any, profiler: BrickProfiler) -> None:
    """The model creates a cache object during its call.

    Dynamo cannot look up objects that were created in compiled code.
    """
    forget_compiled()
    model = model_of("llama", num_hidden_layers=2)
    attach(model, profiler)
    bare = model(words(1, 4)).logits
    assert torch.equal(compiled(model, backend="eager", fullgraph=True)(words(1, 4)).logits, bare)


HAS_COMPILER = shutil.which("g++") or shutil.which("clang++")
MODES = ["default", "reduce-overhead"] if HAS_COMPILER else ["aot_eager"]  # inductor generates C++


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # warnings of torch
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("compiled", [_whole, _in_place, _function])
def test_what_inductor_makes_of_a_model_is_the_same(mode: str, compiled: Any, profiler: BrickProfiler) -> None:
    def run(instrumented: bool) -> tuple[list[Any], tuple[int, int]]:
        _counted()
        torch.manual_seed(1)
        model = Decoder()
        if instrumented:
            attach(model, profiler)
        called = compiled(model, **({"mode": mode} if HAS_COMPILER else {"backend": mode}))
        return [called(torch.ones(1, length, 8)) for length in (3, 3, 4)], _counted()

    bare, ours = run(instrumented=False), run(instrumented=True)
    assert all(torch.equal(a, b) for a, b in zip(bare[0], ours[0], strict=True))
    assert ours[1] == bare[1]


@first_by_default("compiled", [_whole, _in_place, _regional])
@pytest.mark.parametrize("when", ["before", "installed"])
def test_a_compiled_model_has_its_steps_all_the_same(
    compiled: Any, when: str, profiler: BrickProfiler, memory: Memory
) -> None:
    forget_compiled()
    model = Decoder()
    if when == "installed":
        install(profiler)
    else:
        attach(model, profiler)
    called = compiled(model, backend=Counting())
    for _ in range(2):
        called(torch.ones(1, 3, 8))
    nodes = {node[0]: node for node in memory.nodes}
    ran = [nodes[tag & ((1 << 24) - 1)][3] for tag, *_ in memory.records if not tag & FLAG_AMOUNTS]
    assert ran.count("forward") == 2


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_waits_for_no_lock_of_its_parents(profiler: BrickProfiler) -> None:
    model, x = Stack(), torch.ones(1, 4)
    attach(model, profiler)
    swaps.lock.acquire()  # Another thread may hold this lock at the time of a fork. The child must not wait for it.
    child = os.fork()
    if child == 0:
        model(x)
        os._exit(0)
    swaps.lock.release()
    assert os.waitpid(child, 0)[1] == 0


def passes(given: Any = None, *, also: Any = None) -> Any:
    """Return the argument, or raise it if it is an exception."""
    if isinstance(given, BaseException):
        raise given
    return given if also is None else also


class Passes(nn.Module):
    """A module that returns its argument, or raises it if it is an exception."""

    def forward(self, given: Any = None, *, also: Any = None) -> Any:
        return passes(given, also=also)

    def method(self, given: Any = None, *, also: Any = None) -> Any:
        """Return the argument, or raise it if it is an exception."""
        return passes(given, also=also)


BRICK = BrickDefinition("Brick", BrickCategory.OTHER)


@pytest.fixture(params=["python", "compiled"])
def timer(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, memory: Memory) -> Iterator[BrickProfiler]:
    """Yield a profiler with the hot path in Python or in C. The profiler belongs to the only model in the process."""
    gc.collect()
    # Freeze the objects of earlier tests. Otherwise the collector needs 30 ms each time to search the objects of
    # Dynamo.
    gc.freeze()
    if request.param == "python":
        monkeypatch.setenv("CBTOP_PURE_PYTHON", "1")
    elif chosen() is HotPath:
        pytest.skip("the compiled hot path was not built, or not chosen")
    yield BrickProfiler(recorder=memory)
    uninstall()


def _fails(error: Exception | None = None) -> None:
    raise AssertionError(error)


@pytest.fixture(params=["module", "function", "known by its arguments", "method"])
def timed(request: pytest.FixtureRequest, timer: BrickProfiler) -> Iterator[Callable[..., Any]]:
    """Yield a function that runs as a brick in a step."""
    steps, module = ModelSteps(timer, "", _fails, _fails), Passes()
    steps.calls = [BrickCall(module, BRICK, steps)]
    stand_by()
    steps.follow("a step")  # type: ignore[arg-type]  # any will do
    if request.param == "module":
        yield module
    elif request.param == "function":
        yield timed_function(passes, "Brick", BRICK)
    elif request.param == "method":
        functions = TimedFunctions()
        functions.replace(Passes, "method", lambda original: timed_function(original, "Brick", BRICK, first=1))
        yield module.method
        functions.unwrap()
    else:
        yield timed_function(passes, "Brick", brick_of=lambda args, kwargs: (BRICK, elements_of(args, kwargs)))
    steps.remove()
    end()


def test_a_timed_call_gives_what_is_called_gives_and_counts_the_first_tensor(
    timed: Callable[..., Any], timer: BrickProfiler, memory: Memory
) -> None:
    x, parameter, odd = torch.ones(2, 3), nn.Parameter(torch.ones(5)), object()
    assert timed(x) is x
    assert not memory.records  # The call was outside a step, so it is not recorded.
    with timer.step("decode"):
        assert timed(x) is x
        assert timed(also=x) is x
        assert timed(parameter) is parameter
        assert timed(odd, also=parameter) is parameter
        assert timed() is None
    assert [elements for *_, elements in memory.records][:-1] == [6, 6, 5, 5, 0]
    assert _timed(memory) == {"decode": 1, "decode/Brick": 5}


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt, SystemExit, StopIteration])
def test_what_a_timed_call_raises_reaches_the_host_and_is_recorded_as_failed(
    kind: type[BaseException], timed: Callable[..., Any], timer: BrickProfiler, memory: Memory
) -> None:
    error = kind("of the host")
    with timer.step("decode"):
        with pytest.raises(kind) as raised:
            timed(error)
        assert raised.value is error
        with pytest.raises(TypeError, match="unexpected"):
            timed(unknown=1)
        timed(torch.ones(1))
    failed = (
        [True] if isinstance(timed, types.MethodType) else [True, True]
    )  # A bound method that gets a wrong argument fails before its code begins, so this call is not recorded.
    assert [bool(tag & FLAG_FAILED) for tag, *_ in memory.records] == [*failed, False, False]


class Logged(nn.Module):
    """A module that logs each read of its call, and accepts any arguments."""

    def __getattribute__(self, name: str) -> Any:
        if name == "_call_impl":
            self.__dict__["is_asked"] = True
        return super().__getattribute__(name)

    def forward(self, *given: Any) -> Any:
        return given[-1]


def test_what_the_host_lets_a_modules_call_be_is_called_in_recorded_steps(
    timer: BrickProfiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps, module, other, logged = ModelSteps(timer, "", _fails, _fails), Passes(), Passes(), Logged()
    steps.calls = [BrickCall(one, BRICK, steps) for one in (module, other, logged)]
    stand_by()
    steps.follow("a step")  # type: ignore[arg-type]  # any will do
    x = torch.ones(1)
    with timer.step("decode"):
        assert module(x) is other(x) is logged(x) is x
        assert logged.is_asked
        vars(module)["_call_impl"] = lambda given: "of the module"
        assert module(x) == "of the module"
        assert other(x) is x
        monkeypatch.setattr(Passes, "_call_impl", lambda self, given: (self, "of its class"), raising=False)
        assert other(x) == (other, "of its class")
        monkeypatch.undo()
        assert other(x) is x
        assert logged(*[None] * 8, x) is x
        del vars(module)["_call_impl"]
        assert module(x) is x
    steps.remove()


def test_a_timed_call_keeps_nothing(timed: Callable[..., Any], timer: BrickProfiler) -> None:
    x, error = torch.ones(2), ValueError("of the host")
    held = (x, error, timed, BRICK, timer, timer.parts.paths.own, elements_of, passes)

    def use() -> None:
        timed(x)
        with timer.step("decode"):
            for _ in range(100):
                timed(x)
                timed(also=x)
                with pytest.raises(ValueError, match="of the host"):
                    timed(error)
                error.__traceback__ = None

    use()
    gc.collect()
    before = [sys.getrefcount(each) for each in held]
    use()
    gc.collect()
    after = [sys.getrefcount(each) for each in held]
    assert [abs(now - count) < 10 for now, count in zip(after, before, strict=True)] == [True] * len(held)


def test_a_tensor_that_cannot_be_counted_is_timed_and_given_back(
    timed: Callable[..., Any], timer: BrickProfiler, memory: Memory
) -> None:
    class Fails(torch.Tensor):
        def numel(self) -> int:
            raise ValueError("of a tensor")

    x = torch.ones(2).as_subclass(Fails)
    with timer.step("decode"):
        assert timed(x) is x
    assert _timed(memory) == {"decode": 1, "decode/Brick": 1}


class Counts(torch.overrides.TorchFunctionMode):
    """A mode that counts torch's functions by name, as profilers of memory and FLOP do."""

    def __init__(self) -> None:
        super().__init__()
        self.called: Counter[str] = Counter()

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.called[function.__name__] += 1
        return function(*args, **kwargs or {})


class CountingTensor(torch.Tensor):
    called: ClassVar[Counter[str]] = Counter()

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.called[function.__name__] += 1
        return super().__torch_function__(function, types, args, kwargs or {})


def test_what_counts_torchs_functions_does_not_see_ours(
    timed: Callable[..., Any], timer: BrickProfiler, memory: Memory
) -> None:
    x = torch.ones(2, 3)
    odd = x.as_subclass(CountingTensor)
    CountingTensor.called.clear()
    with timer.step("decode"), Counts() as counts:
        timed(x)
        timed(odd)
        timed(also=odd)
    assert not counts.called + CountingTensor.called
    assert [elements for *_, elements in memory.records][:-1] == [6, 6, 6]


@pytest.mark.parametrize("how", [pytest.param("attached", marks=pytest.mark.slow), "installed"])
def test_what_counts_torchs_functions_counts_those_of_the_bare_model(how: str, profiler: BrickProfiler) -> None:
    model, inputs = model_of("llama"), words(1, 5)

    def use() -> Counter[str]:
        with Counts() as counts:
            for _ in range(LOOK_EVERY):
                model(inputs)
            model.generate(inputs, max_new_tokens=3, do_sample=False)
        return counts.called

    bare = use()
    if how == "attached":
        attach(model, profiler)
    else:
        install(profiler)
    found = [use(), use()]
    assert found == [bare, bare]


def test_symbolic_traces_add_no_guards_and_are_not_recorded(profiler: BrickProfiler, memory: Memory) -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    model, x, other = Stack().eval(), torch.ones(2, 7, 4), torch.ones(2, 5, 4)

    def trace() -> Any:
        return make_fx(lambda x: model(x), tracing_mode="symbolic", _allow_non_fake_inputs=True)(x)

    bare = trace().shape_env.guards
    install(profiler)
    for _ in range(2):
        traced = trace()
        assert [guard.expr for guard in traced.shape_env.guards] == [guard.expr for guard in bare]
        assert torch.equal(traced(other), Stack.forward(model, other))
        recorded = _timed(memory)["forward"]
        model(x)
    assert recorded == 1


def test_a_size_that_is_a_symbol_is_no_number_of_elements(
    timed: Callable[..., Any], timer: BrickProfiler, memory: Memory
) -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    def call(x: Any) -> Any:
        with timer.step("decode"):
            return timed(x)

    assert not make_fx(call, tracing_mode="symbolic")(torch.ones(2, 7)).shape_env.guards
    assert _timed(memory) == {"decode": 1, "decode/Brick": 1}


def test_what_is_no_tensor_is_not_asked_what_class_it_has(
    timed: Callable[..., Any], timer: BrickProfiler, memory: Memory
) -> None:
    asked: list[str] = []

    class Config:
        def __getattribute__(self, name: str) -> Any:
            asked.append(name)
            return super().__getattribute__(name)

    # Call the function outside a step first, to find the attributes that the function itself reads.
    timed(Config(), also=torch.ones(2, 3))
    without_us = list(asked)
    with timer.step("decode"):
        timed(Config(), also=torch.ones(2, 3))
    assert [elements for *_, elements in memory.records][:-1] == [6]
    assert asked == 2 * without_us


@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_a_wrapped_function_looks_as_it_did(again: Callable[[Any], Any]) -> None:
    functions, here = TimedFunctions(), sys.modules[__name__]
    bare, code, looks = passes, passes.__code__, (inspect.signature(passes), inspect.getsource(passes))
    functions.replace(here, "passes", lambda original: timed_function(original, "Brick", BRICK))
    try:
        assert passes is bare
        assert passes.__code__ is not code
        assert (inspect.signature(passes), inspect.getsource(passes)) == looks
        assert again(passes) is passes
    finally:
        functions.unwrap()
    assert passes.__code__ is code


def test_a_replacement_of_a_function_by_the_host_is_timed_for_the_next_model() -> None:
    functions, home = TimedFunctions(), types.SimpleNamespace(attend=passes)
    code = passes.__code__

    def wrap() -> Any:
        functions.replace(home, "attend", lambda original: timed_function(original, "Brick", BRICK))
        return home.attend.__code__

    def own(x: Any) -> Any:
        return x

    own_code = own.__code__
    first = wrap()
    assert wrap() is first is not code
    home.attend = own
    assert wrap() is not own_code
    functions.unwrap()
    assert (home.attend, own.__code__, passes.__code__) == (own, own_code, code)


@pytest.mark.skipif(chosen() is HotPath, reason="the compiled hot path was not built, or not chosen")
def test_where_nothing_is_recorded_a_wrapped_function_runs_no_frame_of_ours() -> None:
    wrapped, frames = timed_function(passes, "Brick", BRICK), []
    sys.setprofile(lambda frame, event, arg: frames.append(frame.f_code.co_name) if event == "call" else None)
    try:
        found = list(map(wrapped, [1, 2]))
    finally:
        sys.setprofile(None)
    assert found == [1, 2]
    assert frames == ["passes", "passes"]


def test_shared_functions_are_timed_by_the_profiler_of_the_calling_model() -> None:
    # Forget compiled code, because functions stay unchanged in a process that has compiled something.
    forget_compiled()
    memories, models, x = [Memory(), Memory()], [Decoder(), Decoder()], torch.ones(1, 3, 8)
    attached = [attach(model, BrickProfiler(recorder=memory)) for model, memory in zip(models, memories, strict=True)]
    for model in (*models, *models, models[0]):
        model(x)  # From the second call on, both models are timed through replaced calls.
    for memory, steps in zip(memories, (3, 2), strict=True):
        found = _timed(memory)
        assert [found[f"forward/{layer}/Attention (fused) sdpa"] for layer in "01"] == [steps, steps]
        assert found["forward"] == steps
    for attachment in attached:
        attachment.detach()


def test_dynamo_looks_into_a_timed_call_and_breaks_nothing(timed: Callable[..., Any], timer: BrickProfiler) -> None:
    forget_compiled()
    keep_dynamo_out()  # attaching does this
    called = timed.__call__ if isinstance(timed, nn.Module) else timed
    compiled = torch.compile(called, backend="eager", fullgraph=True)
    x = torch.ones(2)
    with timer.step("decode"):
        assert torch.equal(compiled(x), x)
