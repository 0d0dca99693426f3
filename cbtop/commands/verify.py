"""`cbtop verify`: check every kernel against its reference.

Each check must also reject outputs that are made wrong on purpose.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

from cbtop.commands.shared.contract_lines import own_brick_sarif
from cbtop.commands.shared.crossovers import go_by_kept_crossovers
from cbtop.commands.shared.domain_checks import ALL, DOMAIN_FORMATS, check_domain, failed_names
from cbtop.commands.shared.junit import junit
from cbtop.commands.shared.names import unknown
from cbtop.commands.shared.progress import ProgressLine
from cbtop.commands.shared.sarif import Failure, SarifRule, sarif
from cbtop.compute.settings import BACKENDS
from cbtop.errors import FailedCheckError, UsageError
from cbtop.reports.tables import Table, table
from cbtop.units import NOT_MEASURED
from cbtop.units import count as counted

if TYPE_CHECKING:  # imported for types only, because Numba loads slowly
    from cbtop.compute.contracts import Contract
    from cbtop.compute.model_difference import ModelDifference, TensorError
    from cbtop.compute.verification import Run, Variant, Verified
    from cbtop.protocol.messages import CheckResult

DESCRIPTION = (
    "Run every kernel, as a decoder may run it (each weight format, one token and many, one thread and two, each "
    "type of KV cache), on inputs of four sizes, compare it with its reference, with the same tokens one by one and, "
    "where it is fused, with the kernels that it is made of, and check what its contract says "
    "must hold before and after a call. Then plant the faults that the contract names; one that no check finds is a "
    "failure, too. With --model also every brick of a model, in both kinds of pass, and its logits beside those of a "
    "pass in float64 over 140 random tokens. With --against no kernel is checked: the weights of two files of a "
    "model are compared, and what each layer predicts. A tensor fails if its error is more than that of its format. "
    "With module:function, the checks of this brick of yours are evaluated instead, on the cases of its contract. "
    "With --domain, functions of NumPy, SciPy, scikit-image and CuPy are verified with contracts, and no kernel."
)
EPILOG = """\
examples:
  cbtop verify                                  all kernels: about a minute
  cbtop verify DownProjection                   those that one brick runs
  cbtop verify my_norms:fast_rms_norm           a brick of yours, on the cases of its contract
  cbtop verify my_norms:soft --cases my_norms:cases    a brick without a contract, on arguments that a function yields
  cbtop verify --model qwen2.5-1.5b-q4_k_m.gguf
  cbtop verify --model q4.gguf --against f16.gguf    the error of each tensor, and of each layer's prediction
  cbtop verify --backend cuda                   the kernels of a GPU
  cbtop verify --domain fft                     the FFTs of NumPy; with --backend cuda those of CuPy
  cbtop verify --domain all
  cbtop verify --format junit > verify.xml      for CI
  cbtop verify --format sarif > verify.sarif    for code hosts: failures beside the contracts' lines
  cbtop verify my_norms:fast_rms_norm --format sarif    the same for a brick of yours

