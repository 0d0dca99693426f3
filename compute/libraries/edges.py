"""A slow and plain reference of the Canny edge detector (Canny 1986), with the conventions of scikit-image."""

from __future__ import annotations

from typing import Any

import numpy as np

from cbtop.compute.libraries.through import SIGMA

LOW, HIGH = 0.1, 0.2  # thresholds of the gradient's magnitude
RADIUS = int(4 * SIGMA + 0.5)


def edges(image: Any) -> Any:
    """Return which pixels of an image (rows, columns) are edges.

    The image is smoothed. Sobel's operator finds its gradient. Pixels that are largest along the gradient are kept.
    Of their groups of neighbours above LOW, those with a pixel above HIGH remain. A pixel of the border is not an
    edge.
    """
    smooth = _smoothed(image.astype(np.float64)) / (_smoothed(np.ones(image.shape)) + np.finfo(np.float64).eps)
    down = _sobel(smooth)
    right = _sobel(smooth.T).T
    magnitude = np.hypot(down, right)
    candidates = np.zeros(image.shape, bool)
    for i, j in np.ndindex(*(side - 2 for side in image.shape)):
        candidates[i + 1, j + 1] = _is_ridge(magnitude, down, right, i + 1, j + 1)
    return _connected(candidates & (magnitude >= LOW), magnitude >= HIGH)


def _smoothed(image: Any) -> Any:
    weights = np.exp(-(np.arange(-RADIUS, RADIUS + 1) ** 2) / (2 * SIGMA**2))
    weights /= weights.sum()
    for axis in (0, 1):
        image = np.apply_along_axis(lambda line: np.convolve(line, weights)[RADIUS:-RADIUS], axis, image)
    return image


def _sobel(image: Any) -> Any:
    """Return the derivative along the first axis. The border is reflected."""
    wide = np.pad(image, 1, mode="symmetric")
    difference = wide[2:] - wide[:-2]
    return difference[:, :-2] + 2 * difference[:, 1:-1] + difference[:, 2:]


def _is_ridge(magnitude: Any, down: Any, right: Any, i: int, j: int) -> bool:
    """Return whether no interpolated value one step along the gradient is larger, on either side."""
    along, across = abs(down[i, j]), abs(right[i, j])
    if magnitude[i, j] < LOW:
        return False
    step_i, step_j = (1 if gradient[i, j] >= 0 else -1 for gradient in (down, right))
    straight = (step_i, 0) if along > across else (0, step_j)
    weight = min(along, across) / max(along, across)
    return all(
        magnitude[i + side * straight[0], j + side * straight[1]] * (1 - weight)
        + magnitude[i + side * step_i, j + side * step_j] * weight
        <= magnitude[i, j]
        for side in (1, -1)
    )


def _connected(weak: Any, strong: Any) -> Any:
    """Return the pixels of `weak` that are connected, also diagonally, with a strong pixel."""
    found = np.zeros(weak.shape, bool)
    waiting = list(zip(*np.nonzero(weak & strong), strict=True))
    while waiting:
        i, j = waiting.pop()
        if 0 <= i < weak.shape[0] and 0 <= j < weak.shape[1] and weak[i, j] and not found[i, j]:
            found[i, j] = True
            waiting += [(i + di, j + dj) for di in (-1, 0, 1) for dj in (-1, 0, 1)]
    return found
