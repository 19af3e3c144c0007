"""How many planted faults a diagnosis names, how many healthy models alarm it, what it costs.

`faults_named_share`: of the planted faults, those whose only finding is the expected problem, in
one of the expected layers, in the expected phase and at the expected step. `healthy_alarms`:
healthy models of 200 steps with an alarm; `healthy_findings`: with an alarm or a warning. The same
for anomaly mode, for transformers' DebugUnderflowOverflow and for SageMaker's public rules
(`_diagnosis_peers.py`). `diagnosis_over_monitor` is the cost of live findings on top of a Monitor,
`sentinel` that of the look for non-finite values alone, both on a training step of a small Qwen3.

`--thresholds` prints every threshold beside what faults and healthy models measure.
"""

import argparse
import math
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch

from benchmarks import diagnosis_sentinel
from benchmarks._cases import Case, Fault
from benchmarks._cuts import CUTS
from benchmarks._diagnosis_peers import PEERS, is_named
from benchmarks._faults import FAULTS
from benchmarks._healthy import HEALTHY, STEPS
from benchmarks._timing import Run, describe_machine, report
from benchmarks.monitor import Training, build_training
from torchfmri import Diagnosis, Monitor, diagnose
from torchfmri._diagnosis import depth, learning_rates, signals
from torchfmri._diagnosis.live import LiveDiagnosis
from torchfmri._diagnosis.loss import logits_left
from torchfmri._diagnosis.observation import Observation


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of this subject."""
    parser.add_argument("--thresholds", action="store_true", help="print thresholds only")
    parser.add_argument("--rounds", type=int, default=30, help="rounds of timing (default: 30)")
    parser.add_argument("--no-peers", action="store_true", help="only ours")
    parser.add_argument("--no-cost", action="store_true", help="no timing")


def main(arguments: argparse.Namespace) -> dict[str, Any]:
    """Shares, counts, ratios, and who said what where it went wrong."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if arguments.thresholds:
        return {"thresholds": threshold_table()}
    result = judge_ours()
    for name, peer in PEERS.items() if not arguments.no_peers else ():
        report(f"{name}: {len(FAULTS)} faults, {len(HEALTHY)} healthy models")
        result |= judge_peer(name, peer)
    if not arguments.no_cost:
        report("cost")
        result["intervals"] = {}
        for figures in (
            measure_live(arguments.rounds),
            diagnosis_sentinel.measure(arguments.rounds),
        ):
            intervals = figures.pop("intervals")
            result["intervals"] |= intervals
            result |= figures
    result["machine"] = describe_machine()
    return result


def examine(case: Case, steps: int) -> Diagnosis:
    """The diagnosis of a case."""
    return diagnose(
        case.model, case.batches, case.loss, case.optimizer, steps, step=case.step, show=False
    )


def make(build: Callable[[], Case]) -> Case:
    """A case with the same random numbers every time."""
    torch.manual_seed(0)
    return build()


def is_right(diagnosis: Diagnosis, fault: Fault) -> bool:
    """Whether the fault is named right, with no finding beside it (remarks aside)."""
    found = [each for each in diagnosis if each.severity != "inform"]
    if len(found) != 1:
        return False
    finding = found[0]
    return (
        finding.problem == fault.problem
        and finding.phase == fault.phase
        and finding.step == fault.step
        and (not fault.layers or not set(fault.layers).isdisjoint(finding.layers))
    )


def judge_ours() -> dict[str, Any]:
    """Our share of faults named, and our alarms on healthy models."""
    wrong, alarms, findings = {}, {}, {}
    for fault in FAULTS:
        case = make(fault.make)
        diagnosis = examine(case, case.steps)
        if not is_right(diagnosis, fault):
            wrong[fault.name] = repr(diagnosis)
    report(f"ours: {len(FAULTS) - len(wrong)} of {len(FAULTS)} faults")
    for healthy in HEALTHY:
        diagnosis = examine(make(healthy.make), STEPS)
        if diagnosis.alarms:
            alarms[healthy.name] = repr(diagnosis)
        if not diagnosis.ok:
            findings[healthy.name] = repr(diagnosis)
    return {
        "faults": len(FAULTS),
        "faults_named_share": 1 - len(wrong) / len(FAULTS),
        "healthy": len(HEALTHY),
        "healthy_alarms": len(alarms),
        "healthy_findings": len(findings),
        "not_named": wrong,
        "alarms": alarms,
    }


def judge_peer(name: str, peer: Callable[[Case, int], Any]) -> dict[str, Any]:
    """A peer's share of faults named, and its alarms on healthy models."""
    named, raised = [], {}
    for fault in FAULTS:
        case = make(fault.make)
        if is_named(peer(case, case.steps), fault.problem, fault.step):
            named.append(fault.name)
    for healthy in HEALTHY:
        said = peer(make(healthy.make), STEPS)
        if said:
            raised[healthy.name] = ", ".join(said)
    return {
        f"{name}_faults_named_share": len(named) / len(FAULTS),
        f"{name}_healthy_alarms": len(raised),
        f"{name}_named": named,
        f"{name}_alarms": raised,
    }


