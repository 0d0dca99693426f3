"""Times the layers and bricks of llama.cpp, through its callback for each node of a graph (`cb_eval`).

    function, user_data = llama_cpp.callback(BrickProfiler(sample_every=32))

Both results are addresses, for `cb_eval` and `cb_eval_user_data` in the parameters of one context.

Rules
- One step in `sample_every` is recorded. In other steps the callback declines all nodes, and ggml computes the whole
  graph at once.
- A recorded step is slower, because ggml computes the nodes one by one and waits for each. Otherwise it may run
  several nodes at once, fuse nodes, or replay a device's graph. The backend of the bricks says so.
- A step is one graph. A batch longer than `n_ubatch` has several graphs. The other work of llama_decode and the
  choice of a token are not part of the step.
- The tokens that give logits decide the phase. All: decode, even for a prompt with logits for all tokens. Some:
  prefill. None: encode.
- A node's name and operation decide its brick. A node that no rule matches becomes a brick with the name of its
  operation. FLOP and bytes are unknown, because the callback sees no weights.
- Each context needs its own callback. A forked child records nothing of llama.cpp.
"""

from __future__ import annotations

import _thread
import atexit
import ctypes
import functools
import inspect
import logging
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from cbtop.profiler.definitions import BrickDefinition
from cbtop.profiler.held_steps import Part
from cbtop.profiler.instrument.classification import (
    ATTENTION_FUSED,
    GATE_UP_PROJECTION,
    KV_WRITE,
    MIXER,
    MOE_EXPERTS,
    MOE_ROUTER,
    ModuleKind,
)
from cbtop.profiler.profiler import BrickProfiler
from cbtop.protocol.vocabulary import BrickId, NodeKind

Node = tuple[str, str, int, int, int]  # a node of a graph: name, operation, elements, start in ns, end in ns
# A computed graph: number, start in ns, tokens, outputs (-1: unknown), nodes.
Graph = tuple[int, int, int, int, list[Node]]

_log = logging.getLogger("cbtop")
BACKEND = "ggml, one node at a time"
PREFILL, DECODE, ENCODE = "prefill", "decode", "encode"
_FUNCTIONS = ("ggml_get_name", "ggml_op_desc", "ggml_nelements", "ggml_nrows")
# llama.cpp has the addresses of these callbacks, so they stay alive as long as the process.
_callbacks: list[_Callback] = []


def callback(profiler: BrickProfiler) -> tuple[int, int]:
    """Return the addresses of a function and of its user data, for `cb_eval` and `cb_eval_user_data` of one context.

    Raises ValueError if llama.cpp is not loaded, if this part of cbtop was not compiled, or if threads are greenlets.
    """
    made = _Callback(profiler)
    _callbacks.append(made)
    return made.function, made.user_data


class _Callback:
    def __init__(self, profiler: BrickProfiler) -> None:
        try:
            from cbtop.profiler import _llama_cpp as compiled
        except ImportError as error:
            raise ValueError(f"cbtop was installed without its compiled part for llama.cpp: {error}") from error
        # A greenlet that waits for a graph would stop all others.
        if not inspect.isbuiltin(_thread.start_new_thread):
            raise ValueError("threads are greenlets here: llama.cpp's steps could not be handed over")
        name_of, operation_of, elements_of, rows_of = ggml_functions()
        self._compiled = compiled
        self._steps = profiler.parts.steps
        self._wake = os.eventfd(0, os.EFD_CLOEXEC)
        self._parts = GraphParts()
        self._lost = 0
        self.function, self.user_data = compiled.create(
            name_of, operation_of, elements_of, rows_of, profiler.sample_every, self._wake
        )
        self._steps.show()  # announcing opens the ring, so `_finish` runs before the ring is closed at exit
        atexit.register(self._finish)
        os.register_at_fork(after_in_child=self._stop)
        _thread.start_new_thread(self._run, ())

    def _run(self) -> None:
        """Wait for stored graphs and record them. This runs in cbtop's own thread, so that the computing thread does
        not wait.
        """
        try:
            while True:
                os.read(self._wake, 8)
                self._hand_over()
        except Exception as error:  # noqa: BLE001 - signal handlers raise only in the main thread
            self._stop()
            _log.warning("cbtop: llama.cpp is no longer shown: %s: %s", type(error).__name__, error)

    def _stop(self) -> None:
        self._compiled.stop(self.user_data)

    def _finish(self) -> None:
        self._stop()
        self._hand_over()

    def _hand_over(self) -> None:
        lost, graphs = self._compiled.take(self.user_data)
        self._lost += lost
        for graph in sorted(graphs):
            lost, self._lost = self._lost, 0
            self._record(graph, lost)

    def _record(self, graph: Graph, lost: int) -> None:
        _, start_ns, tokens, outputs, nodes = graph
        phase = {-1: ENCODE, tokens: DECODE}.get(outputs, PREFILL)
        bricks = bricks_of(nodes)
        if bricks:
            self._steps.record(phase, tokens, start_ns, bricks[-1].end_ns, self._parts.of(bricks), lost=lost)


