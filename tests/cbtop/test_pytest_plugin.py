"""Tests of the pytest plugin in real pytest processes. Most use a fake `cbtop check` with a known exit code."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from textwrap import dedent

import pytest

from cbtop.comparison.contents import Contents, PhaseContents, Total
from cbtop.feeds.run_file import write_runs
from cbtop.pytest_plugin import MeasurementError, check_names
from tests.cbtop.comparison.made_runs import STEADY, made_run
from tests.cbtop.steady_pace import set_steady_pace

pytest_plugins = ["pytester"]

# A test with a fake clock. Its attention in layer 2 is slower if SLOWER is set.
BODY = """
    import os

    import pytest

    from cbtop import BrickProfiler

    def decode():
        now_ns = 1_000_000
        slower = 1.2 if os.environ.get("SLOWER") else 1
        profiler = BrickProfiler(clock_ns=lambda: now_ns)
        for step in range(40):
            with profiler.step("decode", tokens=1):
                for layer in range(3):
                    with profiler.layer(layer):
                        for brick, us in (("RmsNorm", 10), ("Attention", 40)):
                            with profiler.brick(brick):
                                factor = slower if (layer, brick) == (2, "Attention") else 1
                                now_ns += round(us * 1000 * factor * (1 + 0.01 * ((step * 7) % 5)))
            now_ns += 20_000
        profiler.close("done")
"""
# A fake `cbtop check`. The name of the test decides its exit code, its output, and why it has no verdict.
CHECK = """
    import json
    import os
    import subprocess
    from pathlib import Path
    from types import SimpleNamespace

    from cbtop import pytest_plugin

    ENDS = {
        "slower": (4, "", "cbtop: 1 of 1 broken: Attention in Layer 2"),
        "unsure": (5, "unsure", "cbtop: 1 of 1 unsure"),
        "unknown": (5, "unknown", "cbtop: 1 of 1 unknown"),
        "moved": (5, "different", "cbtop: not judged: another machine: b, the baseline has a"),
        "faulty": (5, "untrusted", "cbtop: the process is faulty"),
        "short": (3, "", "cbtop: not judged: 15 decode steps of 20 needed"),
        "fails": (1, "", "E   assert 1 == 2"),
        "skips": (3, "", "cbtop: no process has recorded two steps in it"),
        "killed": (-9, "", ""),
    }

    def run(words, *, env, **_):
        exchange = Path(env["CBTOP_PYTEST"])
        (test,) = (word.partition("::test_")[2] for word in words if "::test_" in word)
        code, why, said = ENDS.get(test.partition("[")[0], (0, "", ""))
        run = {"untrusted": why == "untrusted" or None}
        diff = {"not_comparable": why == "different" or None, "base": None, "now": run}
        verdicts = [{"outcome": why, "passes": False}]
        if code == 5 and why == "unsure" and "--allow-unsure" in words:
            code = 0
        if code in (0, 4, 5):
            (exchange / "verdicts.json").write_text(json.dumps({"diff": diff, "verdicts": verdicts}))
        if test == "skips":
            (exchange / "skipped").write_text("no GPU")
        with open("checks", "a") as checks:
            checks.write(" ".join([test, *words[words.index("check") + 1 : words.index("--")]]) + "\\n")
        return subprocess.CompletedProcess(words, code, "", said)

    pytest_plugin.check_names = lambda thresholds, base_file: None  # a made check writes no base file
    pytest_plugin.subprocess = SimpleNamespace(**vars(subprocess) | {"run": run})
"""
NAMES = ("slower", "unsure", "unknown", "moved", "faulty", "short", "fails", "skips", "killed", "holds")


@pytest.fixture(autouse=True)
def _no_other_plugin(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    """Load no other plugin of pytest, which saves two thirds of the time. Also fix the pace of the machine."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    set_steady_pace(pytester.path, monkeypatch)


def session(pytester: pytest.Pytester, *words: str) -> pytest.RunResult:
    return pytester.runpytest_subprocess("-p", "cbtop.pytest_plugin", "-rs", *words)


def made_tests(pytester: pytest.Pytester, names: Sequence[str], more: str = "") -> None:
    """Write a test file with a test for each of `names`, and with the code `more`.

    The name of each test is also the result that the fake check gives to this test.
    """
    pytester.makeconftest(CHECK)
    tests = [f"@pytest.mark.cbtop('step <= 1s')\ndef test_{name}():\n    raise RuntimeError" for name in names]
    pytester.makepyfile("\n".join(["import pytest", *tests, dedent(more)]))


def checks(pytester: pytest.Pytester) -> list[str]:
    """Return the calls of the fake check: for each, the name of the test and the arguments."""
    return (pytester.path / "checks").read_text().splitlines()


