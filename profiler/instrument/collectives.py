"""Times collectives as bricks: communication of a model's step with other processes by torch.distributed.

Rules
- No public function is replaced. torch compares its functions by identity (in `P2POp`, coalescing and Dynamo's
  rewriting), and programs import them by name before a model is attached. torch's public functions are wrappers, and
  cbtop replaces the wrapped function in their closures.
- Asynchronous sends and receives have no such wrapper. For them, cbtop times `Work.wait` and the methods of the
  process group.
- A call with `async_op=True` and a functional collective return before their work is done. Their brick is named a
  launch and has no rate. The wait for the work is a second brick.
- Calls inside a collective belong to the collective.
- Elements and `size_bytes` count the data of all ranks together. Bytes are bus bytes by the factors of nccl-tests
  (doc/PERFORMANCE.md, "Bus bandwidth"), for equally large parts.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from cbtop.profiler.definitions import BrickDefinition
from cbtop.profiler.instrument import device_graphs
from cbtop.profiler.instrument.communication import exposed
from cbtop.profiler.instrument.functions import named, timed
from cbtop.profiler.instrument.generation import Function
from cbtop.profiler.instrument.open_step import recorded_here
from cbtop.profiler.instrument.wrapping import elements_of
from cbtop.protocol.attributes import UNKNOWN_WORK, Work
from cbtop.protocol.vocabulary import BrickCategory

if TYPE_CHECKING:
    from cbtop.profiler.instrument.functions import TimedFunctions

ALL_GATHER = "AllGather"
ALL_REDUCE = "AllReduce"
ALL_TO_ALL = "AllToAll"
BARRIER = "Barrier"
BROADCAST = "Broadcast"
COALESCED = "Coalesced"
GATHER = "Gather"
RECV = "Recv"
REDUCE = "Reduce"
REDUCE_SCATTER = "ReduceScatter"
SCATTER = "Scatter"
SEND = "Send"
WAIT = "Wait"

# Collectives with one part of the data for each rank. A rank does not send its own part to itself.
_IN_PARTS = frozenset({ALL_GATHER, ALL_TO_ALL, GATHER, REDUCE_SCATTER, SCATTER})
# Function of torch.distributed -> its brick, the argument with its data, and whether this data is the part of one
# rank. Deprecated functions are missing, because they call a function that is timed.
_FUNCTIONS = {
    "all_gather": (ALL_GATHER, "tensor", True),
    "all_gather_into_tensor": (ALL_GATHER, "output_tensor", False),
    "all_gather_single": (ALL_GATHER, "output_tensor", False),
    "all_reduce": (ALL_REDUCE, "tensor", False),
    "all_to_all": (ALL_TO_ALL, "input_tensor_list", False),
    "all_to_all_single": (ALL_TO_ALL, "input", False),
    "barrier": (BARRIER, "", False),
    "broadcast": (BROADCAST, "tensor", False),
    "gather": (GATHER, "tensor", True),
    "recv": (RECV, "tensor", False),
    "reduce": (REDUCE, "tensor", False),
    "reduce_scatter": (REDUCE_SCATTER, "output", True),
    "reduce_scatter_single": (REDUCE_SCATTER, "input", False),
    "reduce_scatter_tensor": (REDUCE_SCATTER, "input", False),
    "scatter": (SCATTER, "tensor", True),
    "send": (SEND, "tensor", False),
}
# Like `_FUNCTIONS`, for torch.distributed._functional_collectives, which DTensor calls. These functions return at
# once.
_FUNCTIONAL = {
    "all_gather_single": (ALL_GATHER, "self", True),
    "all_gather_tensor": (ALL_GATHER, "self", True),
    "all_reduce": (ALL_REDUCE, "self", False),
    "all_to_all_single": (ALL_TO_ALL, "self", False),
    "broadcast": (BROADCAST, "self", False),
    "reduce_scatter_single": (REDUCE_SCATTER, "self", False),
    "reduce_scatter_tensor": (REDUCE_SCATTER, "self", False),
}
# Method of a process group -> the brick that it launches. Its first argument (after `self`) is the tensors to send or
# fill.
_METHODS = {"send": SEND, "recv": RECV, "recv_anysource": RECV, "_end_coalescing": COALESCED}
# Methods of a process group that launch a collective. Public functions of torch.distributed call them.
_LAUNCHES = {
    "_allgather_base": ALL_GATHER,
    "_reduce_scatter_base": REDUCE_SCATTER,
    "all_gather_single": ALL_GATHER,
    "all_gather_single_coalesced": ALL_GATHER,
    "all_to_all_single": ALL_TO_ALL,
    "allgather": ALL_GATHER,
    "allgather_coalesced": ALL_GATHER,
    "allgather_into_tensor_coalesced": ALL_GATHER,
    "allreduce": ALL_REDUCE,
    "allreduce_coalesced": ALL_REDUCE,
    "alltoall": ALL_TO_ALL,
    "alltoall_base": ALL_TO_ALL,
    "barrier": BARRIER,
    "broadcast": BROADCAST,
    "gather": GATHER,
    "monitored_barrier": BARRIER,
    "reduce": REDUCE,
    "reduce_scatter": REDUCE_SCATTER,
    "reduce_scatter_single": REDUCE_SCATTER,
    "reduce_scatter_single_coalesced": REDUCE_SCATTER,
    "reduce_scatter_tensor_coalesced": REDUCE_SCATTER,
    "scatter": SCATTER,
}
# OpType of torch (torch/csrc/distributed/c10d/Work.hpp) -> the collective that a `Work` of this type belongs to.
_OPERATIONS = {
    0: BROADCAST, 1: ALL_REDUCE, 2: ALL_REDUCE, 3: REDUCE, 4: ALL_GATHER, 5: ALL_GATHER, 6: ALL_GATHER, 7: GATHER,
    8: SCATTER, 9: REDUCE_SCATTER, 10: ALL_TO_ALL, 11: ALL_TO_ALL, 12: SEND, 13: RECV, 14: RECV, 15: BARRIER,
    16: REDUCE_SCATTER, 17: COALESCED, 18: ALL_REDUCE, 19: REDUCE_SCATTER,
}  # fmt: skip


def wrap_collectives(functions: TimedFunctions) -> None:
    """Wrap all collectives of torch that this process has imported, unless they are wrapped already."""
    c10d: Any = sys.modules.get("torch.distributed.distributed_c10d")
    if not hasattr(c10d, "ProcessGroup"):  # torch was built without torch.distributed
        return
    for name, (brick, held, is_part) in _FUNCTIONS.items():
        functions.swap(_closed_over(getattr(c10d, name, None)), CONTENTS, _collective(brick, held, is_part))
    for name, brick in _METHODS.items():
        functions.replace(c10d.ProcessGroup, name, functools.partial(_launched, name=name, brick=brick))
    for name, brick in _LAUNCHES.items():
        functions.replace(c10d.ProcessGroup, name, functools.partial(_exposed, name=name, brick=brick))
    functions.replace(
        c10d.Work, "wait", lambda original: _waits(exposed(_kind_of, waits=True)(_method(original, "wait")))
    )
    functional = sys.modules.get("torch.distributed._functional_collectives")
    for name, (brick, held, is_part) in _FUNCTIONAL.items():
        if name.endswith("_tensor") and hasattr(functional, name.replace("_tensor", "_single")):
            continue  # this function is deprecated; it calls the function that has the suffix `_single`
        functions.swap(functional, name, _collective(brick, held, is_part, is_launch=True))
    functions.replace(functional, "wait_tensor", exposed(lambda tensor, running: WAIT, waits=True))
    functions.swap(functional, "wait_tensor", _waits)


CONTENTS = "cell_contents"


def _closed_over(function: Any) -> Any:
    """Return the closure cell of `function` that holds the function to replace.

    Returns None without such a cell. Also returns None for a deprecated function, because it calls a function that is
    timed.
    """
    closure = getattr(function, "__closure__", None)
    if not closure or hasattr(function, "__deprecated__"):
        return None
    return dict(zip(function.__code__.co_freevars, closure, strict=True)).get("func")


def _method(original: Function, name: str) -> Function:
    """Return a Python method with the code name `name` that calls the C++ method `original`.

    C++ calls this wrapper if a Python class inherits the method. The wrapper calls C++ again, which would look for
    the Python method once more. C++ stops there if the calling frame has the method's name and `self`.
    """

    def call(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        return original(self, *args, **kwargs)

    call.__code__ = call.__code__.replace(co_name=name)
    return functools.wraps(original)(call)


def _collective(brick: str, held: str, is_part: bool, is_launch: bool = False) -> Callable[[Function], Function]:
    def wrapper(original: Function) -> Function:
        at = {name: number for number, name in enumerate(inspect.signature(original).parameters)}

        def argument(name: str, args: Any, kwargs: Any) -> Any:
            return named(args, kwargs, at[name], name) if name in at else None

        def brick_of(args: Any, kwargs: Any) -> tuple[Any, Any] | None:
            if _around() is not None:
                return None
            returns_at_once = is_launch or argument("async_op", args, kwargs) or _is_coalesced()
            name = f"{brick} (launch)" if returns_at_once else brick
            group = argument("group", args, kwargs)
            if _is_of_others(group):
                return None
            ranks = ranks_of(group)
            is_even = not argument("input_split_sizes", args, kwargs)
            return _about(name, argument(held, args, kwargs), ranks, is_part, is_even=is_even)

        return timed(original, brick, brick_of=brick_of)

    return wrapper


def _launched(original: Function, name: str, brick: str) -> Function:
    def brick_of(args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        return None if _around() is not None else _about(f"{brick} (launch)", args[1] if len(args) > 1 else None, 0)

    return timed(_exposed(original, name, brick), brick, brick_of=brick_of)


def _exposed(original: Function, name: str, brick: str) -> Function:
    return exposed(lambda group, running: brick, waits=False)(_method(original, name))


def _waits(original: Function) -> Function:
    """Time the wait for a `Work` or a tensor as a brick.

    The brick has the name of the awaited collective, if it is known.
    """

    def brick_of(args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        around = _around()
        if around is not None and not around.name.endswith("(launch)"):
            return None
        waited: Any = args[0] if args else kwargs.get("tensor")
        operation = _operation_of(waited)
        return collective_brick(f"{WAIT} ({operation})" if operation else WAIT), 0

    return timed(original, WAIT, brick_of=brick_of)


def _operation_of(waited: Any) -> str | None:
    """Return the collective that a `Work` belongs to. Returns None if it is unknown, or if the argument is a
    tensor.
    """
    return _OPERATIONS.get(waited._get_op_type()) if hasattr(waited, "_get_op_type") else None


def _kind_of(waited: Any, running: str) -> str:
    """Return the collective that a `Work` belongs to.

    If torch has no number for the `Work`, return the collective of the `running` function.
    """
    return _operation_of(waited) or _FUNCTIONS.get(running, (WAIT,))[0]


def _around() -> BrickDefinition | None:
    """Return the brick of the collective that is running around the caller, or None."""
    path = recorded_here()
    key = None if path is None else path.position.scope.key
    return key if isinstance(key, BrickDefinition) and key.category is BrickCategory.COMMUNICATION else None


def _is_of_others(group: Any) -> bool:
    """Return whether this process is not a rank of the group. The collective then returns at once and sends
    nothing.
    """
    members: Any = sys.modules["torch.distributed.distributed_c10d"].GroupMember
    return group is members.NON_GROUP_MEMBER


def _is_coalesced() -> bool:
    """Return whether torch is collecting collectives, in order to launch them together."""
    return bool(sys.modules["torch.distributed.distributed_c10d"]._world.pg_coalesce_state)


def ranks_of(group: Any) -> int:
    """Return the number of ranks of `group`, or 0 if unknown.

    `group` is a process group, the name of a process group, a device mesh, or a tuple of a mesh and one of its
    dimensions.
    """
    c10d: Any = sys.modules["torch.distributed.distributed_c10d"]
    if isinstance(group, str):
        group = c10d._resolve_process_group(group)
    if isinstance(group, tuple):
        mesh, dimension = group
        return int(mesh.size(dimension))
    if isinstance(group, list):
        return len(group[0]) if group and isinstance(group[0], list) else len(group)
    if group is None:
        return max(0, int(c10d.get_world_size()))
    return int(group.size()) if hasattr(group, "size") else 0


def _about(
    name: str, held: Any, ranks: int, is_part: bool = False, *, is_even: bool = True
) -> tuple[BrickDefinition, int | None]:
    """Return the brick for the collective `name`, and the number of elements of all ranks together (None if unknown).

    `held` is one tensor or several. `is_part` says that it is only one rank's part. `is_even` says that all parts
    have the same size.
    """
    tensors = [one for one in (held if isinstance(held, Sequence) else (held,)) if isinstance(one, Tensor)]
    if not tensors:
        return collective_brick(name, ranks), 0
    counts = [count for one in tensors if isinstance(count := elements_of((one,), {}), int)]
    if len(counts) < len(tensors) or (is_part and not ranks):
        return collective_brick(name, ranks), None
    is_even = is_even and len(set(counts)) == 1  # each of several tensors is the part of one rank
    return collective_brick(name, ranks, tensors[0].element_size(), is_even), sum(counts) * (ranks if is_part else 1)


def _bus_factor(name: str, ranks: int) -> float:
    """Return the bytes that each link must carry (bus bytes) per byte of the data of all ranks."""
    others = (ranks - 1) / ranks
    return 2 * others if name == ALL_REDUCE else others if name in _IN_PARTS else 1.0


@functools.lru_cache(maxsize=256)  # this is cached, because the layers of a step repeat the same arguments
def collective_brick(name: str, ranks: int = 0, itemsize: int = 0, has_bus: bool = False) -> BrickDefinition:
    """Return the brick for the collective `name`. `ranks` and `itemsize` (bytes per element) are 0 if unknown.

    Bus bytes are known only if `has_bus` is True. A launch has none, because it has no rate.
    """
    bus = _bus_factor(name, ranks) * itemsize if ranks and has_bus and not name.endswith("(launch)") else None
    return BrickDefinition(
        name,
        BrickCategory.COMMUNICATION,
        backend="torch",
        work=Work(bytes_per_element=bus, size_bytes_per_element=itemsize) if itemsize else UNKNOWN_WORK,
        label=f"{ranks} ranks" if ranks else "",
    )


def settle_before_groups_end(functions: TimedFunctions) -> None:
    """Make cbtop free its copies of dropped graphs whenever a process group is about to end.

    Otherwise NCCL would wait for these copies, because they contain kernels of NCCL.
    """
    for name in ("torch.distributed", "torch.distributed.distributed_c10d"):
        functions.replace(sys.modules.get(name), "destroy_process_group", _ends_a_group)


def _ends_a_group(original: Callable[..., None]) -> Callable[..., None]:
    def destroy_process_group(*args: Any, **kwargs: Any) -> None:
        device_graphs.settle(may_wait=True)
        original(*args, **kwargs)

    return destroy_process_group
