"""Basic blocks of a function, their edges, dominators and post-dominators."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

from cbtop.profiler.analysis.ptx.model import PtxError, PtxFunction
from cbtop.profiler.analysis.ptx.opcodes import is_branch, is_end, opcode

# Some analyses take time that grows with the square of the number of blocks: 2,000 took up to 10 s (AMD EPYC). So a
# larger function is not analysed. The largest kernel of cbtop has 627 blocks.
MAX_BLOCKS = 2048
MAX_STEPS = 4_000_000


@dataclass(slots=True)
class BasicBlock:
    """Instructions that run one after the other, from index `start` up to `end` (exclusive)."""

    start: int
    end: int
    successors: list[int] = field(default_factory=list)
    predecessors: list[int] = field(default_factory=list)


class ControlFlow:
    """The graph of a function's basic blocks. Block 0 is the entry. The last block, `exit`, has no instructions and
    follows every end of the function.
    """

    def __init__(self, function: PtxFunction) -> None:
        self._function = function
        instructions = function.instructions
        starts = {0, len(instructions), *function.labels.values()}
        starts.update(at + 1 for at, one in enumerate(instructions) if is_branch(one) or is_end(one))
        if len(starts) > MAX_BLOCKS:
            raise PtxError(function.line, f"{function.name} has more than {MAX_BLOCKS} basic blocks")
        ordered = sorted(starts)
        self.blocks = [BasicBlock(a, b) for a, b in pairwise(ordered)]
        self.exit = len(self.blocks)
        self.blocks.append(BasicBlock(len(instructions), len(instructions)))
        self._number = {block.start: number for number, block in enumerate(self.blocks)}
        self.block_of = [n for n, block in enumerate(self.blocks) for _ in range(block.start, block.end)]
        for number in range(self.exit):
            for successor in self._successors(number):
                if successor not in self.blocks[number].successors:
                    self.blocks[number].successors.append(successor)
                    self.blocks[successor].predecessors.append(number)

    def _successors(self, number: int) -> Iterable[int]:
        block = self.blocks[number]
        last = self._function.instructions[block.end - 1]
        falls_through = True
        if is_end(last):
            yield self.exit
            falls_through = bool(last.guard)
        elif is_branch(last):
            targets: Sequence[str] = last.operands[-1:]
            if opcode(last.opcode).base == "brx":
                targets = self._function.branch_targets.get(last.operands[-1], ())
            for target in targets:
                if target not in self._function.labels:
                    raise PtxError(last.line, f"the label {target} does not exist")
                yield self._number[self._function.labels[target]]
            falls_through = bool(last.guard)
        if falls_through:
            yield number + 1

    @cached_property
    def reachable(self) -> frozenset[int]:
        """The basic blocks that can be reached from the beginning of the function."""
        return self.reached_from([0])

    @cached_property
    def reaching_exit(self) -> frozenset[int]:
        """The basic blocks that can reach an end of the function."""
        return _closure([self.exit], [block.predecessors for block in self.blocks])

    def reached_from(self, blocks: Iterable[int], without: frozenset[int] = frozenset()) -> frozenset[int]:
        """Return `blocks` and all basic blocks that they can reach without entering one of `without`."""
        return _closure(blocks, [block.successors for block in self.blocks], without)

    @cached_property
    def in_loop(self) -> frozenset[int]:
        """The basic blocks that can run more than once, because they are on a cycle."""
        return frozenset(
            number for component in self._components for number in component
            if len(component) > 1 or number in self.blocks[number].successors
        )  # fmt: skip

    @cached_property
    def loops(self) -> list[frozenset[int]]:
        """The outermost loops, each as the set of its basic blocks."""
        return [
            frozenset(one) for one in self._components if len(one) > 1 or one[0] in self.blocks[one[0]].successors
        ]

    @cached_property
    def dominators(self) -> list[int | None]:
        """The immediate dominator of each basic block: the last block on every path to it. The entry dominates
        itself. An unreachable block has None.
        """
        return _dominators(0, [b.successors for b in self.blocks], [b.predecessors for b in self.blocks])

    @cached_property
    def post_dominators(self) -> list[int | None]:
        """The immediate post-dominator of each basic block: the first block on every path from it. `exit` is its own.
        A block that never reaches `exit` has None.
        """
        return _dominators(self.exit, [b.predecessors for b in self.blocks], [b.successors for b in self.blocks])

    def dominates(self, one: int, other: int) -> bool:
        return _is_ancestor(self.dominators, one, other)

    def post_dominates(self, one: int, other: int) -> bool:
        return _is_ancestor(self.post_dominators, one, other)

    def influence(self, number: int) -> frozenset[int]:
        """Return the basic blocks on the sides of a branch, up to where they join. The branch decides whether they
        run. It ends block `number`.
        """
        join = self.post_dominators[number]
        stop = frozenset() if join is None else frozenset({join})
        return self.reached_from(
            [one for one in self.blocks[number].successors if one not in stop], stop | {self.exit}
        ) - {self.exit}

    @cached_property
    def _components(self) -> list[list[int]]:
        """The strongly connected components of the graph, by Tarjan's algorithm without recursion."""
        order: dict[int, int] = {}
        low: dict[int, int] = {}
        stack: list[int] = []
        on_stack: set[int] = set()
        found: list[list[int]] = []
        for root in range(len(self.blocks)):
            if root in order:
                continue
            work = [(root, 0)]
            while work:
                node, place = work.pop()
                if place == 0:
                    order[node] = low[node] = len(order)
                    stack.append(node)
                    on_stack.add(node)
                successors = self.blocks[node].successors
                while place < len(successors):
                    successor = successors[place]
                    place += 1
                    if successor not in order:
                        work += [(node, place), (successor, 0)]
                        break
                    if successor in on_stack:
                        low[node] = min(low[node], order[successor])
                else:
                    if low[node] == order[node]:
                        component = stack[stack.index(node) :] if stack[-1] != node else [node]
                        del stack[-len(component) :]
                        on_stack.difference_update(component)
                        found.append(component)
                    if work:
                        low[work[-1][0]] = min(low[work[-1][0]], low[node])
        return found


