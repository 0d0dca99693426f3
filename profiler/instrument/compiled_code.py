"""Maps each kernel that inductor's generated code launches to the modules of a model.

Rules
- Dynamo stores the modules and functions around each node of its graph. cbtop reads them when inductor gets the
  graph. In the generated code, a comment above each launch names the nodes (`Source Nodes`), also in code from
  inductor's cache. cbtop changes no setting of torch and adds no compiler pass.
- While a CUDA graph is captured, cbtop traces the capturing thread. So it sees which line of generated code captures
  which nodes. If the host already traces this thread (debuggers, some coverage tools), the kernels get no names.
- Adjacent kernels of the same modules are one brick. A kernel of several modules is a brick with all their names:
  "Fused: ResidualAdd, RmsNorm".
- A layer lasts from its first kernel to its last. A kernel that is fused from several layers, or that inductor has
  moved, belongs to the layer during which it runs, if any.
"""

from __future__ import annotations

import functools
import io
import math
import re
import sys
from _thread import get_ident
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from cbtop.profiler.definitions import BrickDefinition
from cbtop.profiler.instrument.awaited import once_imported, stop_awaiting
from cbtop.profiler.instrument.capturing import Capture, CapturedCall, Last, captures
from cbtop.profiler.instrument.classification import RESIDUAL_ADD
from cbtop.profiler.instrument.functions import brick_of_function, brick_of_name
from cbtop.profiler.instrument.kernel_makers import SOURCE_NODES, generated_code
from cbtop.profiler.instrument.module_tree import modules_by_path
from cbtop.profiler.instrument.open_step import unit
from cbtop.profiler.instrument.torch_internals import without_torch_function
from cbtop.profiler.instrument.trouble import log_once, log_own_error
from cbtop.protocol.vocabulary import BrickCategory

if TYPE_CHECKING:
    from torch import nn

    from cbtop.profiler.instrument.wrapping import BrickCall

COMPILER = "torch._inductor.compile_fx"
MAX_FILES = 256  # at most this many files of generated code are stored
MAX_NAME_CHARS = 200

# A line that launches a generated loop. Matrix products run in templates (`triton_tem_…`) or in other libraries
# (`extern_kernels.mm`) instead.
_LOOPS = re.compile(r"\s*triton_(?!tem_)\w+\.run\(")
_FRAME = re.compile(r'File "(?:[^"]*[/\\])?([^"/\\]+?)(?:\.py)?", line \d+, in (\w+)')
_MODULE = re.compile(r"[LG]\['\w+'\]")  # Dynamo's name for the module that is compiled
_MATMULS = ("linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "einsum", "_grouped_mm", "conv1d", "conv2d")
_PRODUCTS = {*_MATMULS, "scaled_dot_product_attention", "flex_attention"}
_ADDS = ("add", "iadd", "add_", "__add__", "__iadd__")


# --- Dynamo's graph ------------------------------------------------------------------------------------------------


class NodeOrigin(NamedTuple):
    """The modules and functions that a node of Dynamo's graph comes from (its origin)."""

    modules: tuple[str, ...]  # the paths of the modules around the node, outermost first
    functions: tuple[str, ...]  # the functions around the node, innermost first, as `file.function`
    operation: str


@dataclass(slots=True)
class GraphOrigins:
    """The origins (modules and functions) of all nodes in a graph of Dynamo. Paths begin at the compiled module,
    which has the path "".
    """

    origins: dict[str, NodeOrigin] = field(default_factory=dict)  # name of a node -> its origin
    classes: dict[str, str] = field(default_factory=dict)  # path of a module -> the name of its class
    # path of a module -> number of elements of its first node's tensor
    elements: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, graph: Any) -> GraphOrigins:
        """Read a `torch.fx.Graph`."""
        found = cls()
        known: dict[tuple[Any, ...], tuple[Any, ...]] = {}  # a module has many nodes, so store equal tuples once
        for node in graph.nodes:
            if node.op not in ("call_function", "call_method"):
                continue
            told = tuple((node.meta.get("nn_module_stack") or {}).values())
            paths = known.get(told)
            if paths is None:
                inside = [(_relative(path), kind) for path, kind in told]
                found.classes |= {path: _name_of(kind) for path, kind in inside if path is not None}
                paths = known[told] = tuple(path for path, _ in inside if path is not None)
            for path in paths:
                if path not in found.elements:
                    found.elements[path] = _elements(node)
            called = _FRAME.findall(node.meta.get("stack_trace") or "")
            functions = tuple(".".join(frame) for frame in reversed(called))
            found.origins[node.name] = NodeOrigin(
                paths, known.setdefault(functions, functions), _name_of(node.target)
            )
        return found

    def under_names_of(self, other: GraphOrigins) -> GraphOrigins:
        """Return these origins with other node names: those of `other`, a graph that differs only in names."""
        same = len(self.origins) == len(other.origins)
        origins = dict(zip(other.origins, self.origins.values(), strict=True)) if same else {}
        return GraphOrigins(origins, self.classes, self.elements)

    def modules_of(self, nodes: Sequence[str]) -> list[str]:
        """Return the path of the innermost module around each of the `nodes`. Leaves out nodes outside of modules."""
        origins = [origin for origin in map(self.origins.get, nodes) if origin is not None]
        return [origin.modules[-1] for origin in origins if origin.modules and origin.modules[-1]]


