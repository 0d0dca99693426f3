"""The rules for verdicts, one file each. A verdict is a sentence about a problem or limit of a source, with
figures.
"""

from __future__ import annotations

from collections.abc import Collection

from cbtop.protocol.vocabulary import is_warm_up
from cbtop.viewmodels.on_demand import LazyValue, with_parts
from cbtop.viewmodels.source import SourceView
from cbtop.viewmodels.verdict import Verdict, Withheld
from cbtop.viewmodels.verdicts.allocator_retries import ALLOCATOR_RETRIES
from cbtop.viewmodels.verdicts.at_the_roof import COMPUTE_BOUND, MEMORY_BOUND
from cbtop.viewmodels.verdicts.base import Rule
from cbtop.viewmodels.verdicts.below_resolution import BELOW_RESOLUTION
from cbtop.viewmodels.verdicts.bimodal_latency import BIMODAL_LATENCY
from cbtop.viewmodels.verdicts.clock_throttled import CLOCK_THROTTLED
from cbtop.viewmodels.verdicts.communication_exposed import COMMUNICATION_EXPOSED
from cbtop.viewmodels.verdicts.data_incomplete import DATA_INCOMPLETE
from cbtop.viewmodels.verdicts.engine_queue import BATCH_OF_ONE, CACHE_TOO_SMALL, QUEUE_AT_LIMIT
from cbtop.viewmodels.verdicts.failed_checks import FAILED_CHECKS
from cbtop.viewmodels.verdicts.gradient_not_finite import GRADIENT_NOT_FINITE
from cbtop.viewmodels.verdicts.grows_with_cache import GROWS_WITH_CACHE
from cbtop.viewmodels.verdicts.host_bound import HOST_BOUND
from cbtop.viewmodels.verdicts.idle_between_steps import IDLE_BETWEEN_STEPS
from cbtop.viewmodels.verdicts.input_bound import INPUT_BOUND
from cbtop.viewmodels.verdicts.launch_bound import LAUNCH_BOUND
from cbtop.viewmodels.verdicts.loss_scale_falling import LOSS_SCALE_FALLING
from cbtop.viewmodels.verdicts.memory_grows import MEMORY_GROWS
from cbtop.viewmodels.verdicts.memory_near_limit import MEMORY_NEAR_LIMIT
from cbtop.viewmodels.verdicts.not_finite import NOT_FINITE, may_follow_gradients
from cbtop.viewmodels.verdicts.odd_layer import ODD_LAYER
from cbtop.viewmodels.verdicts.optimizer_bound import OPTIMIZER_BOUND
from cbtop.viewmodels.verdicts.outlier_mean import OUTLIER_MEAN
from cbtop.viewmodels.verdicts.over_budget import OVER_BUDGET
from cbtop.viewmodels.verdicts.recompilation import RECOMPILATION
from cbtop.viewmodels.verdicts.recompute import RECOMPUTE
from cbtop.viewmodels.verdicts.roof_unsure import ROOF_UNSURE
from cbtop.viewmodels.verdicts.slower_than_baseline import SLOWER_THAN_BASELINE
from cbtop.viewmodels.verdicts.slows_down import SLOWS_DOWN
from cbtop.viewmodels.verdicts.starved import STARVED, why_starved
from cbtop.viewmodels.verdicts.straggler import STRAGGLER
from cbtop.viewmodels.verdicts.stuck import STUCK
from cbtop.viewmodels.verdicts.waits_for_rank import WAITS_FOR_RANK
from cbtop.viewmodels.verdicts.warm_up import WARM_UP