# -- cost ----------------------------------------------------------------------------------------


class _Silent(LiveDiagnosis):
    """Looks at nothing."""

    def add(self, *_: Any) -> None:
        return


def measure_live(rounds: int) -> dict[str, Any]:
    """The Monitor with live findings over the Monitor without."""
    training = build_training("cpu", 4, 128)
    with ExitStack() as until:
        without = build_monitored(training, False, until)
        with_findings = build_monitored(training, True, until)
        figures = diagnosis_sentinel.compare(
            without, {"diagnosis_over_monitor": with_findings}, rounds, on_cuda=False
        )
    figure = figures["diagnosis_over_monitor"]
    return {
        "diagnosis_over_monitor": figure.ratio,
        "intervals": {"diagnosis_over_monitor": [figure.low, figure.high]},
    }


def build_monitored(training: Training, live: bool, until: ExitStack) -> Run:
    """Eight steps of a twin with a Monitor attached: live findings are made every eighth."""
    twin = training.twin()
    monitor = Monitor(twin.model, twin.optimizer)
    if not live:
        monitor._live = _Silent(lambda: None)  # type: ignore[arg-type,return-value]
    until.enter_context(monitor)

    def run() -> None:
        for _ in range(8):
            twin.step()

    return run


# -- thresholds ----------------------------------------------------------------------------------


def threshold_table() -> dict[str, str]:
    """Each threshold with its reason and what was measured on both sides of it."""
    healthy = [examine(make(each.make), STEPS).observation for each in HEALTHY]
    faulty: dict[str, list[Observation]] = {}
    for fault in FAULTS:
        case = make(fault.make)
        seen = examine(case, case.steps).observation
        if seen is not None:
            faulty.setdefault(fault.problem, []).append(seen)
    table = {}
    for name, cut in CUTS.items():
        sign = ">" if cut.above else "<"
        said = f"{cut.signal} {sign} {cut.value:g}. {cut.reason}."
        if name in MEASURED:
            problem, signal = MEASURED[name]
            worst = max if cut.above else min
            sound = _known(signal, [each for each in healthy if each is not None])
            ill = _known(signal, faulty.get(problem, []))
            said += f" Worst healthy: {_say(worst, sound)} of {len(sound)};"
            said += f" at the fault: {_say(min if cut.above else max, ill)}."
        table[name] = said
    return table


Signal = Callable[[Observation], float]


def _known(signal: Signal, seen: Sequence[Observation]) -> list[float]:
    return [value for each in seen if math.isfinite(value := signal(each))]


def _say(choose: Callable[[list[float]], float], values: list[float]) -> str:
    return f"{choose(values):.3g}" if values else "none"


def _highest(values: Any) -> float:
    return max(values, default=math.nan)


def _update(seen: Observation) -> float:
    """The largest median of five steps, of all matrices or of a group far above the others."""
    groups = [each.parameters for each in learning_rates.far_groups(seen) if each.above]
    return _highest(
        value
        for among in (None, *groups)
        for ratios in [signals.update_ratios(seen, among)]
        for place in range(max(1, len(ratios) - 4))
        if math.isfinite(value := signals.median(ratios[place : place + 5]))
    )


def _smallest_update(seen: Observation) -> float:
    """The typical update of all matrices, or of a group far below the others."""
    if learning_rates.rate_fell(seen) is not None:
        return math.nan
    groups = [each.parameters for each in learning_rates.far_groups(seen) if not each.above]
    found = [signals.update_ratios(seen, among) for among in (None, *groups)]
    known = [signals.median(ratios[ratios > 0]) for ratios in found]
    return min((each for each in known if math.isfinite(each)), default=math.nan)


def _depth(seen: Observation) -> float:
    profile = depth.gradient_profile(seen)
    falls = profile is not None and profile.trend > CUTS["DEPTH_TREND"].value
    return profile.ratio if profile is not None and falls else math.nan


def _growth(seen: Observation) -> float:
    along_depth = [each.factor for each in depth.growths(seen) if each.trend >= 0.9]
    in_time = [] if seen.steps is None else list(seen.steps.growth.values())
    return _highest([*along_depth, *in_time])


def _clip(seen: Observation) -> float:
    return signals.median(signals.clip_factors(seen))


def _entropy(seen: Observation) -> float:
    return min((signals.median(each.entropy) for each in seen.heads), default=math.nan)


def _logit(seen: Observation) -> float:
    return _highest(max(each.logit) for each in seen.heads)


def _experts(seen: Observation) -> float:
    return min((signals.experts_in_use(each.load[-1]) for each in seen.routers), default=math.nan)


def _gain(seen: Observation) -> float:
    return _highest(signals.gains(seen).values())


def _output_size(seen: Observation) -> float:
    return seen.loss.output_size


def _input_size(seen: Observation) -> float:
    return math.nan if seen.data.rms is None else seen.data.rms


def _spread(seen: Observation) -> float:
    if seen.steps is None:
        return math.nan
    return seen.steps.spread.get(seen.loss.output_layer, math.nan)