exit codes: 0 all pass, 1 runtime error, 2 usage or a model that cannot be run, 4 a check or a tensor failed
"""
SCHEMA = "cbtop.verify/1"
AGAINST_SCHEMA = "cbtop.verify-against/1"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "brick", nargs="?", metavar="BRICK",
        help="only what this brick runs, and whole passes (default: everything); or module:function, a function that "
        "`BrickProfiler.timed` has wrapped with a BrickDefinition",
    )  # fmt: skip
    parser.add_argument(
        "--cases", metavar="MODULE:FUNCTION",
        help="with module:function: a function that yields a tuple of arguments for each call to try (default: the "
        "cases of the brick's contract)",
    )  # fmt: skip
    parser.add_argument(
        "--domain", metavar="NAME",
        help="functions of libraries: blas, elementwise, fft, image, sparse, solvers, random, contraction, or "
        f"{ALL}; formats are {', '.join(DOMAIN_FORMATS)}",
    )  # fmt: skip
    parser.add_argument("--model", type=Path, metavar="FILE.gguf", help="check the bricks of this model, too")
    parser.add_argument(
        "--against", type=Path, metavar="FILE.gguf", help="compare the weights of --model with this file of it"
    )
    parser.add_argument(
        "--min-cosine", type=_cosine, metavar="C",
        help="with --against: a tensor below this cosine fails, or below the SNR of such a tensor "
        "(default: by the formats of the two tensors)",
    )  # fmt: skip
    parser.add_argument(
        "--backend", choices=BACKENDS, default="cpu",
        help="the kernels of this processor, or those of the first NVIDIA GPU (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--format", choices=tuple(FORMATS), default="text",
        help="of what is printed (default: text); with --against only text and json",
    )  # fmt: skip


def run(options: argparse.Namespace) -> int:
    line = ProgressLine(sys.stderr)
    if options.domain:
        return _verify_domain(options, line)
    if options.against:
        return _compare_files(options, line)
    if options.min_cosine is not None:
        raise UsageError("--min-cosine is a limit of --against; pass both")
    if options.brick and ":" in options.brick:
        return _verify_own(options)
    if options.brick and "." in options.brick:
        module, _, function = options.brick.rpartition(".")
        raise UsageError(f"{options.brick} is not the name of a brick; did you mean {module}:{function}?")
    if options.cases:
        raise UsageError("--cases belongs to a brick of yours: cbtop verify module:function --cases module:function")
    line.show("loading kernels")
    # Imported here, because Numba loads slowly.
    from cbtop.compute.errors import ComputeError
    from cbtop.compute.verification import run_here, variants, variants_on_gpu, verified
    from cbtop.compute.workload import WHOLE_PASS

    go_by_kept_crossovers(line)
    try:
        on_gpu = options.backend == "cuda"
        by = _by_gpu() if on_gpu else run_here
        chosen = _chosen(list(variants_on_gpu() if on_gpu else variants()), options.brick)
        # Check the model before the kernels. The kernels take a minute, and an unusable model file should be reported
        # earlier.
        model = _of_model(options.model, options.backend, line) if options.model else []
        kernels = []
        for done, variant in enumerate(chosen):
            line.show(f"verifying: {variant.kernel.name} {variant.how}", done / len(chosen))
            kernels.append(verified(variant, run=by))
    except ComputeError as error:
        raise UsageError(str(error)) from error
    finally:
        line.clear()
    if options.brick:
        # Only the checks of whole passes through the model run a brick with its real inputs. So keep them, even for
        # one chosen brick.
        model = [result for result in model if options.brick == result.brick or result.assertion == WHOLE_PASS]
    return _print(options.format, kernels, model)


def _verify_own(options: argparse.Namespace) -> int:
    """Verify a brick of the user."""
    if options.model or options.backend != "cpu":
        raise UsageError("module:function takes no --model and no --backend cuda")
    # Imported here, because Numba loads slowly.
    from cbtop.compute.errors import ContractError
    from cbtop.compute.own_bricks import cases_of, output_to_stderr, own_brick, verify_brick

    sys.path.insert(0, os.getcwd())  # the module is the user's
    try:
        with output_to_stderr():
            brick = own_brick(options.brick)
            found = verify_brick(brick, cases_of(brick, options.cases))
    except SystemExit as error:
        raise UsageError(f"{options.brick}: importing it, or its cases, calls sys.exit({error.code!r})") from error
    except ContractError as error:
        raise UsageError(str(error)) from error
    if options.format == "sarif":
        return _write(own_brick_sarif(brick, found), found, [])
    return _print(options.format, found, [])


def _verify_domain(options: argparse.Namespace, line: ProgressLine) -> int:
    """Verify functions of libraries. Raises FailedCheckError if a check failed, or did not find a fault."""
    if options.brick or options.model or options.against or options.cases or options.min_cosine is not None:
        raise UsageError("--domain takes no brick and no model; it takes --backend and --format")
    if options.format not in DOMAIN_FORMATS:
        raise UsageError(f"--format {options.format}: the formats of --domain are {', '.join(DOMAIN_FORMATS)}")
    checks = check_domain(options.domain, options.backend, line)
    sys.stdout.write(DOMAIN_FORMATS[options.format](checks))
    sys.stdout.flush()
    if failed := failed_names(checks):
        more = f" and {len(failed) - 1} more" if len(failed) > 1 else ""
        raise FailedCheckError(f"{failed[0]}{more} failed")
    return 0


def _print(form: str, kernels: Sequence[Verified], model: Sequence[CheckResult]) -> int:
    """Print the results. Raises FailedCheckError if a check failed, or did not find a fault."""
    return _write(FORMATS[form](kernels, model), kernels, model)


def _write(text: str, kernels: Sequence[Verified], model: Sequence[CheckResult]) -> int:
    """Print `text`. Raises FailedCheckError if a check failed, or did not find a fault."""
    from cbtop.compute.workload import WHOLE_PASS

    sys.stdout.write(text)
    sys.stdout.flush()
    failed = [f"{one.kernel} ({one.how or 'as it is'}){_beside(one)}" for one in kernels if not one.passed]
    failed += [
        f"{'a whole pass' if one.assertion == WHOLE_PASS else one.brick} of the model"
        for one in model
        if not one.passed
    ]
    if failed:
        more = f" and {len(failed) - 1} more" if len(failed) > 1 else ""
        raise FailedCheckError(f"{failed[0]}{more} failed")
    return 0


def _cosine(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not -1 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from -1 to 1")
    return value


def _compare_files(options: argparse.Namespace, line: ProgressLine) -> int:
    """Print the differences between the weights of the models --model and --against. No kernel runs."""
    if not options.model:
        raise UsageError("--against compares two files; pass the other one as --model")
    if options.brick or options.backend != "cpu" or options.format not in ("text", "json"):
        raise UsageError("--against takes no brick and no --backend cuda; its formats are text and json")
    from cbtop.compute.errors import ComputeError
    from cbtop.compute.model_difference import model_difference

    try:
        found = model_difference(options.model, options.against, line.show, options.min_cosine)
    except ComputeError as error:
        raise UsageError(str(error)) from error
    finally:
        line.clear()
    if options.format == "json":
        files = {"schema": AGAINST_SCHEMA, "model": str(options.model), "against": str(options.against)}
        tensors = [
            asdict(one) | {"quant_trace": one.verdict, "min_snr_db": one.min_snr_db, "passed": one.passed}
            for one in found.tensors
        ]
        text = json.dumps(files | asdict(found) | {"tensors": tensors}, allow_nan=False) + "\n"
    else:
        text = _difference_text(found)
    sys.stdout.write(text)
    sys.stdout.flush()
    failed = [one for one in found.tensors if not one.passed]
    if failed:
        worst = min(failed, key=lambda one: one.cosine)
        more = f"; {len(failed) - 1} more failed" if len(failed) > 1 else ""
        limit = f"at least {worst.min_cosine:.6f}"
        if worst.min_snr_db is not None:
            limit += f" and {worst.min_snr_db:.1f} dB"
        values = f"the cosine is {worst.cosine:.6f} and the SNR {_snr(worst)} dB"
        raise FailedCheckError(f"tensor {worst.name}: {values}; expected {limit}{more}")
    return 0


def _difference_text(found: ModelDifference) -> str:
    rows: Table = [
        (
            "",
            "tensor",
            "format",
            "against",
            "quant trace",
            "max error",
            "SNR dB",
            "cosine",
            "at least (cosine, SNR dB)",
        )
    ]
    rows += [
        (
            "✓" if one.passed else "✗",
            one.name,
            one.format,
            one.against_format,
            one.verdict,
            f"{one.max_abs_error:.1e}",
            _snr(one),
            f"{one.cosine:.6f}",
            _limits(one),
        )
        for one in found.tensors
    ]
    layers: Table = [("layer", "mean KL", "largest")]
    layers += [(str(one.layer), f"{one.mean:.2e}", f"{one.largest:.2e}") for one in found.layers]
    failed = [one.name for one in found.tensors if not one.passed]
    passed = f"{len(found.tensors) - len(failed)} of {len(found.tensors)} tensors pass"
    return (
        f"{table(rows, left=5)}\n\n{table(layers, left=0)}\n\n"
        "KL: divergence of a layer's prediction (softmax of final norm and output matrix) from that of --against, in "
        f"nats,\nof float64 passes over {found.tokens} random tokens. Quant trace: ok above a cosine of 0.995, "
        "critical below 0.99; ✗ fails the limits of its formats\n"
        f"{passed}{': ✗ ' if failed else ''}{', '.join(failed)}\n"
    )


def _snr(one: TensorError) -> str:
    return "equal" if not one.max_abs_error else NOT_MEASURED if one.snr_db is None else f"{one.snr_db:.1f}"


def _limits(one: TensorError) -> str:
    return f"{one.min_cosine:.6f}" + ("" if one.min_snr_db is None else f" {one.min_snr_db:5.1f}")


def _chosen(all_of_them: Sequence[Variant], brick: str | None) -> Sequence[Variant]:
    if brick is None:
        return all_of_them
    names = list(dict.fromkeys(name for variant in all_of_them for name in variant.bricks))
    if brick not in names:
        raise UsageError(unknown("brick", brick, names))
    return [variant for variant in all_of_them if brick in variant.bricks]


def _by_gpu() -> Run:
    """Return a function that runs a kernel on the GPU. Raises ComputeError without a GPU."""
    from cbtop.compute.gpu.arguments import run_on
    from cbtop.compute.gpu.device import Gpu

    return partial(run_on, Gpu())


def _of_model(path: Path, backend: str, line: ProgressLine) -> list[CheckResult]:
    """Return the checks of every brick of a model, and of the logits of whole passes.

    A brick is checked with one token and with several. Every check runs with the fastest products and with exact
    ones, and on a CPU with one thread and with all.
    """
    from cbtop.compute.backends import available_threads
    from cbtop.compute.workload import verify_model, verify_pass

    found: list[CheckResult] = []
    is_on_cpu = backend == "cpu"
    for threads, is_exact in product(sorted({1, available_threads()}) if is_on_cpu else [1], (False, True)):
        where = f"{threads} thread{'s' * (threads > 1)}" if is_on_cpu else backend
        how = f"{where}, {'exact' if is_exact else 'as fast as it can'}"
        line.show(f"verifying the model's bricks: {how}")
        results = verify_model(path, threads, is_exact=is_exact, backend=backend)
        line.show(f"verifying whole passes of the model: {how}; in float64 that takes its time")
        results += verify_pass(path, threads, is_exact=is_exact, backend=backend)
        found += [replace(one, note=", ".join(filter(None, (how, one.note)))) for one in results]
    return found


def _text(kernels: Sequence[Verified], model: Sequence[CheckResult]) -> str:
    rows: Table = [("", "kernel", "with", "beside", "error", "allowed", "planted faults")]
    rows += [
        (
            "✓" if one.passed else "✗",
            one.kernel,
            one.how,
            one.peer,
            _error(one),
            f"{one.tolerance:.1e}" if one.peer or one.tolerance else "",
            f"{one.planted} found" if not one.missed else "MISSED: " + ", ".join(one.missed),
        )
        for one in kernels
    ]
    lines = [table(rows, left=4)]
    lines += [f"✗ {_name(one)}: fails {', '.join(one.failed)}" for one in kernels if one.failed]
    if model:
        rows = [("", "brick of the model", "check", "error", "allowed", "with")]
        rows += [
            (
                "–" if one.skipped else "✓" if one.passed else "✗",
                one.brick,
                one.assertion,
                "skipped" if one.skipped else _error(one),
                "" if one.tolerance is None else f"{one.tolerance:.1e}",
                ": ".join(filter(None, (one.note, one.skipped))),
            )
            for one in model
        ]
        lines += ["", table(rows, left=3)]
    passed = sum(one.passed for one in kernels) + sum(one.passed and not one.skipped for one in model)
    planted = counted(sum(one.planted for one in kernels))
    lines += ["", f"{passed} of {len(kernels) + len(model)} pass; {planted} faults were planted"]
    return "\n".join(lines) + "\n"


def _name(one: Verified) -> str:
    return " ".join(filter(None, (one.kernel, one.how))) + _beside(one)


def _beside(one: Verified) -> str:
    """Return a text that names the implementation a kernel was compared with, or "" if this was the reference."""
    from cbtop.compute.verification import REFERENCE

    return "" if one.peer in (REFERENCE, "") else f" beside {one.peer}"


def _error(one: Verified | CheckResult) -> str:
    """Return the numerical error of a check as text. Returns "NaN" or "infinity" if a value was not finite, and "" if
    the check has no error.
    """
    return one.not_finite or ("" if one.max_error is None else f"{one.max_error:.1e}")


def _json(kernels: Sequence[Verified], model: Sequence[CheckResult]) -> str:
    document = {
        "schema": SCHEMA,
        "kernels": [asdict(one) | {"passed": one.passed} for one in kernels],
        "model": [asdict(one) | ({"passed": None} if one.skipped else {}) for one in model],
    }
    return json.dumps(document, allow_nan=False) + "\n"


def _junit(kernels: Sequence[Verified], model: Sequence[CheckResult]) -> str:
    of_kernels = [
        (
            one.kernel,
            _name(one),
            [*one.failed, *_met(one), *(f"does not notice {fault}" for fault in one.missed)],
            "",
            "",
        )
        for one in kernels
    ]
    of_bricks = [
        (
            one.brick,
            f"{one.assertion} ({one.note})",
            [] if one.passed else _met(one) or [f"error {_error(one)} of {one.tolerance}"],
            one.skipped,
            "",
        )
        for one in model
    ]
    return junit("cbtop verify", [("kernels", of_kernels), *([("model", of_bricks)] if model else [])])


def _met(one: Verified | CheckResult) -> list[str]:
    return [f"met {one.not_finite}"] if one.not_finite else []


def _sarif(kernels: Sequence[Verified], model: Sequence[CheckResult]) -> str:
    from cbtop.compute.verification import variants

    contract_of: dict[str, Contract] = {}
    for variant in variants():
        for name in (variant.kernel.contract.name, *variant.bricks):
            contract_of.setdefault(name, variant.kernel.contract)
    failed = [
        (contract_of[one.contract], what, f"{_name(one)}: {said}")
        for one in kernels
        for what, said in (
            *(
                (failure.rpartition(" at size ")[0], ", ".join([f"fails {failure}", *_met(one)]))
                for failure in one.failed
            ),
            *((fault, f"no check notices: {fault}") for fault in one.missed),
        )
    ]
    failed += [
        (
            contract_of[one.brick],
            one.assertion,
            ", ".join([f"{one.brick} of the model: fails {one.assertion}", *_met(one)]),
        )
        for one in model
        if not one.passed
    ]
    checked = dict.fromkeys([contract_of[one.contract].name for one in kernels])
    checked |= dict.fromkeys([contract_of[one.brick].name for one in model])
    rules = {(name, rule.means): rule for name in checked for rule in _rules(contract_of[name])}
    for one in model:  # Add a rule for each check of whole passes, because no contract lists these checks.
        name = contract_of[one.brick].name
        file = f"compute/contracts/{name}.yaml"
        rules.setdefault((name, one.assertion), SarifRule(f"{name}/{one.assertion}", one.assertion, file, 1))
    return sarif(list(rules.values()), [Failure(rules[contract.name, what], said) for contract, what, said in failed])


def _rules(contract: Contract) -> Iterator[SarifRule]:
    """Yield a SARIF rule for every property that is checked for a kernel, with the line of its contract."""
    from cbtop.compute.verification import PEERS

    lines = {"finite": "equations"} | {f"equals {peer}": "tolerance" for peer in PEERS}
    lines |= {one.name: one.expression.text for one in (*contract.preconditions, *contract.postconditions)}
    lines |= {fault: fault for fault in (*contract.output_faults, *(one.name for one in contract.argument_faults))}
    for what, text in lines.items():
        yield SarifRule(
            f"{contract.name}/{what}", what, f"compute/contracts/{contract.name}.yaml", contract.line_of(text)
        )


FORMATS: dict[str, Callable[[Sequence[Verified], Sequence[CheckResult]], str]] = {
    "text": _text,
    "json": _json,
    "junit": _junit,
    "sarif": _sarif,
}
