"""Find the fastest setting of a model.

Measured bricks suggest settings, and each is measured in turns with the best one.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from cbtop.comparison.noise import LEAST_PERCENT, MIN_BLOCKS
from cbtop.protocol.attributes import Work
from cbtop.tuning.measuring import Bench, InterruptedTurnError, Setting, TuningRequest
from cbtop.tuning.paired import PairedTest, Round, in_turns, pairs_of

if TYPE_CHECKING:  # imported for types only, because this import loads Numba
    from cbtop.profiler.session import Report

MAX_ROUNDS = 20  # A try has at most this many rounds. More rounds would only show negligible differences.
PROFILED = 3  # This many requests are recorded to find the time of each brick.
SPARE = 1.2  # A later round may take this many times as long as the first round.
PREFILL, DECODE, REQUEST = "prefill", "decode", "request"
# Names of kernel contracts. The kernels in PRODUCTS change with the type of matrix product. The kernels in CACHES
# change with the type of the KV cache.
PRODUCTS = frozenset({"linear", "linear_int8", "linear_bf16", "qkv", "gated", "attention_bf16"})
CACHES = frozenset({"attention", "attention_bf16", "kv_write"})


@dataclass(frozen=True, slots=True)
class Share:
    """The share of a brick in the time of a request, over all layers.

    `is_parallel` is true if one of its kernels uses threads. `contracts` are the contracts of its kernels.
    """

    brick: str
    part: float
    us: float
    is_parallel: bool
    contracts: frozenset[str]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A setting to try, with the reason from measured bricks.

    `limit` is the maximum speed-up of a request by Amdahl's law (derived), or None if the bricks set no limit.
    `numbers` describes how the results of the setting differ. It is "" if they are equal.
    """

    setting: Setting
    why: str
    limit: float | None
    numbers: str = ""


@dataclass(frozen=True, slots=True)
class Try:
    """The comparison of a candidate setting with the best setting, measured: the times of whole requests, of prefill
    and of decode.
    """

    candidate: Candidate
    beside: Setting
    pairs: tuple[PairedTest, ...]

    @property
    def request(self) -> PairedTest:
        return next(pair for pair in self.pairs if pair.name == REQUEST)

    @property
    def is_kept(self) -> bool:
        return bool(self.request.is_beyond_noise) and self.request.ratio > 1

    @property
    def rounds_to_tell(self) -> int | None:
        """About how many rounds are needed to distinguish LEAST_PERCENT from noise, if the noise does not change
        (derived).

        None if the measured difference is beyond noise, or if the measured rounds are enough.
        """
        change = self.request.change
        if change is None or self.request.is_beyond_noise or change.half <= LEAST_PERCENT / 100:
            return None
        return math.ceil(len(self.request.a_ns) * (100 * change.half / LEAST_PERCENT) ** 2)


@dataclass(frozen=True, slots=True)
class Untried:
    """A setting that was not tried. `why` is the reason, or the condition under which it is tried."""

    what: str
    why: str


@dataclass(frozen=True, slots=True)
class Tuned:
    """The result of `BrickTuner.tune`.

    `best` equals `before` if no measured setting was faster. `together` compares the two directly, if at least two
    tries were successful and there was time. `load_percent` is the share of all processors that other processes used
    meanwhile.
    """

    request: TuningRequest
    before: Setting
    best: Setting
    shares: tuple[Share, ...]
    tries: tuple[Try, ...]
    untried: tuple[Untried, ...]
    together: PairedTest | None
    load_percent: float
    was_interrupted: bool

    @property
    def has_told(self) -> bool:
        """Whether the difference between any setting and its comparison setting was beyond noise."""
        return any([one.request.is_beyond_noise for one in self.tries])

    @property
    def gain(self) -> PairedTest | None:
        """The measured comparison of the best setting with the setting before.

        None if both settings are equal, or if they were not measured together.
        """
        kept = [one for one in self.tries if one.is_kept]
        return kept[0].request if len(kept) == 1 else self.together