def _closure(
    start: Iterable[int], edges: Sequence[Sequence[int]], without: frozenset[int] = frozenset()
) -> frozenset[int]:
    found = set(start) - without
    work = list(found)
    while work:
        for one in edges[work.pop()]:
            if one not in found and one not in without:
                found.add(one)
                work.append(one)
    return frozenset(found)


def _dominators(root: int, edges: Sequence[Sequence[int]], back: Sequence[Sequence[int]]) -> list[int | None]:
    """Return the immediate dominator of each block (Cooper, Harvey and Kennedy, "A Simple, Fast Dominance Algorithm",
    2001).
    """
    order = _postorder(root, edges)
    rank = {node: place for place, node in enumerate(order)}
    found: list[int | None] = [None] * len(edges)
    found[root] = root
    steps = 0
    changed = True
    while changed:
        changed = False
        for node in reversed(order[:-1]):
            new: int | None = None
            for other in back[node]:
                if found[other] is None:
                    continue
                if new is None:
                    new = other
                    continue
                a, b = other, new
                while a != b:
                    steps += 1
                    if rank[a] < rank[b]:
                        a = found[a]  # type: ignore[assignment]  # only the root of the tree has no parent
                    else:
                        b = found[b]  # type: ignore[assignment]
                new = a
            steps += 1
            if steps > MAX_STEPS:
                raise PtxError(1, f"the control flow of a function takes more than {MAX_STEPS} steps to analyse")
            if found[node] != new:
                found[node] = new
                changed = True
    return found


def _postorder(root: int, edges: Sequence[Sequence[int]]) -> list[int]:
    found: list[int] = []
    seen = {root}
    work = [(root, iter(edges[root]))]
    while work:
        node, rest = work[-1]
        for one in rest:
            if one not in seen:
                seen.add(one)
                work.append((one, iter(edges[one])))
                break
        else:
            found.append(node)
            work.pop()
    return found


def _is_ancestor(tree: Sequence[int | None], one: int, other: int) -> bool:
    """Whether the block `one` is `other` or one of its ancestors in a tree of immediate dominators."""
    at: int | None = other
    while at is not None:
        if at == one:
            return True
        above = tree[at]
        if above == at:
            return False
        at = above
    return False