def _relative(path: str) -> str | None:
    """Convert Dynamo's `path` of a module to a path inside the compiled module. Returns None if it is unknown."""
    begin = _MODULE.match(path)
    if begin is None:
        return None
    rest = path[begin.end() :].replace("._modules", "")
    return re.sub(r"\['?(\w+)'?\]", r".\1", rest).removeprefix(".")


def _name_of(target: Any) -> str:
    return target if isinstance(target, str) else str(getattr(target, "__name__", target))


def _elements(node: Any) -> int:
    """Return the number of elements of a node's first tensor, or 0 if unknown.

    If one dimension varies, it is taken for the number of tokens. The result is then minus the number of elements per
    token.
    """
    for argument in node.args:
        value = getattr(argument, "meta", {}).get("example_value")
        if isinstance(value, torch.Tensor):
            fixed = [size for size in value.shape if isinstance(size, int)]
            varying = value.dim() - len(fixed)
            return (math.prod(fixed), -math.prod(fixed))[varying] if varying < 2 else 0
    return 0


# --- graphs of inductor -----------------------------------------------------------------------------------------

# File of generated code -> the origins of each graph that runs it, in the order of the runs in a call of the model.
_compiled: dict[str, list[GraphOrigins]] = {}
_original: list[tuple[Any, Callable[..., Any], Callable[..., Any]]] = []  # (module, its compile_fx, the replacement)
_compiling: set[int] = set()  # ids of threads that are compiling


def follow() -> None:
    """Store the origins of all graphs that inductor compiles from now on."""
    once_imported(COMPILER, _replace)


def follow_no_more() -> None:
    """Stop storing origins, and forget all graphs.

    Restores inductor's original function unless the host has replaced it in the meantime.
    """
    stop_awaiting(COMPILER)
    for module, original, replaced in _original:
        if module.compile_fx is replaced:
            module.compile_fx = original
    _original.clear()
    _compiled.clear()
    generated_code.clear()


def _replace() -> None:
    compiler: Any = sys.modules[COMPILER]
    cache = getattr(sys.modules.get("torch._inductor.codecache"), "PyCodeCache", None)
    if _original:
        return
    if not (hasattr(compiler, "compile_fx") and isinstance(getattr(cache, "modules", None), list)):
        log_once(f"inductor of torch {torch.__version__} does not tell what it compiles: its kernels are not named")
        return
    replaced = _followed(compiler.compile_fx)
    _original.append((compiler, compiler.compile_fx, replaced))
    compiler.compile_fx = replaced