class BrickTuner:
    """Finds the fastest setting of a model on this machine, starting from the current setting.

    The tuner records the bricks of some requests. The bricks suggest faster settings, and limit the possible gain of
    each setting. The tuner measures these settings in turns with the best setting, and keeps a setting only if whole
    requests are faster beyond chance. A setting is not tried if it could gain less than 3 %, or if no time is left.

        bench = Bench(Path("model.gguf"), TuningRequest(128, 32).tokens)
        tuned = BrickTuner(bench, Setting(threads=1), TuningRequest(128, 32)).tune(budget_s=120)
        print(tuned.best.text, tuned.gain)

    `budget_s` (seconds of `clock_s`) limits measurements, but not loading and compiling. `progress` is called with
    the current task and its completed share. `should_stop` is called between tokens. If `should_stop` returns true,
    the tuner returns the results that it already has. Raises ComputeError if the model cannot be run.
    """

    def __init__(
        self,
        bench: Bench,
        setting: Setting,
        request: TuningRequest,
        *,
        progress: Callable[[str, float | None], None] = lambda what, done: None,
        should_stop: Callable[[], bool] = lambda: False,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._bench = bench
        self._setting = setting
        self._request = request
        self._progress = progress
        self._should_stop = should_stop
        self._clock_s = clock_s
        self._left_s = 0.0
        self._request_s = 0.0  # seconds that a request took with the best setting, at its latest measurement
        self._was_interrupted = False

    def tune(self, budget_s: float) -> Tuned:
        """Try settings for at most `budget_s` seconds, and return the best. The time for loading and compiling is not
        limited.
        """
        from cbtop.compute.backends import OtherProcesses, available_threads

        self._left_s, self._was_interrupted = budget_s, False
        best, tries, together = self._setting, list[Try](), None
        shares: tuple[Share, ...] = ()
        candidates, untried = list[Candidate](), list[Untried]()
        others = OtherProcesses()
        try:
            self._request_s = self._warm_up(best)
            begun_s = self._clock_s()
            shares = self.shares()
            self._left_s -= self._clock_s() - begun_s
            candidates, untried = named(self._setting, shares, available_threads(), self.has_int8())
        except (InterruptedTurnError, KeyboardInterrupt):
            self._was_interrupted = True
        for number, candidate in enumerate(candidates):
            # The best setting has the changes of earlier tries. Add only what this candidate changes.
            now = replace(candidate, setting=changed(best, self._setting, candidate.setting))
            found = self._tried(now, best, self._left_s / (len(candidates) - number), len(candidates))
            if isinstance(found, Untried):
                untried.append(found)
                continue
            tries.append(found)
            best = now.setting if found.is_kept else best
        if sum(one.is_kept for one in tries) > 1:
            found = self._tried(Candidate(best, "all of them together", None), self._setting, self._left_s, 1)
            together = None if isinstance(found, Untried) else found.request
        return Tuned(
            self._request, self._setting, best, shares, tuple(tries), tuple(untried), together, others.percent(),
            self._was_interrupted,
        )  # fmt: skip

    def has_int8(self) -> bool:
        """Return whether the model uses int8 products on this machine by default.

        It does not if its weights are floats, if the processor has no int8 instructions, or if weights are read
        faster in their stored layout.
        """
        decoder = self._bench.decoder(replace(self._setting, is_exact=False))
        works = (brick.definition.work for brick in decoder.bricks.places())
        return any(isinstance(work, Work) and work.dtype == "int8" for work in works)

    def _warm_up(self, setting: Setting) -> float:
        """Run a request to compile the kernels. Then run a second one and return how many seconds it took."""
        self._progress(f"compiling kernels: {setting.text}", None)
        self._bench.request_ns(setting, self._request, self._should_stop)
        return sum(self._bench.request_ns(setting, self._request, self._should_stop)) / 1e9

    def shares(self) -> tuple[Share, ...]:
        """Record requests with the setting in use. Return the share of each brick in the time of these requests."""
        from cbtop.compute.jit.cpu import BF16_PAYS
        from cbtop.profiler.profiler import BrickProfiler
        from cbtop.profiler.recorder import RingRecorder

        self._progress("recording the bricks", None)
        # Write the ring into a separate directory, because daemons do not read it there.
        with tempfile.TemporaryDirectory(prefix="cbtop-tune-") as directory:
            profiler = BrickProfiler(recorder=RingRecorder(Path(directory)))
            decoder = self._bench.recorded(self._setting, profiler)
            for _ in range(PROFILED):
                self._request.run(decoder, self._should_stop)
            report = profiler.report()
            profiler.close()
        kernels: dict[str, tuple[bool, frozenset[str]]] = {}
        for brick in decoder.bricks.places():
            names = frozenset(kernel.contract.name for kernel in brick.kernels)
            if "attention" in names and BF16_PAYS and self._setting.cache_type == "f16":
                names |= {"attention_bf16"}  # If int8 products are used, this kernel replaces the kernel `attention`.
            kernels[brick.spec.name] = any(kernel.parallel for kernel in brick.kernels), names
        return shares_of(report, kernels)

    def _tried(self, candidate: Candidate, beside: Setting, part_s: float, tries: int) -> Try | Untried:
        """Compare a candidate with a second setting for `part_s` seconds. There are `tries` candidates.

        If the candidate is not tried, returns an Untried with the reason.
        """
        name = candidate.setting.text
        if self._was_interrupted:
            return Untried(name, "it was interrupted")
        if part_s < (least_s := MIN_BLOCKS * self._request_s * SPARE):
            # Even measuring this candidate's speed would take three requests, so do not try it.
            why = (
                f"{MIN_BLOCKS} rounds take {math.ceil(least_s)} s or more, and {max(part_s, 0):.0f} s are left for it"
            )
            return Untried(name, f"{why}: give a larger --budget")
        try:
            round_s = self._warm_up(candidate.setting)
            self._request_s = sum(self._bench.request_ns(beside, self._request, self._should_stop)) / 1e9
            round_s += self._request_s
        except (InterruptedTurnError, KeyboardInterrupt):
            self._was_interrupted = True
            return Untried(name, "it was interrupted")
        rounds = min(int(part_s / (round_s * SPARE)), MAX_ROUNDS)
        if rounds < MIN_BLOCKS:
            wanted_s = math.ceil(MIN_BLOCKS * round_s * SPARE)
            why = f"{MIN_BLOCKS} rounds take {wanted_s} s, and {max(part_s, 0):.0f} s are left for it"
            return Untried(name, f"{why}: give a larger --budget")
        begun_s = self._clock_s()
        found = self._rounds(candidate, beside, rounds, begun_s + part_s)
        self._left_s -= self._clock_s() - begun_s
        if len(found) < MIN_BLOCKS:
            return Untried(
                name,
                "it was interrupted"
                if self._was_interrupted
                else f"after {len(found)} rounds its part of the time was over: give a larger --budget",
            )
        tokens = {REQUEST: self._request.tokens, PREFILL: self._request.n_prompt, DECODE: self._request.n_gen}
        pairs = (replace(pair, compared=tries * len(tokens)) for pair in pairs_of(found, tokens))
        return Try(candidate, beside, tuple(pairs))

    def _rounds(self, candidate: Candidate, beside: Setting, rounds: int, end_s: float) -> list[Round]:
        """Measure both settings in rounds, and return the completed rounds.

        Measuring stops after a round that ends later than `end_s`, or at an interruption.
        """

        def turn(setting: Setting) -> Callable[[], Mapping[str, int]]:
            def run() -> Mapping[str, int]:
                prefill_ns, decode_ns = self._bench.request_ns(setting, self._request, self._should_stop)
                return {REQUEST: prefill_ns + decode_ns, PREFILL: prefill_ns, DECODE: decode_ns}

            return run

        def show(number: int, side: int) -> None:
            self._progress(f"trying: {candidate.setting.text} beside {beside.text}", (number + side / 2) / rounds)

        found: list[Round] = []
        try:
            for one in in_turns([(turn(beside), turn(candidate.setting))], rounds, show):
                found.append(one)
                if self._clock_s() > end_s:
                    break
        except (InterruptedTurnError, KeyboardInterrupt):
            self._was_interrupted = True
        return found


def shares_of(report: Report, kernels: Mapping[str, tuple[bool, frozenset[str]]]) -> tuple[Share, ...]:
    """Return the share of each brick in the wall time of the recorded steps, the largest first.

    `kernels` maps the name of a brick to a pair: whether one of its kernels is parallel, and the contracts of its
    kernels.
    """
    return tuple(
        Share(brick.name, brick.exclusive_ns / report.recorded_ns, brick.exclusive_ns / 1e3, *kernels[brick.name])
        for brick in report.bricks
        if brick.name in kernels
    )


def named(
    setting: Setting, shares: Collection[Share], processors: int, has_int8: bool
) -> tuple[list[Candidate], list[Untried]]:
    """Return the settings that the bricks suggest with the most promising first, and the other settings."""
    candidates, untried = [], []
    parallel = sum(share.part for share in shares if share.is_parallel)
    spread = f"{_percent(parallel)} of a request is in bricks that spread over threads"
    for threads in _other_threads(setting.threads, processors):
        ratio = 1 / (1 - parallel + parallel * setting.threads / threads)
        wanted = replace(setting, threads=threads)
        if threads < setting.threads:
            why = f"{spread}: on fewer they take longer, unless those wait for memory or for other processes"
            candidates.append(Candidate(wanted, why, None))
        elif _is_worth(ratio):
            candidates.append(Candidate(wanted, spread, ratio))
        else:
            untried.append(Untried(wanted.text, f"{spread}: it could gain {_gain(ratio)} at most"))
    if setting.threads == processors:
        untried.append(Untried("more threads", f"this process may run on {processors} processors"))
    products = _of(shares, PRODUCTS)
    takes = f"{', '.join(products.names) or 'no brick'} take{'' if len(products.names) > 1 else 's'}"
    if not has_int8:
        untried.append(Untried("int8 products", "this model has none on this machine: all are exact"))
    else:
        other = replace(setting, is_exact=not setting.is_exact)
        numbers = "its products round activations to int8" if setting.is_exact else "its products are exact"
        _add(candidates, untried, Candidate(other, f"{takes} {_percent(products.part)}", products.limit, numbers))
    caches = _of(shares, CACHES)
    other = replace(setting, cache_type="f32" if setting.cache_type == "f16" else "f16")
    takes = f"{', '.join(caches.names) or 'no brick'} take{'' if len(caches.names) > 1 else 's'}"
    numbers = f"its KV cache holds {other.cache_type}"
    _add(candidates, untried, Candidate(other, f"{takes} {_percent(caches.part)}", caches.limit, numbers))
    untried += [
        Untried("batch", "the decoder runs one sequence at a time"),
        Untried("backend", "what a GPU takes is not known from bricks of a processor: cbtop bench --backend cuda"),
        Untried("layout", "exact products take weights as they lie in the file, others interleaved: --exact is both"),
        Untried("tier", "kernels are compiled for the best that the processor has, once in a process"),
    ]
    # First come settings that keep the results, then settings that change them. In both groups, the largest possible
    # speed-up comes first.
    return sorted(candidates, key=lambda one: (bool(one.numbers), -(one.limit or 0.0))), untried


@dataclass(frozen=True, slots=True)
class _Touched:
    """The bricks that a change of the setting affects, and their share of a request's time."""

    names: tuple[str, ...]
    part: float

    @property
    def limit(self) -> float:
        """The speed-up of a request if the affected bricks took no time at all."""
        return 1 / (1 - self.part) if self.part < 1 else math.inf


def _of(shares: Collection[Share], contracts: frozenset[str]) -> _Touched:
    touched = [share for share in shares if share.contracts & contracts]
    return _Touched(tuple(share.brick for share in touched), sum(share.part for share in touched))


def _add(candidates: list[Candidate], untried: list[Untried], one: Candidate) -> None:
    if one.limit is not None and not _is_worth(one.limit):
        untried.append(Untried(one.setting.text, f"{one.why} of a request: it could gain {_gain(one.limit)} at most"))
    else:
        candidates.append(replace(one, why=f"{one.why} of a request"))


def _is_worth(limit: float) -> bool:
    return 100 * (limit - 1) >= LEAST_PERCENT


def _gain(limit: float) -> str:
    return _percent(limit - 1)


def _percent(part: float) -> str:
    return f"{100 * part:.1f} %"


def _other_threads(threads: int, processors: int) -> list[int]:
    """Return the numbers of threads to try: as many as processors, twice as many as now, half as many, and one."""
    wanted = (processors, 2 * threads, threads // 2, 1)
    return [each for each in dict.fromkeys(wanted) if 1 <= each <= processors and each != threads]


def changed(best: Setting, before: Setting, wanted: Setting) -> Setting:
    """Return a copy of the setting `best`.

    Each value that differs between `wanted` and `before` is taken from `wanted`.
    """
    return Setting(
        wanted.threads if wanted.threads != before.threads else best.threads,
        wanted.is_exact if wanted.is_exact != before.is_exact else best.is_exact,
        wanted.cache_type if wanted.cache_type != before.cache_type else best.cache_type,
    )
