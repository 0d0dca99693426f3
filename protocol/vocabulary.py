"""The names that both sides of the wire share: bricks, categories, modes, node kinds, provenance."""

from __future__ import annotations

from enum import IntEnum, StrEnum

GUARD_CHECK = "guard"  # name of the check that fails if the guard finds something
# Name of a check under LmHead. It fails if the logits of a step are wrong, although no brick is wrong when the step
# runs again.
LOGITS_CHECK = "logits"
PRECONDITION = "precondition "  # the name of a check of a kernel's arguments begins with this prefix


class BrickCategory(IntEnum):
    """The categories of bricks. A report adds up bricks by category."""

    NORM = 0
    ATTENTION = 1
    FFN = 2
    OTHER = 3
    COMMUNICATION = 4  # communication between processes; most of this time is spent waiting for the slowest process

    @property
    def display_name(self) -> str:
        """The name that is shown to users, for example `Attention`."""
        return _CATEGORY_NAMES[self]


_CATEGORY_NAMES = {
    BrickCategory.NORM: "Norm",
    BrickCategory.ATTENTION: "Attention",
    BrickCategory.FFN: "FFN",
    BrickCategory.OTHER: "Other",
    BrickCategory.COMMUNICATION: "Communication",
}


class BrickId(IntEnum):
    """The fifteen standard bricks of a transformer decoder, in index order."""

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
        """The name that is shown to users, for example `RmsNorm` for RMS_NORM."""
        return _BRICK_NAMES[self]

    @property
    def category(self) -> BrickCategory:
        """The category that this brick belongs to."""
        return _BRICK_CATEGORIES[self]

    @classmethod
    def from_name(cls, name: str) -> BrickId:
        """Return the brick called `name`, a display name or a common alias (`Qkv`, `SiLU`, `Head`, …).

        Raises ValueError with the known names if there is no such brick.
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


# The phase of steps that are single calls of a numerical library. Calls of all functions have it.
CALL = "call"
WARM_UP = " (warm-up)"  # Suffix of the phase name for the first steps of a process. Their times are not stable yet.
MAX_WARM_UP_STEPS = 32  # A warm-up of this many steps ended although its steps still became faster.
SAMPLE = ", a sample"  # suffix of the phase name if the totals contain only the recorded steps
COMPILED_MODEL = ", compiled"  # suffix of the backend's name if an engine compiles the model
# Suffix of the backend's name if the model runs on a GPU and CUPTI records its kernels.
BY_KERNELS = "kernels by CUPTI, a recorded step as long as the plain one before it"
# This suffix follows BY_KERNELS if the GPU was idle at the beginning of most recorded steps.
IDLE_BEFORE = ", the GPU idle as it began"
# Suffix of the backend's name if only the host timed the work of a device. The times are then the times of launches.
LAUNCHES = ": launches"


def is_warm_up(phase: str) -> bool:
    """Whether `phase` is a phase of warm-up steps: the first steps of a process, whose times are not stable yet."""
    return phase.endswith(WARM_UP)


class TrainingPart(StrEnum):
    """A part of a training step. Most training loops run them in this order."""

    DATA_WAIT = "data wait"
    FORWARD = "forward"
    LOSS = "loss"
    BACKWARD = "backward"
    COMMUNICATION = "communication"  # the program waits for communication between processes
    CLIP = "clip"
    OPTIMIZER = "optimizer"
    ZERO_GRAD = "zero grad"
    # Evaluation or generation between the micro-batches of a training step. Its forward passes also count as steps of
    # their own.
    EVALUATION = "evaluation"
    OTHER = "other"
    # Only on a GPU: no kernel runs, although the program neither waits for data nor does other work.
    NO_KERNEL = "no kernel"


class EnginePart(StrEnum):
    """A part of the time of an engine that serves requests."""

    WAITING = "waiting for requests"  # no request is in the engine
    SCHEDULER = "scheduler"
    # The engine prepares the model's inputs, runs the model, chooses tokens, and waits for all of this.
    MODEL = "model"
    OUTPUTS = "request updates"  # the scheduler applies the chosen tokens to its requests
    # Tokens are turned into texts and results. This is a part only if the engine's own process does it.
    DETOKENISE = "detokenise"
    HOST = "between steps"  # there are requests, but the engine runs none of the other parts


class QueueReason(StrEnum):
    """The reason why requests still wait when an engine has scheduled a step."""

    LIMIT = "limit of running requests"  # as many run as the engine's settings allow
    TOKENS = "tokens of a step"  # the step has as many tokens as the engine's settings allow
    CACHE = "KV cache"  # requests were stopped to free the cache, or it is nearly full
    OTHER = "other"  # for example a limit of adapters, or a request that waits for data from elsewhere


TRAIN = "train"  # phase of a training step; if a process has several optimizers, ` Adam 2` or similar follows
# Suffixes of the names of bricks in a training step. The first suffix marks the backward pass of a brick. The second
# marks a forward pass that is repeated during the backward pass.
BACKWARD, RECOMPUTE = " backward", " recompute"
# Names of the bricks of a training step that belong neither to a forward nor to a backward pass.
STEP_BRICKS = ("DataWait", "BackwardEnd", "GradientSync", "ClipGradients", "Optimizer", "ZeroGrad", "Loop")


def is_training(phase: str) -> bool:
    """Whether steps with this name are training steps. Warm-up steps of training count, too."""
    return phase == TRAIN or phase.startswith(TRAIN + " ")


def shows_training(phase: str) -> bool:
    """Whether a phase consists of training steps. `phase` is its name on screens, such as `Net 2 train`."""
    words = phase.split(" ")
    return any(is_training(" ".join(words[at:])) for at in range(len(words)))


class NodeKind(IntEnum):
    """The kind of a node of the execution graph."""

    STEP = 0
    LAYER = 1
    BRICK = 2
    KERNEL = 3
    TRANSFER = 4
    FUNCTION = 5
    ASYNC_TASK = 6
    ADOPTED = 7  # work that other threads or tasks did for this node; its time is not part of the node's own time


class TransferDirection(StrEnum):
    """The direction of a transfer: between the host's memory (H) and a device's (D), or between devices."""

    H2D = "H2D"
    D2H = "D2H"
    D2D = "D2D"


# LAUNCH_BOUND is appended to the name of a brick if the device waited for the host in the brick's step. UNTIL_THERE
# is then appended to the name of the backend: the brick's times last until the device got there.
LAUNCH_BOUND, UNTIL_THERE = "launch-bound", "until the device got there"


class SyncMode(IntEnum):
    """When a profiler waits for the device: around every brick, at the end of a layer, at the end of a step, or
    never.

    With NONE, nothing is recorded. The host's own clock needs no wait, so all other modes are the same there. Some
    device clocks report their marks (moments on the device) without a wait. With them, the profiler does not wait at
    the end of a step either.
    """

    IMMEDIATE = 0
    PER_LAYER = 1
    DEFERRED = 2
    NONE = 3


class DeviceKind(StrEnum):
    """The kind of a sampled device."""

    GPU = "gpu"
    MIG = "mig"  # a part of a GPU (a MIG instance) that works as a separate device
    CPU = "cpu"  # all processors of the host, as one device


class SourceStatus(StrEnum):
    """The state of a profiled process."""

    LIVE = "live"
    ENDED = "ended"  # the process sent a goodbye before it ended
    # the process does not run any longer and sent no goodbye (it was killed, or ended by os._exit or exec)
    GONE = "gone"
    FAULTY = "faulty"  # the records of the process cannot be trusted; SourceState contains the reason


class Provenance(StrEnum):
    """The source of a number. It is shown next to a number, unless the number was simply measured."""

    MEASURED = "measured"
    DERIVED = "derived"  # the number was computed from measured numbers, or from shapes
    STATIC = "static"  # the number was read from a file or declared, and does not depend on what ran
    UNAVAILABLE = "n/a"


DAEMON_KEY, VIEWER_KEY = "daemon", "viewer"  # the names of the key pairs that a daemon and a viewer use by default