def test_a_test_is_measured_in_a_process_and_fails_by_its_brick(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only this test with a real check runs by default.

    Tests that compare with base files need more runs, so they are slow.
    """
    pytester.makepyfile(
        BODY
        + """
    @pytest.mark.cbtop("Attention@2 <= 45us", "step <= 1s")
    def test_decode():
        decode()
    """
    )
    monkeypatch.setenv("SLOWER", "1")
    slower = session(pytester)
    slower.assert_outcomes(failed=1)
    slower.stdout.fnmatch_lines(["cbtop: 1 of 2 broken: Attention@2 <= 45us: broken ?Attention in Layer 2?: *"])


@pytest.mark.slow
def test_a_base_file_is_learned_and_a_relative_threshold_compares_with_it(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytester.makepyfile(
        BODY
        + """
    @pytest.mark.cbtop("Attention@2 <= 1.05x", "step <= 1s")
    def test_decode():
        decode()
    """
    )
    learned = session(pytester, "--cbtop-update", "--cbtop-runs", "1")
    learned.assert_outcomes(passed=1)
    (file,) = (pytester.path / "cbtop-baselines").glob("test_a_base_file*/test_decode.json")
    learned.stdout.fnmatch_lines([f"*.py::test_decode: cbtop: wrote 1 run into {file}"])
    session(pytester).assert_outcomes(passed=1)
    monkeypatch.setenv("SLOWER", "1")
    slower = session(pytester)
    slower.assert_outcomes(failed=1)
    slower.stdout.fnmatch_lines(["cbtop: 1 of 2 broken: Attention@2 <= 1.05x: broken ?Attention in Layer 2?: *"])


@pytest.mark.slow
def test_without_thresholds_two_runs_agree_and_the_body_runs_only_in_them(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytester.makepyfile(
        BODY
        + """
    class TestGate:
        @pytest.fixture
        def runs(self):
            with open("runs", "a") as runs:
                runs.write("x")

        @pytest.mark.cbtop
        @pytest.mark.parametrize("what", ["a/b"])
        def test_decode(self, what, runs):
            decode()
    """
    )
    runs = pytester.path / "runs"
    session(pytester, "--cbtop-update").assert_outcomes(passed=1)
    assert (runs.read_text(), len(list(pytester.path.rglob("TestGate.test_decode[[]a%2Fb].json")))) == ("x" * 6, 1)
    session(pytester).assert_outcomes(passed=1)
    assert runs.read_text() == "x" * 7
    monkeypatch.setenv("SLOWER", "1")
    slower = session(pytester)
    slower.assert_outcomes(failed=1)
    slower.stdout.fnmatch_lines(["*no brick slower beyond noise: broken ?Attention in Layer 2?: *"])
    assert runs.read_text() == "x" * 9


@pytest.mark.slow
def test_the_fixture_adds_thresholds_that_are_known_in_the_test(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        BODY
        + """
    @pytest.fixture
    def limit():
        return 45

    @pytest.mark.cbtop("step <= 1s")
    def test_decode(cbtop_budget, limit):
        cbtop_budget(f"Attention@1 <= {limit}us", "RmsNorm <= 5us")
        decode()

    def test_relative(cbtop_budget):
        cbtop_budget("step <= 1.05x")
        decode()

    def test_skips(cbtop_budget):
        pytest.skip("no GPU")

    def test_plain(request):
        request.getfixturevalue("cbtop_budget")
    """
    )
    done = session(pytester)
    done.assert_outcomes(failed=3, skipped=1)
    done.stdout.fnmatch_lines_random(
        [
            "cbtop: 1 of 3 broken: RmsNorm <= 5us: broken ?RmsNorm*",
            "there is no base file */test_relative.json; write it with `pytest --cbtop-update` at *",
            "*: no GPU",
            "E *cbtop_budget must be an argument of the test, so that the test is measured",
        ]
    )


@pytest.mark.slow
def test_each_end_of_a_check_says_what_to_do(pytester: pytest.Pytester) -> None:
    more = """
        @pytest.mark.cbtop("step <= 1.05x")
        def test_base(): ...

        @pytest.mark.cbtop("graph==base")
        def test_graph(): ...

        @pytest.mark.cbtop("bricks == 4", "graph_breaks==0")
        def test_contents(): ...

        @pytest.mark.cbtop("step <= fast")
        def test_threshold(): ...

        @pytest.mark.cbtop("step <= 1s", runs=3)
        def test_keyword(): ...

        @pytest.mark.cbtop("step <= 1s")
        @pytest.mark.skipif(True, reason="not here")
        def test_skipped(): ...

        @pytest.mark.cbtop("step <= 1s")
        @pytest.mark.xfail(strict=True)
        class TestExpected:
            @pytest.mark.cbtop("loss==0")
            def test_slower(self): ...
    """
    made_tests(pytester, NAMES, more)
    done = session(pytester)
    done.assert_outcomes(failed=12, skipped=2, xfailed=1, passed=2)
    done.stdout.fnmatch_lines(
        [
            "cbtop: 1 of 1 broken: Attention in Layer 2",
            "to pass tests of which a threshold is unsure: --cbtop-allow-unsure",
            "cbtop: 1 of 1 unknown",
            "let the test run more steps, or learn from more runs: --cbtop-update --cbtop-runs N",
            "cbtop: not judged: another machine: b, the baseline has a",
            "to compare them anyway: --cbtop-anyway; to write a base file on this machine: --cbtop-update",
            "cbtop: the process is faulty",
            "cbtop: not judged: 15 decode steps of 20 needed",
            "a measured test needs at least 20 steps of a phase: *",
            "E   assert 1 == 2",
            "`cbtop check` ended with exit code -9",
            "there is no base file *; write it with `pytest --cbtop-update` at the commit to compare with",
            "threshold 'step <= fast': 'fast' is not a number *",
            "the mark cbtop takes thresholds as texts: *",
            "SKIPPED * no GPU",
        ]
    )
    *_, last = checks(pytester)
    assert (last.startswith("slower "), last.endswith(" step <= 1s loss==0")) == (True, True)
    assert [line for line in checks(pytester) if line.startswith(("base", "threshold", "keyword", "skipped"))] == []


@pytest.mark.slow
def test_options_reach_the_check_and_accept_only_what_is_unsure(pytester: pytest.Pytester) -> None:
    made_tests(pytester, NAMES)
    done = session(pytester, "--cbtop-allow-unsure", "--cbtop-anyway")
    done.assert_outcomes(failed=7, skipped=1, passed=2)
    assert [line for line in checks(pytester) if "--anyway --allow-unsure" not in line] == []


@pytest.mark.slow
def test_an_update_learns_what_is_compared_and_judges_the_rest(pytester: pytest.Pytester) -> None:
    more = """
        @pytest.mark.cbtop
        def test_default(): ...

        @pytest.mark.cbtop("step <= 1.05x", "loss==0")
        def test_relative(): ...

        @pytest.mark.cbtop("graph==base")
        def test_graph(): ...

        @pytest.mark.cbtop("step <= 1.05x", "bricks==few")
        def test_wrong(): ...

        def test_added(cbtop_budget): ...
    """
    made_tests(pytester, ("holds", "fails"), more)
    session(pytester, "--cbtop-update").assert_outcomes(passed=5, failed=2)
    learned = [line.partition(" ")[0] for line in checks(pytester) if line.endswith(".json --learn 6 --force")]
    assert learned == ["default", "relative", "graph", "added"]


@pytest.mark.parametrize(
    ("threshold", "said"),
    [
        ("Atention<=1.05x", "there is no brick 'Atention'"),
        ("prefill.p50<=1.05x", "there is no"),
        ("prefill.bricks==base", "there is no phase 'prefill'"),
        ("bricks==few", "expected a whole number or `base`"),
    ],
)
def test_a_threshold_on_what_a_base_file_lacks_fails_at_its_update(tmp_path: Path, threshold: str, said: str) -> None:
    file = tmp_path / "base.json"
    contents = Contents((PhaseContents("decode", 40, {}, {Total.BRICKS: (4, 4)}),))
    write_runs(file, [replace(made_run(seed, STEADY), contents=contents) for seed in (1, 2)])
    check_names(["decode.p50<=1.05x", "RmsNorm@1.p99<=9us", "decode.bricks==base"], file)
    with pytest.raises(MeasurementError, match=said):
        check_names([threshold], file)


@pytest.mark.slow  # The default run skips this test, because xdist starts two more processes.
def test_parallel_tests_are_warned_of(pytester: pytest.Pytester) -> None:
    made_tests(pytester, ("holds", "fails"))
    done = session(pytester, "-p", "xdist", "-n", "2")
    done.assert_outcomes(passed=1, failed=1, warnings=2)
    done.stdout.fnmatch_lines(["*ParallelRunWarning: other tests ran at the same time and disturb *"])


def test_an_installed_plugin_loads_nothing_slow_and_warns_of_nothing(tmp_path: Path) -> None:
    """pytest warns if it cannot rewrite the asserts of a plugin because the plugin is already imported.

    pytest finds the modules of the plugin in the file list of an installed wheel.
    """
    installed = tmp_path / "cbtop-9.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: cbtop\nVersion: 9\n")
    (installed / "entry_points.txt").write_text("[pytest11]\ncbtop = cbtop.pytest_plugin\n")
    (installed / "RECORD").write_text("cbtop/__init__.py,,\ncbtop/pytest_plugin.py,,\n")
    (tmp_path / "test_plain.py").write_text(
        "import sys\n\ndef test_plain():\n"
        "    slow = {'numpy', 'zmq', 'msgpack', 'torch'} & set(sys.modules)\n"
        "    ours = {name for name in sys.modules if name.partition('.')[0] == 'cbtop'}\n"
        "    assert (slow, ours) == (set(), {'cbtop', 'cbtop.version', 'cbtop.pytest_plugin'})\n"
    )
    program = "import cbtop, pytest, sys; sys.exit(pytest.main(sys.argv[1:]))"
    others = ("hypothesispytest", "syrupy", "textual-snapshot", "xdist", "asyncio", "anyio")
    plain = [*(word for name in others for word in ("-p", f"no:{name}")), "-W", "error"]
    done = subprocess.run(
        [sys.executable, "-c", program, *plain, "--strict-markers", "--rootdir", str(tmp_path), str(tmp_path)],
        cwd=tmp_path,
        env={name: value for name, value in os.environ.items() if name != "PYTEST_DISABLE_PLUGIN_AUTOLOAD"}
        | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
