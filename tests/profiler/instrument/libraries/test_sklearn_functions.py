"""Tests of scikit-learn's table: methods of estimators are bricks with the name of the class."""

from __future__ import annotations

import pickle
from importlib import import_module

import numpy as np
import pytest

import cbtop
from cbtop.profiler.instrument.libraries import calls
from cbtop.profiler.instrument.libraries.sklearn_functions import SKLEARN
from cbtop.profiler.profiler import BrickProfiler


def test_each_estimator_of_the_table_exists() -> None:
    pytest.importorskip("sklearn")
    for module, kind in {(row.module, row.path.partition(".")[0]) for row in SKLEARN}:
        assert isinstance(getattr(import_module(module), kind), type)


def test_a_method_is_a_brick_of_its_class(implementation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    models = pytest.importorskip("sklearn.linear_model")
    cluster = pytest.importorskip("sklearn.cluster")
    monkeypatch.setattr(calls, "SMALL_NS", 0)
    points = np.random.default_rng(1).normal(size=(60, 3))
    target = points[:, 0]
    plain = models.Ridge().fit(points, target).predict(points).tobytes()
    profiler = BrickProfiler()
    with cbtop.instrument("sklearn", "numpy", profiler=profiler):
        for kind in (models.Ridge, models.Lasso):
            model = kind().fit(points, target)
            found = model.predict(points).tobytes()  # both classes inherit this method
            assert kind is not models.Ridge or found == plain
        assert isinstance(pickle.loads(pickle.dumps(model)), models.Lasso)
        cluster.KMeans(2, n_init=1, random_state=0).fit(points)
    names = {one.name for one in profiler.report().bricks}
    profiler.close()
    expected = {f"sklearn.{kind}.{method}" for kind in ("Ridge", "Lasso") for method in ("fit", "predict")}
    assert {name for name in names if name.startswith("sklearn")} == expected | {"sklearn.KMeans.fit"}
