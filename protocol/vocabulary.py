"""The names that both sides of the wire share: bricks, categories, modes, node kinds, provenance."""

from __future__ import annotations

from enum import IntEnum, StrEnum

GUARD_CHECK = "guard"  # the check that fails for the guard's findings
LOGITS_CHECK = "logits"  # fails for a step's logits if no brick was wrong when the step ran again; under LmHead
PRECONDITION = "precondition "  # prefix of the name of a check of a kernel's arguments


class BrickCategory(IntEnum):
    """The groups into which a report sums bricks."""

    NORM = 0
    ATTENTION = 1
    FFN = 2
    OTHER = 3
    COMMUNICATION = 4  # between processes: its time is mostly waiting for the slowest of them

    @property
    def display_name(self) -> str:
        return _CATEGORY_NAMES[self]


_CATEGORY_NAMES = {
    BrickCategory.NORM: "Norm",
    BrickCategory.ATTENTION: "Attention",
    BrickCategory.FFN: "FFN",
    BrickCategory.OTHER: "Other",
    BrickCategory.COMMUNICATION: "Communication",
}


class BrickId(IntEnum):
    """The fifteen well-known bricks of a transformer decoder, in index order."""

    RMS_NORM = 0
    LAYER_NORM = 1
    QKV_PROJECTION = 2
    ROPE_EMBEDDING = 3
    ATTENTION_SCORE = 4
    ATTENTION_SOFTMAX = 5
    ATTENTION_OUTPUT = 6
    OUTPUT_PROJECTION = 7
    GATE_PROJECTION = 8
    UP_PROJECTION = 9
    ACTIVATION = 10
    DOWN_PROJECTION = 11
    EMBEDDING = 12
    LM_HEAD = 13
    SAMPLING = 14

    @property
    def display_name(self) -> str:
        """The name shown everywhere, `RmsNorm` for RMS_NORM."""
        return _BRICK_NAMES[self]

    @property
    def category(self) -> BrickCategory:
        return _BRICK_CATEGORIES[self]

    @classmethod
    def from_name(cls, name: str) -> BrickId:
        """Return the brick called `name`: a display name or one of the usual aliases (`Qkv`, `SiLU`, `Head`, …).

        Raises ValueError, with the known names, if there is none.
        """
        try:
            return _BRICKS_BY_NAME[name]
        except KeyError:
            known = ", ".join(_BRICK_NAMES.values())
            raise ValueError(f"no brick is called {name!r}; the bricks are {known}") from None


_BRICK_NAMES = {brick: "".join(word.capitalize() for word in brick.name.split("_")) for brick in BrickId}

_BRICK_CATEGORIES = {
    BrickId.RMS_NORM: BrickCategory.NORM,
    BrickId.LAYER_NORM: BrickCategory.NORM,
    BrickId.QKV_PROJECTION: BrickCategory.ATTENTION,
    BrickId.ROPE_EMBEDDING: BrickCategory.ATTENTION,
    BrickId.ATTENTION_SCORE: BrickCategory.ATTENTION,
    BrickId.ATTENTION_SOFTMAX: BrickCategory.ATTENTION,
    BrickId.ATTENTION_OUTPUT: BrickCategory.ATTENTION,
    BrickId.OUTPUT_PROJECTION: BrickCategory.ATTENTION,
    BrickId.GATE_PROJECTION: BrickCategory.FFN,
    BrickId.UP_PROJECTION: BrickCategory.FFN,
    BrickId.ACTIVATION: BrickCategory.FFN,
    BrickId.DOWN_PROJECTION: BrickCategory.FFN,
    BrickId.EMBEDDING: BrickCategory.OTHER,
    BrickId.LM_HEAD: BrickCategory.OTHER,
    BrickId.SAMPLING: BrickCategory.OTHER,
}

_BRICKS_BY_NAME = {name: brick for brick, name in _BRICK_NAMES.items()} | {
    "Qkv": BrickId.QKV_PROJECTION,
    "Rope": BrickId.ROPE_EMBEDDING,
    "RoPE": BrickId.ROPE_EMBEDDING,
    "Softmax": BrickId.ATTENTION_SOFTMAX,
    "OutProj": BrickId.OUTPUT_PROJECTION,
    "Gate": BrickId.GATE_PROJECTION,
    "Up": BrickId.UP_PROJECTION,
    "SiLU": BrickId.ACTIVATION,
    "GELU": BrickId.ACTIVATION,
    "ReLU": BrickId.ACTIVATION,
    "Down": BrickId.DOWN_PROJECTION,
    "Embed": BrickId.EMBEDDING,
    "Head": BrickId.LM_HEAD,
    "Sample": BrickId.SAMPLING,
}


WARM_UP = " (warm-up)"  # ends the name of a step that came before the steps of its kind had settled
SAMPLE = ", a sample"  # ends the name of steps if only the recorded ones are counted
# Ends the backend of a model on a GPU that is recorded by its kernels.
BY_KERNELS = "kernels by CUPTI, a recorded step as long as the plain one before it"
# Follows BY_KERNELS if nothing that came before could run on the GPU in most of these steps.
IDLE_BEFORE = ", the GPU idle as it began"
LAUNCHES = ": launches"  # ends the backend of work that runs on a device and is timed by the host


def is_warm_up(phase: str) -> bool:
    """Whether steps of this name came before the steps of their kind had settled."""
    return phase.endswith(WARM_UP)


class NodeKind(IntEnum):
    """The kind of a node of the execution graph."""

    STEP = 0
    LAYER = 1
    BRICK = 2
    KERNEL = 3
    TRANSFER = 4
    FUNCTION = 5
    ASYNC_TASK = 6
    ADOPTED = 7  # work of other threads or tasks for the place it is in, outside that place's own time


class TransferDirection(StrEnum):
    """The two memories of a transfer: the host's and a device's."""

    H2D = "H2D"
    D2H = "D2H"
    D2D = "D2D"


# For bricks on a device that waited for the host: appended to their name, and to their backend (what is timed).
LAUNCH_BOUND, UNTIL_THERE = "launch-bound", "until the device got there"


class SyncMode(IntEnum):
    """When a profiler waits for the device: around every brick, at the end of a layer, of a step, or not at all.

    NONE records nothing. On a clock of the host itself there is nothing to wait for, and the first three are the
    same. If a clock reports its marks without waiting, the end of a step does not wait either.
    """

    IMMEDIATE = 0
    PER_LAYER = 1
    DEFERRED = 2
    NONE = 3


class DeviceKind(StrEnum):
    """The kind of hardware that is sampled."""

    GPU = "gpu"
    MIG = "mig"  # a part of a GPU that is a device of its own (Multi-Instance GPU)
    CPU = "cpu"  # all processors of the host, as one


class SourceStatus(StrEnum):
    """The state of a profiled process."""

    LIVE = "live"
    ENDED = "ended"  # it sent a goodbye
    GONE = "gone"  # it no longer runs and sent no goodbye: killed, or left by os._exit or exec
    FAULTY = "faulty"  # its records cannot be trusted; the reason tells why


class Provenance(StrEnum):
    """The source of a number; shown next to every number that was not simply measured."""

    MEASURED = "measured"
    DERIVED = "derived"  # computed from measured numbers, or from shapes
    STATIC = "static"  # read from a file or a declaration, true whether or not anything ran
    UNAVAILABLE = "n/a"


DAEMON_KEY, VIEWER_KEY = "daemon", "viewer"  # the key pairs that are used if none is named
