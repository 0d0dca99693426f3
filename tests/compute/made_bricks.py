"""Bricks with contract files, as a user writes them: `write` makes a module and its contract in a folder."""

from __future__ import annotations

import re
from pathlib import Path

MODULE = """
from pathlib import Path

import numpy as np

from cbtop import Bounded, BrickDefinition, BrickId, BrickProfiler, Finite

profiler = BrickProfiler(enabled=False)


def plain_rms_norm(x, weight, epsilon=1e-6):
    x = np.asarray(x, np.float64)
    return (x / np.sqrt((x * x).mean(-1, keepdims=True) + epsilon) * weight).astype(np.float32)


NORM = BrickDefinition.of(BrickId.RMS_NORM, contract=Path(__file__).with_name("rms.yaml"))
SOFTMAX = BrickDefinition.of(BrickId.ATTENTION_SOFTMAX, checks=(Finite(), Bounded(0, 1)))


@profiler.timed(NORM)
def fast_rms_norm(x, weight, epsilon):
    return x / np.sqrt(np.square(x).mean(-1, keepdims=True) + np.float32(epsilon)) * weight


@profiler.timed(NORM)
def inexact(x, weight, epsilon):
    return fast_rms_norm.__wrapped__(x, weight, epsilon) * np.float32(1.01)


@profiler.timed(NORM)
def infinite(x, weight, epsilon):
    if len(x) > 1:
        return plain_rms_norm(x, weight, epsilon)
    return np.full((1, x.shape[1] + 1), np.inf, np.float32)


@profiler.timed(NORM)
def raising(x, weight, epsilon):
    raise RuntimeError("no kernel")


@profiler.timed(NORM)
def leaving(x, weight, epsilon):
    raise SystemExit(0)


@profiler.timed(NORM)
def printing(x, weight, epsilon):
    print("mine")
    return fast_rms_norm.__wrapped__(x, weight, epsilon)


def leaving_cases():
    raise SystemExit(0)


@profiler.timed(SOFTMAX)
def softmax(x):
    e = np.exp(x - x.max())
    return e / e.sum()


@profiler.timed("Plain")
def without_checks(x):
    return x


def cases():
    for size in (7, 32):
        yield (np.random.default_rng(size).standard_normal(size, np.float32),)


def no_cases():
    return iter(())


def torch_norm(x, weight, epsilon):
    x = x.double()
    return (x / (x.square().mean(-1, keepdim=True) + epsilon).sqrt() * weight).to(weight.dtype)


@profiler.timed(BrickDefinition.of(BrickId.RMS_NORM, contract=Path(__file__).with_name("rms.yaml")))
def fast_torch_norm(x, weight, epsilon):
    return (x.float() * (x.float().square().mean(-1, keepdim=True) + epsilon).rsqrt() * weight).to(weight.dtype)


def halves(x):
    return x[:, ::2], x[:, 1::2]
"""
PAGE = Path(__file__).parents[2] / "docs/contracts.md"
CONTRACT = re.findall(r"```yaml\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)[0]


def write(folder: Path, module: str, contract: str = CONTRACT) -> Path:
    """Write the module and the contract of docs/contracts.md. Returns the path of the contract."""
    (folder / f"{module}.py").write_text(MODULE, encoding="utf-8")
    path = folder / "rms.yaml"
    path.write_text(contract.replace("my_norms:", f"{module}:"), encoding="utf-8")
    return path