class GraphParts:
    """Makes the parts of a step from the bricks of its graph, with one definition for each brick."""

    def __init__(self) -> None:
        self._definitions: dict[tuple[str, str], BrickDefinition] = {}

    def of(self, bricks: list[BrickNodes]) -> Iterator[Part]:
        """Return each brick, and each layer after its last brick."""
        for at, brick in enumerate(bricks):
            layer = () if brick.layer is None else ((NodeKind.LAYER, brick.layer),)
            yield (*layer, self._definition(brick)), brick.start_ns, brick.end_ns, brick.elements
            if layer and (at + 1 == len(bricks) or bricks[at + 1].layer != brick.layer):
                first = at
                while first and bricks[first - 1].layer == brick.layer:
                    first -= 1
                yield layer, bricks[first].start_ns, brick.end_ns, brick.elements

    def _definition(self, brick: BrickNodes) -> BrickDefinition:
        key = brick.kind.name, brick.label
        found = self._definitions.get(key)
        if found is None:
            known = brick.kind.brick if isinstance(brick.kind.brick, BrickId) else None
            found = self._definitions[key] = BrickDefinition(
                brick.kind.name, brick.kind.category, known, backend=BACKEND, label=brick.label
            )
        return found


def ggml_functions() -> list[int]:
    """Return the addresses of the functions of ggml in `_FUNCTIONS`. They all come from one loaded library.

    Raises ValueError if no such library is loaded.
    """
    mapped = {line.split(maxsplit=5)[-1].strip() for line in Path("/proc/self/maps").read_text().splitlines()}
    for path in sorted(path for path in mapped if ".so" in path):
        try:
            library = ctypes.CDLL(path, mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
            return [ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0 for name in _FUNCTIONS]
        # This library is mapped but cannot be loaded, or it does not have the function.
        except (OSError, AttributeError):
            continue
    raise ValueError("no library with ggml's functions is loaded: import llama.cpp's binding first")


# --- bricks of nodes ------------------------------------------------------------------------------------------


@dataclass(slots=True)
class BrickNodes:
    """Consecutive nodes of a graph that belong to one brick. `elements` is the size of the first node's result."""

    kind: ModuleKind
    layer: int | None
    label: str
    start_ns: int
    end_ns: int
    elements: int


_NORMS = (BrickId.RMS_NORM, BrickId.LAYER_NORM)
_ATTENTION = (ATTENTION_FUSED, BrickId.ATTENTION_OUTPUT)
_MANY = (
    KV_WRITE,
    ATTENTION_FUSED,
    BrickId.ATTENTION_SOFTMAX,
    BrickId.ATTENTION_OUTPUT,
    MOE_ROUTER,
    MOE_EXPERTS,
    MIXER,
)
_ADDS = r"MUL_MAT|ADD"  # operations of a node that multiplies, or adds a bias to a product
# A rule has the name of a node (without its layer), its operation, and the brick. The first matching rule decides.
_RULES = tuple(
    (re.compile(name), re.compile(operation), ModuleKind(brick))
    for name, operation, brick in (
        (r".*", r"RMS_NORM", BrickId.RMS_NORM),
        (r".*", r"NORM", BrickId.LAYER_NORM),
        (r"embd|inp_embd|(inp_)?pos_embd", r"GET_ROWS", BrickId.EMBEDDING),
        (r"result_output.*", r"MUL_MAT", BrickId.LM_HEAD),
        (r".*", r"ROPE", BrickId.ROPE_EMBEDDING),
        (r"cache_.*|[kv]_cache.*", r"SET_ROWS|CPY", KV_WRITE),
        (r".*", r"FLASH_ATTN_EXT", ATTENTION_FUSED),
        (r"kq", r"MUL_MAT", BrickId.ATTENTION_SCORE),
        (r"kq(_.*)?", r"SOFT_MAX|ADD|SCALE|TANH", BrickId.ATTENTION_SOFTMAX),
        (r"kqv(_out|_merged.*)?", r"MUL_MAT|CONT", BrickId.ATTENTION_OUTPUT),
        (r"(Q|K|V|QKV)cur|w?qkv(_b)?|q|k|v|kv_cmpr(_pe)?", _ADDS, BrickId.QKV_PROJECTION),
        (r"attn_out(put)?|kqv_wo", _ADDS, BrickId.OUTPUT_PROJECTION),
        (r"ffn_gate_inp|ffn_moe_(logits|probs|selection|group|topk|argsort|weights).*", r".*", MOE_ROUTER),
        (r"ffn_moe_.*", r".*", MOE_EXPERTS),
        (r".*", r"MUL_MAT_ID", MOE_EXPERTS),
        (r"ffn_gate_up|ffn_up_gate", _ADDS, GATE_UP_PROJECTION),
        (r"ffn_gate(_b|_sh.*)?", _ADDS, BrickId.GATE_PROJECTION),
        (r"ffn_up(_b|_sh.*)?", _ADDS, BrickId.UP_PROJECTION),
        (r"ffn_(out|down)(_b|_sh.*)?", _ADDS, BrickId.DOWN_PROJECTION),
        (r".*", r"(SWI|GE|RE)GLU(_.*)?|SILU|GELU(_.*)?|RELU", BrickId.ACTIVATION),
        (r"ffn_gate_par", r"MUL", BrickId.ACTIVATION),
        (r".*", r"SSM_.*|RWKV_.*|GATED_LINEAR_ATTN|GATED_DELTA_NET", MIXER),
    )
)
_NAME = re.compile(r"(?P<name>.*?)(-(?P<layer>\d+)|_l(?P<cached>\d+))?( \([^()]*\))*")
MAX_NAMES = 8192  # maximum number of names that are stored
_NO_NAME = re.compile(r"(node|leaf)_\d+|")


def bricks_of(nodes: list[Node]) -> list[BrickNodes]:
    """Return the bricks of a computed graph, in the order of execution."""
    bricks: list[BrickNodes] = []
    for full_name, operation, elements, start_ns, end_ns in nodes:
        last = bricks[-1] if bricks else None
        name, layer = _place(full_name)
        if not name and last is not None:  # a node without a name is in the same layer as the node before it
            layer = last.layer
        kind = _kind(name, operation, last if last and last.layer == layer else None)
        if last is not None and last.layer == layer and _goes_on(last, kind, name, operation):
            last.end_ns = end_ns
            last.label = _label(kind, name) or last.label
        else:
            bricks.append(BrickNodes(kind, layer, _label(kind, name), start_ns, end_ns, elements))
    return bricks


@functools.lru_cache(maxsize=MAX_NAMES)
def _place(full_name: str) -> tuple[str, int | None]:
    """Return the name of a node without its layer, or "", and the number of the layer, or None."""
    found = _NAME.fullmatch(full_name)
    if found is None or _NO_NAME.fullmatch(found["name"]):
        return "", None
    number = found["layer"] or found["cached"]
    return found["name"], None if number is None else int(number)


def _kind(name: str, operation: str, last: BrickNodes | None) -> ModuleKind:
    before = None if last is None else last.kind
    if before is not None and before.brick in _NORMS and "norm" in name and operation in ("MUL", "ADD"):
        return before  # the node applies a norm's weight or bias
    if before is not None and before.brick in _ATTENTION and not name and operation == "MUL_MAT":
        return ModuleKind(BrickId.OUTPUT_PROJECTION)  # llama.cpp gives no name to this product
    return _by_rule(name, operation)


@functools.lru_cache(maxsize=MAX_NAMES)
def _by_rule(name: str, operation: str) -> ModuleKind:
    for matches, computes, kind in _RULES:
        if matches.fullmatch(name) and computes.fullmatch(operation):
            return kind
    return ModuleKind(operation)


def _goes_on(last: BrickNodes, kind: ModuleKind, name: str, operation: str) -> bool:
    """Return whether the next node, with this name and operation, belongs to the brick `last`."""
    if last.kind.name != kind.name or operation.endswith("NORM"):
        return False
    return kind.brick in (*_NORMS, *_MANY) or last.label == name


def _label(kind: ModuleKind, name: str) -> str:
    return "" if kind.brick in _MANY else name
