"""Step metrics for the trackers of a training loop: TensorBoard, Weights & Biases, MLflow and others.

The classes are imported on first use, because each needs the package of its framework.
"""

from __future__ import annotations

from importlib import import_module

TYPE_CHECKING = False
if TYPE_CHECKING:
    from cbtop.trackers.accelerate_tracker import AccelerateTracker
    from cbtop.trackers.lightning_callback import LightningCallback
    from cbtop.trackers.step_metrics import StepMetrics
    from cbtop.trackers.transformers_callback import TransformersCallback

# Each class, with its module and the package that it needs.
_HOMES = {
    "AccelerateTracker": ("cbtop.trackers.accelerate_tracker", "accelerate"),
    "LightningCallback": ("cbtop.trackers.lightning_callback", "lightning"),
    "StepMetrics": ("cbtop.trackers.step_metrics", "numpy"),
    "TransformersCallback": ("cbtop.trackers.transformers_callback", "transformers"),
}
__all__ = ["AccelerateTracker", "LightningCallback", "StepMetrics", "TransformersCallback"]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'cbtop.trackers' has no attribute {name!r}")
    module, package = _HOMES[name]
    try:
        return getattr(import_module(module), name)
    except ImportError as error:
        raise ImportError(f"cbtop.trackers.{name} needs {package}; pip install {package} ({error})") from error


def __dir__() -> list[str]:
    return sorted(__all__)
