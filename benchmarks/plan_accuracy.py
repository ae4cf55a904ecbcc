"""How well the time model of execution plans predicts iterations that it has not seen.

    python -m benchmarks.plan_accuracy [--draws 20]        the study: benchmarks/results/plan-accuracy.json
    python -m benchmarks.plan_accuracy --data              rewrite the rows and constants that ship
    python -m benchmarks.plan_accuracy --calibrate         find the environments anew (minutes)

For each model seven rows are chosen by design, without a look at their times, its constants are fitted to these, and
all other rows are predicted; then again with rows drawn at random. Rubick's rows ship; vTrain's lie in ../shared.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import io
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import machine
from thebes.model.plan import ZERO_OFFLOAD, Plan
from thebes.perf.plans import measured
from thebes.perf.plans.fit import (
    LEAST_OFFLOAD,
    LEAST_SAMPLES,
    NOISE,
    USUAL,
    Fit,
    Sample,
    choose_samples,
    errors_by_kind,
    fit,
    kind_of,
    predict,
    with_forward,
)
from thebes.perf.plans.samples import parse_samples
from thebes.perf.plans.site import A800, Site, site_of_gpu
from thebes.perf.plans.timing import ENVIRONMENT, Constants, Environment, forward_flop
from thebes.perf.plans.transformer import POOLED, Transformer, catalogue

ROOT = Path(__file__).parents[1]
DATA = ROOT / "src" / "thebes" / "data" / "plans"
RESULT = ROOT / "benchmarks" / "results" / "plan-accuracy.json"
SHARED = ROOT.parent / "shared" / "data" / "profiles"
GOAL = 0.08
SEED = 5

# The forward pass as profiled (column `forward`): one GPU, its whole batch at once. The other three have no such row:
# the timers of ViT and RoBERTa did not wait for the GPU, LLaMA-30B does not fit one.
PROFILED_S = {"bert-large": 0.225985 / 32, "gpt-2": 1.05612 / 16, "llama-2-7b": 2.99014 / 8}
SISTERS = {"llama-30b": "llama-2-7b"}  # same software, same family: what the one does not tell, the other does

# Environments of vTrain's two clusters (A100, Megatron-LM), found by --calibrate on the shapes named here only.
VTRAIN_CALIBRATED_ON = {"single": ("gpt-h1024-l12", "gpt-h2048-l20"), "multi": ("gpt-h3072-l30", "gpt-h6144-l40")}
VTRAIN = {
    "single": ENVIRONMENT._replace(inner=0.98, layer_s=0.0011, start_overlap=2.0, message_s=1e-7, split=1.0, mfu=0.4),
    "multi": ENVIRONMENT._replace(
        inner=0.96, wire=0.71, handing=0.95, layer_s=0.0002, message_s=2.5e-5, split=0.93, mfu=0.4
    ),
}
VTRAIN_FILES = {"single": "single_node.csv.gz", "multi": "multi_node.csv"}


@dataclass(frozen=True)
class Case:
    """A model, where it was measured, and its rows; the suspicious ones are never fitted to."""

    model: Transformer
    site: Site
    samples: tuple[Sample, ...]
    suspicious: tuple[bool, ...]

    @property
    def regular(self) -> list[int]:
        return [i for i, odd in enumerate(self.suspicious) if not odd]


@dataclass(frozen=True)
class Outcome:
    fit: Fit
    chosen: tuple[int, ...]
    errors: np.ndarray  # relative, of all rows

    def unseen(self, case: Case, suspicious: bool) -> list[int]:
        rows = range(len(case.samples)) if suspicious else case.regular
        return [i for i in rows if i not in self.chosen]


def a800_cases() -> dict[str, Case]:
    cases: dict[str, Case] = {}
    for name in dict.fromkeys(row.model for row in measured.rows()):
        profiled = ((A800.gpu_type, PROFILED_S[name]),) if name in PROFILED_S else ()
        model = replace(catalogue()[name], forward_s_per_sample=profiled, constants=None)
        rows = [row for row in measured.rows() if row.model == name]
        cases[name] = Case(model, A800, tuple(r.sample for r in rows), tuple(r.suspicious for r in rows))
    return cases


def vtrain_cases(cluster: str) -> dict[str, Case]:
    """Empty where the shared data do not lie beside the checkout."""
    path = SHARED / "vtrain_megatron" / VTRAIN_FILES[cluster]
    if not path.is_file():
        return {}
    raw = path.read_bytes()
    found = parse_samples((gzip.decompress(raw) if path.suffix == ".gz" else raw).decode(), path.name)
    site = site_of_gpu("A100-80GB")
    return {
        name: Case(found.shapes[name], site, tuple(samples), (False,) * len(samples))
        for name, samples in sorted(found.samples.items())
    }


def learn(case: Case, chosen: Sequence[int], environment: Environment, usual: Constants = USUAL) -> Outcome:
    """Fit to the chosen rows, predict all."""
    found = fit(case.model, case.site, [case.samples[i] for i in chosen], environment, usual)
    model = with_forward(case.model, case.site, found.forward_s)
    seconds = predict(model, case.site, found.constants, case.samples, environment)
    return Outcome(found, tuple(chosen), seconds / np.array([s.iteration_s for s in case.samples]) - 1)


def by_design(case: Case, environment: Environment, *, for_constants: bool = False) -> list[int]:
    regular = [case.samples[i] for i in case.regular]
    few = choose_samples(case.model, case.site, regular, LEAST_SAMPLES, environment, for_constants=for_constants)
    return [case.regular[i] for i in few]


def at_random(case: Case, rng: np.random.Generator, count: int = LEAST_SAMPLES) -> list[int]:
    """Three with offload where there are any; the others from the rest."""
    offload = [i for i in case.regular if case.samples[i].plan.zero == ZERO_OFFLOAD]
    others = [i for i in case.regular if i not in offload]
    first = list(rng.permutation(offload)[:LEAST_OFFLOAD])
    return sorted(int(i) for i in (*first, *rng.permutation(others)[: count - len(first)]))


def naive_errors(case: Case, chosen: Sequence[int]) -> np.ndarray:
    """Without a model: the seven rows, scaled by GPUs; same kind of plan and nearest size, where possible."""

    def guess(sample: Sample) -> float:
        def distance(i: int) -> tuple[bool, float]:
            other = case.samples[i]
            return kind_of(other.plan) != kind_of(sample.plan), abs(np.log(other.gpus / sample.gpus))

        near = case.samples[min(chosen, key=distance)]
        share = (sample.batch or 1) / (near.batch or 1) * near.gpus / sample.gpus
        return near.iteration_s * share / sample.iteration_s - 1

    return np.array([guess(sample) for sample in case.samples])


def _share(value: float) -> float:
    return round(float(value), 4)


def _mean_worst(errors: np.ndarray) -> dict[str, float]:
    return {"rows": len(errors), "mean": _share(np.mean(np.abs(errors))), "worst": _share(np.max(np.abs(errors)))}


def figures(case: Case, environment: Environment, draws: int) -> dict[str, Any]:
    """Errors on unseen rows, by design and at random."""
    outcome = learn(case, by_design(case, environment), environment)
    unseen = outcome.unseen(case, suspicious=False)
    rng = np.random.default_rng(SEED)
    means: list[float] = []
    for _ in range(draws):
        drawn = learn(case, at_random(case, rng), environment)
        means.append(float(np.mean(np.abs(drawn.errors[drawn.unseen(case, suspicious=False)]))))
    kinds = errors_by_kind([case.samples[i] for i in unseen], outcome.errors[unseen].tolist())
    result: dict[str, Any] = {
        "fitted_to": [_words(case.samples[i]) for i in outcome.chosen],
        "constants": {name: float(f"{value:.4g}") for name, value in outcome.fit.constants._asdict().items()},
        "forward_s": float(f"{outcome.fit.forward_s:.4g}"),
        "forward_fitted": outcome.fit.forward_fitted,
        "at_bounds": list(outcome.fit.at_bounds),
        "warnings": list(outcome.fit.warnings),
        "seen": _mean_worst(outcome.errors[list(outcome.chosen)]),
        "unseen": _mean_worst(outcome.errors[unseen]),
        "unseen_by_plan": {
            k.kind: {"rows": k.samples, "mean": _share(k.mean), "worst": _share(k.worst)} for k in kinds
        },
        "naive": _mean_worst(naive_errors(case, outcome.chosen)[unseen]),
        "goal_met": bool(np.mean(np.abs(outcome.errors[unseen])) <= GOAL),
    }
    other = learn(case, by_design(case, environment, for_constants=True), environment)
    result["unseen_by_d_optimal_design"] = _mean_worst(other.errors[other.unseen(case, suspicious=False)])
    if any(case.suspicious):
        result["unseen_with_suspicious"] = _mean_worst(outcome.errors[outcome.unseen(case, suspicious=True)])
    if means:
        result["random"] = {
            "draws": draws,
            **{name: _share(np.percentile(means, at)) for name, at in (("median", 50), ("p90", 90), ("worst", 100))},
        }
    return result


def _words(sample: Sample) -> str:
    return f"{sample.plan} on {sample.nodes} x {sample.fewest or sample.gpus // sample.nodes}"


def one_for_all(cases: Mapping[str, Case], teacher: str, environment: Environment) -> dict[str, Any]:
    """The constants of one shape for all shapes; the forward pass goes by arithmetic."""
    case = cases[teacher]
    found = learn(case, by_design(case, environment), environment).fit
    per_flop = found.forward_s / forward_flop(case.model)
    result: dict[str, Any] = {}
    for name, other in cases.items():
        if name != teacher:
            model = with_forward(other.model, other.site, per_flop * forward_flop(other.model))
            seconds = predict(model, other.site, found.constants, other.samples, environment)
            result[name] = _mean_worst(seconds / np.array([s.iteration_s for s in other.samples]) - 1)
    return result


def study(draws: int, vtrain_draws: int) -> dict[str, Any]:
    document: dict[str, Any] = {
        "what": "relative errors of predicted seconds per iteration on rows that the fit did not see",
        "machine": machine.describe(),
        "rows_fitted_to": LEAST_SAMPLES,
        "goal_mean": GOAL,
        "a800": {
            "environment": ENVIRONMENT._asdict(),
            "models": {name: figures(case, ENVIRONMENT, draws) for name, case in a800_cases().items()},
        },
    }
    for cluster, environment in VTRAIN.items():
        cases = vtrain_cases(cluster)
        if cases:
            document[f"vtrain_{cluster}"] = {
                "environment": environment._asdict(),
                "environment_calibrated_on": VTRAIN_CALIBRATED_ON[cluster],
                "models": {name: figures(case, environment, vtrain_draws) for name, case in cases.items()},
                "one_fit_for_all": {
                    teacher: one_for_all(cases, teacher, environment) for teacher in (min(cases), max(cases))
                },
            }
    return document


# --- Environments -----------------------------------------------------------------------------------------------------

A800_KEYS = ("inner", "wire", "handing", "pcie", "layer_s", "hop_s", "shard_s", "split")
VTRAIN_KEYS = {
    "single": ("inner", "layer_s", "message_s", "split", "start_overlap"),
    "multi": ("inner", "wire", "handing", "layer_s", "message_s", "hop_s", "split"),
}
SHARES = ("inner", "wire", "handing", "pcie", "split")
STEPS = (1.35, 1.15, 1.06)


def misfit(cases: Sequence[Case], environment: Environment) -> float:
    """How badly the cases are explained when each has its best constants; every case counts the same."""
    total = 0.0
    for case in cases:
        errors = learn(case, case.regular, environment).errors[case.regular]
        total += float(np.mean(np.sqrt(1 + (np.log1p(errors) / NOISE) ** 2)))
    return total / len(cases)


def calibrate(cases: Sequence[Case], start: Environment, keys: Sequence[str]) -> Environment:
    """One value after the other, up and down by smaller and smaller factors, as long as it helps."""
    best, found = misfit(cases, start), start
    for step in STEPS:
        for key in keys:
            for factor in (step, 1 / step):
                while True:
                    value = getattr(found, key)
                    value = 1 - (1 - value) * factor if key == "split" else value * factor
                    tried = found._replace(**{key: value})
                    if key in SHARES and value > 1:
                        break
                    cost = misfit(cases, tried)
                    if cost >= best - 1e-4:
                        break
                    best, found = cost, tried
    return found


def thinned(case: Case, every: int) -> Case:
    return replace(case, samples=case.samples[::every], suspicious=case.suspicious[::every])


def without_each_model(say: Callable[[str], None]) -> dict[str, Any]:
    """The strictest test: environment from the other models only, then constants from seven rows."""
    cases = a800_cases()
    result: dict[str, Any] = {}
    for name, case in cases.items():
        environment = calibrate([c for n, c in cases.items() if n != name], ENVIRONMENT, A800_KEYS)
        outcome = learn(case, by_design(case, environment), environment)
        result[name] = {
            "environment": {key: float(f"{value:.3g}") for key, value in environment._asdict().items()},
            "unseen": _mean_worst(outcome.errors[outcome.unseen(case, suspicious=False)]),
        }
        say(f"{name}: {result[name]['unseen']}")
    return result


def calibrate_all(say: Callable[[str], None]) -> None:
    say(f"a800: {calibrate(list(a800_cases().values()), ENVIRONMENT, A800_KEYS)}")
    for cluster, names in VTRAIN_CALIBRATED_ON.items():
        cases = vtrain_cases(cluster)
        few = [thinned(cases[name], 3 if cluster == "single" else 1) for name in names if name in cases]
        if few:
            say(f"vtrain {cluster}: {calibrate(few, VTRAIN[cluster], VTRAIN_KEYS[cluster])}")


# --- Shipped data -----------------------------------------------------------------------------------------------------

ROW_COLUMNS = ("model", "plan", "gpus", "nodes", "placement", "global_batch", "iteration_s", "suspicious")
FITTED_COLUMNS = ("model", "gpu_type", "forward_s", *Constants._fields, "rows", "mean_error", "worst_error")


def suspicious(model: str, plan: Plan, placement: str) -> bool:
    """Rows that contradict the others; data/plans/SOURCE.md has the argument."""
    if model == "roberta-large":
        return plan.gpus == 1 and not plan.gc
    uneven = len(placement) > 1 and any(int(gpus) % 2 for gpus in placement)
    return model == "vit" and plan.zero != ZERO_OFFLOAD and plan.gpus > 2 and uneven


def shipped_rows(text: str) -> str:
    """Rubick's placements.csv in our notation."""
    found = parse_samples(text, "placements.csv")
    placements = [(row["model"], row["placement"]) for row in csv.DictReader(text.splitlines())]
    out = io.StringIO()
    write = csv.writer(out, lineterminator="\n")
    write.writerow(ROW_COLUMNS)
    for name, samples in found.samples.items():
        model = catalogue()[name].name
        for sample, placement in zip(samples, (p for m, p in placements if m == name), strict=True):
            flag = int(suspicious(model, sample.plan, placement))
            write.writerow(
                (model, sample.plan, sample.gpus, sample.nodes, placement, sample.batch, sample.iteration_s, flag)
            )
    return out.getvalue()