# All rules for verdicts, the worst first: wrong figures, then lost time, then limits.
VERDICTS: tuple[Rule, ...] = (
    STUCK,
    DATA_INCOMPLETE,
    FAILED_CHECKS,
    NOT_FINITE,
    GRADIENT_NOT_FINITE,
    STARVED,
    STRAGGLER,
    WAITS_FOR_RANK,
    CLOCK_THROTTLED,
    SLOWER_THAN_BASELINE,
    RECOMPILATION,
    LOSS_SCALE_FALLING,
    ALLOCATOR_RETRIES,
    MEMORY_GROWS,
    CACHE_TOO_SMALL,
    BATCH_OF_ONE,
    QUEUE_AT_LIMIT,
    IDLE_BETWEEN_STEPS,
    INPUT_BOUND,
    COMMUNICATION_EXPOSED,
    OPTIMIZER_BOUND,
    LAUNCH_BOUND,
    HOST_BOUND,
    ODD_LAYER,
    BIMODAL_LATENCY,
    OUTLIER_MEAN,
    OVER_BUDGET,
    WARM_UP,
    GROWS_WITH_CACHE,
    SLOWS_DOWN,
    RECOMPUTE,
    MEMORY_NEAR_LIMIT,
    BELOW_RESOLUTION,
    ROOF_UNSURE,
    MEMORY_BOUND,
    COMPUTE_BOUND,
)

OF_WARM_UP = (STUCK, DATA_INCOMPLETE, FAILED_CHECKS, NOT_FINITE, GRADIENT_NOT_FINITE)
# Verdicts about the program's own speed, which would be wrong while the process waits for a processor.
OF_LATENCY = (
    SLOWER_THAN_BASELINE,
    INPUT_BOUND,
    COMMUNICATION_EXPOSED,
    WAITS_FOR_RANK,
    OPTIMIZER_BOUND,
    LAUNCH_BOUND,
    BIMODAL_LATENCY,
    OUTLIER_MEAN,
    OVER_BUDGET,
    SLOWS_DOWN,
    RECOMPUTE,
)


def _in_order(view: SourceView) -> list[Rule]:
    """Return all rules in order.

    The rule for gradients comes first if faulty gradients may have caused a faulty output.
    """
    rules = list(VERDICTS)
    if may_follow_gradients(view):
        rules.remove(GRADIENT_NOT_FINITE)
        rules.insert(rules.index(NOT_FINITE), GRADIENT_NOT_FINITE)
    return rules


def judged(view: SourceView, silenced: Collection[str] = ()) -> SourceView:
    """Return `view` with its verdicts, without those in `silenced`.

    With only warm-up steps, the speed of a process is not judged. While it waits for a processor, the verdicts
    OF_LATENCY are withheld. `withheld` names what is missing for either reason, and verdicts that waits for a
    processor may explain.
    """
    wanted = [rule for rule in _in_order(view) if rule.id not in silenced]
    is_early = view.phase is not None and is_warm_up(view.phase)

    def trusted() -> list[Rule]:
        if is_early:
            return [rule for rule in wanted if rule in OF_WARM_UP]
        is_starved = STARVED.find(view) is not None
        return [rule for rule in wanted if not (is_starved and rule in OF_LATENCY)]

    def verdicts() -> tuple[Verdict, ...]:
        found = (rule.judge(view) for rule in trusted())
        return tuple(verdict for verdict in found if verdict is not None)

    def withheld() -> Withheld | None:
        kept = trusted()
        if not is_early and not view.waiting_percent and len(kept) == len(wanted):
            return None
        # Waits for a processor may explain the problem that a rule finds. So run the rules as if the waits were
        # unknown.
        unexplained = view if is_early else with_parts(view, waiting_percent=None)
        shown = {verdict.id for verdict in made.value()}
        others = [rule for rule in wanted if rule.id not in shown and rule is not STARVED]
        ids = tuple(rule.id for rule in others if rule.find(unexplained) is not None)
        if not ids:
            return None
        if is_early:
            return Withheld(ids, "speed", "only warm-up steps have ended")
        return Withheld(ids, "latency", why_starved(view))

    made = LazyValue(verdicts)
    return with_parts(view, verdicts=made, withheld=LazyValue(withheld))