def _underflow(seen: Observation) -> float:
    return math.nan if seen.steps is None else _highest(seen.steps.half_gradients.values())


def _large_input(seen: Observation) -> float:
    given = seen.data.given.values()
    return max([each for each in (_input_size(seen), *given) if each >= 1], default=math.nan)


def _small_input(seen: Observation) -> float:
    size = _input_size(seen)
    return size if signals.is_stuck(seen) and size < 1 else math.nan


def _signal_if_stuck(seen: Observation) -> float:
    return depth.signal_left(seen) if signals.is_stuck(seen) else math.nan


def _logits_if_stuck(seen: Observation) -> float:
    return logits_left(seen) if signals.is_stuck(seen) else math.nan


def _rate_left(seen: Observation) -> float:
    """The learning rate of the last quarter of the steps / the largest."""
    found = np.zeros(0) if seen.steps is None else seen.steps.learning_rate
    if len(found) < 4 or found.min() == found.max() or not found[-1] > 0:
        return math.nan
    return float(found[-(len(found) // 4)] / found.max())


def _momentum(seen: Observation) -> float:
    return _highest(each["momentum"] for each in seen.structure.groups if each["momentum"])


def _clipped_norm(seen: Observation) -> float:
    clipped = _clip(seen)
    if seen.steps is None or not clipped < CUTS["CLIPPED"].value:
        return math.nan
    return signals.median(seen.steps.norm) * clipped


def _norm_values(seen: Observation) -> float:
    several = [each.values for each in seen.norms if each.training and each.samples > 1]
    return min(several, default=math.nan)


def _norm_momentum(seen: Observation) -> float:
    return _highest(each.momentum for each in seen.norms if each.training and each.momentum > 0)


def _future(seen: Observation) -> float:
    if seen.loss.targets != "next inputs":
        return math.nan
    return _highest(each.future for each in seen.heads)


MEASURED: dict[str, tuple[str, Signal]] = {
    "UPDATE_HIGH": ("learning_rate_too_high", _update),
    "UPDATE_LOW": ("learning_rate_too_low", _smallest_update),
    "RATE_LEFT": ("learning_rate_too_low", _rate_left),
    "MOMENTUM": ("momentum_too_high", _momentum),
    "CLIPPED_NORM": ("clipping_too_strong", _clipped_norm),
    "SIGNAL_LEFT": ("signal_shrinks", _signal_if_stuck),
    "INPUT_SMALL": ("unscaled_inputs", _small_input),
    "LOGITS_LEFT": ("logits_too_small", _logits_if_stuck),
    "CHANGING": (
        "contradictory_labels",
        lambda seen: seen.data.changing,
    ),
    "MIXED": ("samples_mixed", lambda seen: seen.data.mixed),
    "FUTURE": ("missing_causal_mask", _future),
    "NORM_VALUES": ("batch_norm_of_few", _norm_values),
    "NORM_MOMENTUM": ("batch_norm_statistics", _norm_momentum),
    "CLIPPED": ("clipping_hides_explosion", _clip),
    "DEPTH_RATIO": ("vanishing_gradients", _depth),
    "GROWTH_WARN": ("activation_growth", _growth),
    "DEAD_ALARM": ("dead_units", lambda seen: _highest(signals.dead_shares(seen).values())),
    "DEAD_WARN": ("dead_units", lambda seen: _highest(signals.dead_shares(seen).values())),
    "FLAT_WARN": ("saturated_units", lambda seen: _highest(signals.flat_shares(seen).values())),
    "FLAT_ALARM": ("saturated_units", lambda seen: _highest(signals.flat_shares(seen).values())),
    "ENTROPY": ("attention_collapse", _entropy),
    "LOGIT_WARN": ("attention_collapse", _logit),
    "LOGIT_ALARM": ("attention_collapse", _logit),
    "EXPERTS": ("routing_collapse", _experts),
    "SPREAD": ("vanishing_gradients", _spread),
    "INITIAL_LOSS": ("initial_loss", signals.initial_loss_ratio),
    "GAIN": ("init_too_large", _gain),
    "OUTPUT_SIZE": ("init_too_large", _output_size),
    "INPUT_SIZE": ("unscaled_inputs", _large_input),
    "TARGET_SIZE": (
        "unscaled_targets",
        lambda seen: seen.data.target_rms,
    ),
    "DROPPED": ("excessive_dropout", lambda seen: _highest(seen.structure.dropouts.values())),
    "REPEATED": (
        "duplicate_samples",
        lambda seen: seen.data.repeated,
    ),
    "ONE_CLASS": (
        "unshuffled_data",
        lambda seen: seen.data.one_class_batches,
    ),
    "PADDING": (
        "padding_in_loss",
        lambda seen: seen.data.padding,
    ),
    "OUTSIDE": (
        "unreachable_targets",
        lambda seen: seen.loss.outside,
    ),
    "UNDERFLOW_WARN": ("half_underflow", _underflow),
}
"""Threshold -> the fault that is beyond it, and the signal."""