def shipped_constants() -> str:
    """Fitted to all regular rows: what users get is the best that is known, not what the study holds back."""
    out = io.StringIO()
    write = csv.writer(out, lineterminator="\n")
    write.writerow(FITTED_COLUMNS)
    found: dict[str, Fit] = {}
    for name, case in a800_cases().items():
        usual = found[SISTERS[name]].constants if name in SISTERS else USUAL
        found[name] = learn(case, case.regular, ENVIRONMENT, usual).fit
        write.writerow(_fitted_row(name, found[name]))
    pooled = np.exp(np.median(np.log([f.constants for f in found.values()]), axis=0))
    write.writerow((POOLED, A800.gpu_type, "", *(f"{k:.4g}" for k in pooled), "", "", ""))
    return out.getvalue()


def _fitted_row(name: str, found: Fit) -> tuple[object, ...]:
    numbers = [f"{value:.4g}" for value in (found.forward_s, *found.constants)]
    return (name, A800.gpu_type, *numbers, len(found.samples), f"{found.mean_error:.4f}", f"{found.worst_error:.4f}")


def write_data(say: Callable[[str], None]) -> None:
    source = SHARED / "morphling_llm" / "placements.csv"
    if source.is_file():
        (DATA / "a800.csv").write_text(shipped_rows(source.read_text()), encoding="utf-8")
        measured.rows.cache_clear()
    else:
        say(f"{source.name} does not lie beside the checkout: a800.csv stays as it is")
    (DATA / "fitted.csv").write_text(shipped_constants(), encoding="utf-8")
    say(f"{DATA.relative_to(ROOT)}: a800.csv, fitted.csv")