def _followed(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def compile_fx(*args: Any, **kwargs: Any) -> Any:
        thread = get_ident()
        if thread in _compiling:  # compile_fx calls itself, so ignore the inner calls
            return original(*args, **kwargs)
        found, loaded = None, 0
        _compiling.add(thread)
        try:
            try:
                with without_torch_function():  # hides cbtop's calls from the host's `__torch_function__`
                    found = GraphOrigins.of((args[0] if args else kwargs["model_"]).graph)
                loaded = len(_loaded())
            except Exception as error:  # noqa: BLE001 - an error of cbtop must not reach the host
                log_own_error(error, "kernels of compiled code are not named")
            result = original(*args, **kwargs)
        finally:
            _compiling.discard(thread)
        if found is not None:
            try:
                _note(found, [module.__file__ for module in _loaded()[loaded:]])
            except Exception as error:  # noqa: BLE001 - an error of cbtop must not reach the host
                log_own_error(error, "kernels of compiled code are not named")
        return result

    return compile_fx


class Pieces:
    """Finds the modules of kernels if an engine compiles a model in pieces.

    The engine compiles only the first of several equal pieces, and runs its code for all of them.
    """

    def __init__(self) -> None:
        self._files: dict[int, list[str]] = {}  # id of a compiled piece -> its files of generated code
        self._kept: list[Any] = []  # the compiled pieces are kept alive, so that no later piece gets the same id

    def compiled(self, compile_piece: Callable[[], Any], piece: Any) -> Any:
        """Call `compile_piece`, which compiles the graph module `piece`, and return its result."""
        loaded = len(_loaded()) if _original else 0
        result = compile_piece()
        if _original:
            try:
                files = [module.__file__ for module in _loaded()[loaded:]]
                if files:
                    self._files[id(result)] = files
                    self._kept.append(result)
                else:
                    found = GraphOrigins.of(piece.graph)
                    for file in self._files.get(id(result), ()):
                        _compiled[file].append(found.under_names_of(_compiled[file][0]))
                        generated_code.pop(file, None)  # each piece that runs this code has other modules
            except Exception as error:  # noqa: BLE001 - an error of cbtop must not reach the host
                log_own_error(error, "kernels of compiled code are not named")
        return result


def _loaded() -> list[Any]:
    """Return the Python modules of the code that inductor has generated, in the order of loading."""
    cache: Any = sys.modules["torch._inductor.codecache"]
    modules: list[Any] = cache.PyCodeCache.modules
    return modules


def _note(found: GraphOrigins, files: Iterable[str]) -> None:
    for file in files:
        _compiled.pop(file, None)
        _compiled[file] = [found]
        generated_code[file] = found.modules_of
    while len(_compiled) > MAX_FILES:
        oldest = next(iter(_compiled))
        del _compiled[oldest]
        generated_code.pop(oldest, None)


# --- generated code during a capture -------------------------------------------------------------------------------


class Ran(NamedTuple):
    """A line of generated code that ran during a capture.

    `begin` are the last captured nodes before the line ran, and `end` the last ones after it.
    """

    file: str
    line: int
    begin: Last
    end: Last


def watch(capture: Capture) -> None:
    """Trace the Python code of the calling thread until `capture` ends.

    Does nothing if inductor has generated no code.
    """
    if _compiled:
        seen = Watch(capture)
        capture.ended = seen.end
        seen.begin()


class Watch:
    """Traces the calling thread from `begin` to `end`, to find the lines of generated code that capture nodes."""

    def __init__(self, capture: Capture) -> None:
        self._capture = capture
        self._ran: list[Ran] = []
        self._at = ("", 0)  # the file and number of the line that runs
        self._last: Last = None
        self._depth = 0  # number of calls of generated code that have not ended
        self._runs: Counter[str] = Counter()  # file of generated code -> how often it has run
        self._model: CapturedCall | None = None  # the call of a model that was running when the capture began

    def begin(self) -> None:
        if sys.gettrace() is None:
            sys.settrace(self._called)
        else:
            log_once(
                "kernels of compiled code are not named: a debugger or the like traces the thread that captures them"
            )

    def end(self) -> None:
        if sys.gettrace() == self._called:
            sys.settrace(None)

    def _called(self, frame: FrameType, event: str, argument: object) -> Callable[..., Any] | None:
        """The traced thread has called a function."""
        if captures.get(get_ident()) is not self._capture:  # the capture is over, so stop tracing
            sys.settrace(None)
            return None
        if frame.f_code.co_filename not in _compiled:
            return None
        try:
            if not self._depth:
                self._begin()
        except Exception as error:  # noqa: BLE001 - an error of cbtop must not reach the host
            self._capture.failed(error)
            self.end()
            return None
        self._depth += 1
        return self._stepped

    def _stepped(self, frame: FrameType, event: str, argument: object) -> Callable[..., Any] | None:
        """The traced thread begins a line of generated code, or returns from its function."""
        try:
            last = self._capture.last()
            if last != self._last:
                self._ran.append(Ran(*self._at, self._last, last))
                self._last = last
            self._at = (frame.f_code.co_filename, frame.f_lineno)
            if event == "return":
                self._depth -= 1
                if not self._depth:
                    self._end()
        except Exception as error:  # noqa: BLE001 - an error of cbtop must not reach the host
            self._capture.failed(error)
            self.end()
            return None
        return self._stepped

    def _begin(self) -> None:
        capture = self._capture
        if capture.steps is None:
            here = unit().open
            if here and here[-1].is_running:
                self._model = capture.begin_model(here[-1].steps, here[-1].call)
                if self._model is not None:
                    self._model.own = None  # kernels of compiled code may compute any module of the model
        self._last = capture.last()
        self._ran.clear()

    def _end(self) -> None:
        capture = self._capture
        if capture.steps is not None:
            root = capture.steps.root()
            for file, ran in groupby(self._ran, key=lambda one: one.file):
                with io.open(file, encoding="utf-8") as text:
                    lines = text.read().splitlines()
                origins = _compiled[file]
                found = origins[self._runs[file] % len(origins)]
                self._runs[file] += 1
                naming = Naming(found, capture.steps.named, root, [span.module for span in capture.open])
                around = {span.key for span in capture.open}
                capture.add(spans_of(list(ran), lines, naming, around, capture.calls[0].tokens))
        capture.end(self._model)
        self._model = None


# --- names ---------------------------------------------------------------------------------------------------------


class Site(NamedTuple):
    """A brick of a model, with the path of its module.

    A brick that is a function has the path of the module that calls the function.
    """

    brick: BrickDefinition
    path: str
    module: nn.Module | None  # the module itself; None for a function


class Naming:
    """Maps the nodes of Dynamo's graph to the bricks and layers of a model."""

    def __init__(
        self,
        compiled: GraphOrigins,
        calls: Iterable[BrickCall],
        model: nn.Module | None,
        around: Sequence[nn.Module | None] = (),
    ) -> None:
        """`calls` are the timed calls of `model`. `around` are the modules of the running calls, outermost first."""
        self.compiled = compiled
        self._keys = {id(call.module()): call.key for call in calls}
        found = next(filter(None, [self._below(module) for module in reversed(around)]), None)
        if found is None and model is not None:
            found = self._alone_in(model)
        if found is None:
            log_once("kernels of code that was compiled of layers one by one, or of no known module, are not named")
        self._modules = found or {}
        self.is_known = found is not None

    def _below(
        self, module: nn.Module | None, prefix: str = "", known: dict[str, nn.Module] | None = None
    ) -> dict[str, nn.Module] | None:
        """Return the graph's modules by path, if `module` is the compiled module. Otherwise return None."""
        if module is None:
            return None
        inside = modules_by_path(module) if known is None else known
        found = {"": inside[prefix]}
        for path, kind in self.compiled.classes.items():
            one = inside.get(".".join(filter(None, (prefix, path))))
            if one is None or type(one).__name__ != kind:
                return None
            found[path] = one
        return found

    def _alone_in(self, model: nn.Module) -> dict[str, nn.Module] | None:
        """Find the compiled module in `model`, and return the graph's modules by path.

        Returns None if several modules match, or if the compiled module is inside of a layer or brick.
        """
        known = modules_by_path(model)
        path = next(filter(None, self.compiled.classes), None)
        if path is None:
            return None
        prefixes = [one[: -len(path)].removesuffix(".") for one in known if f".{one}".endswith(f".{path}")]
        matching = [
            (prefix, found) for prefix in prefixes if (found := self._below(model, prefix, known)) is not None
        ]
        if len(matching) != 1:
            return None
        (prefix, found), parts = matching[0], matching[0][0].split(".")
        around = [known.get(".".join(parts[:count])) for count in range(1, len(parts) + 1)] if prefix else []
        return None if any([id(module) in self._keys for module in around]) else found

    def layer(self, origin: NodeOrigin) -> Hashable:
        """Return the key of the layer that contains `origin`, or None outside of layers."""
        keys = [self._keys.get(id(self._modules.get(path))) for path in ("", *origin.modules)]
        return next((key for key in keys if isinstance(key, tuple)), None)

    def site(self, origin: NodeOrigin) -> Site | None:
        """Return the brick that contains `origin`, or None if the origin is between bricks."""
        path = origin.modules[-1] if origin.modules else ""
        for around in ("", *origin.modules)[::-1]:
            module = self._modules.get(around)
            key = self._keys.get(id(module))
            if isinstance(key, BrickDefinition):
                return Site(key, around, module)
        brick = next(filter(None, map(brick_of_function, (*origin.functions, origin.operation))), None)
        if (
            brick is None
            and origin.operation in _ADDS
            and isinstance(self._keys.get(id(self._modules.get(path))), tuple)
        ):
            brick = brick_of_name(RESIDUAL_ADD)
        return None if brick is None else Site(brick, path, None)

    def class_of(self, origin: NodeOrigin) -> str:
        """Return the class name of the innermost module around `origin`."""
        return type(self._modules[origin.modules[-1] if origin.modules else ""]).__name__


class NodeGroup:
    """Neighbouring nodes of a captured graph with the same origins (modules and functions)."""

    __slots__ = ("begin", "classes", "end", "layer", "sites")

    def __init__(self, ran: Ran, origins: list[NodeOrigin], naming: Naming) -> None:
        self.begin, self.end = ran.begin, ran.end
        sites = [site for site in [naming.site(origin) for origin in origins] if site is not None]
        self.sites = tuple({(id(site.brick), site.path): site for site in sites}.values())
        self.classes = () if sites else tuple(dict.fromkeys(map(naming.class_of, origins)))
        layers = {naming.layer(origin) for origin in origins}
        self.layer = layers.pop() if len(layers) == 1 else None  # None if the origins are in different layers

    @property
    def said(self) -> tuple[Any, ...]:
        return self.classes, self.layer, [(id(site.brick), site.path) for site in self.sites]

    @property
    def is_named(self) -> bool:
        return bool(self.sites or self.classes)


def spans_of(
    ran: list[Ran], lines: list[str], naming: Naming, around: set[Hashable], tokens: int
) -> list[CapturedCall]:
    """Return the captured nodes as calls of layers and bricks.

    `around` are the keys of the running calls. `tokens` is the number of tokens of the captured call.
    """
    kernels: list[NodeGroup] = []
    for one, nodes in zip(ran, _nodes(ran, lines), strict=True):
        known = naming.compiled.origins if naming.is_known else {}
        origins = [origin for origin in map(known.get, nodes) if origin is not None]
        kernel = NodeGroup(one, _computed(origins, lines[one.line - 1]), naming)
        if kernels and kernel.is_named and kernels[-1].said == kernel.said:
            kernels[-1].end = kernel.end
        else:
            kernels.append(kernel)
    uses: dict[str, int] = {}
    for kernel in kernels:
        for site in kernel.sites:
            uses[site.path] = uses.get(site.path, 0) + 1
    found: list[CapturedCall] = []
    for kernel, layer in zip(kernels, _layers(kernels), strict=True):
        if layer is None or layer in around:
            siblings = found
        else:
            if not found or found[-1].key != layer:
                found.append(CapturedCall(layer, None, kernel.begin))
            found[-1].end = kernel.end
            siblings = found[-1].inside
        if kernel.is_named and not {site.brick for site in kernel.sites} & around:
            siblings.append(_span(kernel, naming.compiled, uses, tokens))
    return found


def _nodes(ran: list[Ran], lines: list[str]) -> list[list[str]]:
    """Return Dynamo's nodes for each line in `ran`. The comment above the line names them."""
    launches = {one.line for one in ran}
    found = []
    for one in ran:
        at = one.line - 1  # the numbers of lines begin at 1
        said = None
        while said is None and at > 0 and at not in launches and not lines[at - 1].lstrip().startswith("def "):
            said = SOURCE_NODES.match(lines[at - 1])
            at -= 1
        found.append([name for name in (said[1].split(", ") if said else ()) if name])
    return found


def _computed(origins: list[NodeOrigin], line: str) -> list[NodeOrigin]:
    """Return the `origins` that the line computes. Inductor's comment also names operations that only reshape a
    result.
    """
    products = [at for at, origin in enumerate(origins) if origin.operation in _PRODUCTS]
    if _LOOPS.match(line):  # a loop computes no matrix product, unless all of its origins are matrix products
        return [origin for origin in origins if origin.operation not in _PRODUCTS] or origins
    return origins[products[-1] if products else -1 :]


def _layers(kernels: list[NodeGroup]) -> list[Hashable]:
    """Return the layer of each kernel. A kernel of several layers belongs to the layer during which it runs."""
    owners = [kernel.layer for kernel in kernels]
    while True:
        owned = [at for at, owner in enumerate(owners) if owner is not None]
        pieces = [list(piece) for _, piece in groupby(owned, key=lambda at: owners[at])]
        longest: dict[Hashable, list[int]] = {}
        for piece in pieces:
            if len(piece) > len(longest.get(owners[piece[0]], ())):
                longest[owners[piece[0]]] = piece
        moved = [piece for piece in pieces if longest[owners[piece[0]]] is not piece]
        if not moved:
            break
        least = min(map(len, moved))
        for piece in moved:
            if len(piece) == least:
                for at in piece:
                    owners[at] = None
    for piece in pieces:
        owners[piece[0] : piece[-1] + 1] = [owners[piece[0]]] * (piece[-1] + 1 - piece[0])
    return owners


def _span(kernel: NodeGroup, compiled: GraphOrigins, uses: dict[str, int], tokens: int) -> CapturedCall:
    """Return a kernel as the call of a brick. The brick's work is known only if the kernel is a whole module."""
    sites = kernel.sites
    if len(sites) == 1 and sites[0].module is None:
        return CapturedCall(sites[0].brick, None, kernel.begin, kernel.end)
    if len(sites) == 1 and uses[sites[0].path] == 1:
        (site,) = sites
        elements = compiled.elements.get(site.path, 0)
        elements = elements if elements >= 0 else -elements * tokens
        return CapturedCall(site.brick, site.module, kernel.begin, kernel.end, elements)
    names = tuple(dict.fromkeys(site.brick.name for site in sites)) or kernel.classes
    labels = tuple(dict.fromkeys(filter(None, [site.brick.label for site in sites])))
    categories = {site.brick.category for site in sites} - {BrickCategory.OTHER}
    category = categories.pop() if len(categories) == 1 else BrickCategory.OTHER
    name = names[0] if len(names) == 1 else f"Fused: {', '.join(names)}"
    return CapturedCall(
        _brick(name[:MAX_NAME_CHARS], category, ", ".join(labels)[:MAX_NAME_CHARS]), None, kernel.begin, kernel.end
    )


@functools.cache
def _brick(name: str, category: BrickCategory, label: str) -> BrickDefinition:
    return BrickDefinition(name, category, backend="torch", label=label)