# --- The command ------------------------------------------------------------------------------------------------------


def table(document: dict[str, Any]) -> str:
    lines = [f"{'model':16}{'unseen':>7}{'mean':>8}{'worst':>8}{'naive':>8}{'random':>8}  by plan"]
    for part in (key for key in document if key.startswith(("a800", "vtrain"))):
        lines.append(part)
        for name, row in document[part]["models"].items():
            kinds = "  ".join(f"{k} {v['mean']:.1%}/{v['worst']:.1%}" for k, v in row["unseen_by_plan"].items())
            random = f"{row['random']['median']:8.1%}" if "random" in row else f"{'-':>8}"
            unseen = row["unseen"]
            lines.append(
                f"{name:16}{unseen['rows']:7}{unseen['mean']:8.1%}{unseen['worst']:8.1%}{row['naive']['mean']:8.0%}"
                f"{random}  {kinds}"
            )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=20, help="random choices of seven rows, per model")
    parser.add_argument("--vtrain-draws", type=int, default=5)
    parser.add_argument("--strict", action="store_true", help="also: environment without the model (minutes)")
    parser.add_argument("--calibrate", action="store_true")
    parser.add_argument("--data", action="store_true")
    parser.add_argument("--out", type=Path, default=RESULT)
    asked = parser.parse_args(arguments)
    if asked.calibrate:
        calibrate_all(print)
    elif asked.data:
        write_data(print)
    else:
        document = study(asked.draws, asked.vtrain_draws)
        if asked.strict:
            document["a800"]["environment_without_the_model"] = without_each_model(print)
        asked.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        print(table(document))


if __name__ == "__main__":
    main()
