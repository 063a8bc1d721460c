"""Verdicts: registered contrasts, predictions with bounds, and rules of several outcomes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from evaluation.contrasts import Contrast, matching_groups

# Arm, baseline, seed, set, format -> the contrast, or None where records are missing.
FindContrast = Callable[[str, str, int, str, str], Contrast | None]
_CONTRAST_KEYS = {"name", "says", "arm", "baseline", "sign", "seeds", "prediction"}
_GAIN_KEYS = {"arm", "baseline", "part"}
_RULE_KEYS = {"name", "gain", "relative_to", "sets", "format", "seeds", "decides", "outcomes"}


@dataclass(frozen=True)
class SeedVerdict:
    """One contrast at one seed. `bounds` are the prediction's; None where none was registered."""

    seed: int
    gain: float
    interval: tuple[float, float]
    bounds: tuple[float, float] | None

    @property
    def within(self) -> bool:
        """Whether the prediction held; True where there is none."""
        return self.bounds is None or self.bounds[0] <= self.gain <= self.bounds[1]


@dataclass(frozen=True)
class Verdict:
    """A registered contrast after scoring: sign +1 says that the arm beats its baseline."""

    name: str
    says: str
    sign: int
    seeds: tuple[SeedVerdict, ...]

    @property
    def confirmed(self) -> bool:
        """The registered sign holds with the interval excluding 0, at every seed (Section 3.6)."""
        # A NaN end, the interval of one document, confirms nothing.
        return all(
            one.gain * self.sign > 0 and min(end * self.sign for end in one.interval) > 0
            for one in self.seeds
        )

    @property
    def prediction_missed(self) -> bool:
        """Whether a seed's value lies outside its registered bounds."""
        return not all(one.within for one in self.seeds)

    def __str__(self) -> str:
        """Two or more lines: the outcome, then each seed."""
        outcome = "confirmed" if self.confirmed else "not confirmed"
        if self.prediction_missed:
            outcome += ", prediction missed"
        lines = [f"{self.name} {outcome}: {self.says}"]
        for one in self.seeds:
            low, high = one.interval
            line = f"  seed {one.seed}: {one.gain:+.4f} [{low:+.4f}, {high:+.4f}]"
            if one.bounds is not None:
                held = "held" if one.within else "missed"
                line += f", predicted {one.bounds[0]:+.4f} to {one.bounds[1]:+.4f}: {held}"
            lines.append(line)
        return "\n".join(lines)


@dataclass(frozen=True)
class RuleOutcome:
    """A rule after scoring; `value` is None where records are missing."""

    name: str
    value: float | None
    says: str

    def __str__(self) -> str:
        """One line."""
        value = "missing" if self.value is None else f"{self.value:.4f}"
        return f"{self.name}: {self.says} ({value})"


def check_contrasts(contrasts: Sequence[dict[str, Any]]) -> None:
    """Check the contrasts of a draft.

    Raises:
        ValueError: naming the contrast and what it must hold.
    """
    if not contrasts:
        raise ValueError("A registration must hold at least one contrast.")
    for entry in contrasts:
        where = _where("contrast", entry)
        _check_keys(where, entry, {"name", "arm", "baseline", "sign", "seeds"}, _CONTRAST_KEYS)
        if entry["sign"] not in ("+", "-"):
            raise ValueError(
                f"{where}: sign must be '+' (the arm beats its baseline) or '-'; got "
                f"{entry['sign']!r}."
            )
        _check_list(where, entry, "seeds", int)
        prediction = entry.get("prediction")
        forms: tuple[dict[str, type], ...] = (
            {"within": float, "of": str},
            {"at_least": float, "at_most": float},
        )
        if prediction is not None and not any(_has_form(prediction, form) for form in forms):
            raise ValueError(
                f"{where}: a prediction must be {{within: W, of: SET}} or {{at_least: A, at_most: "
                f"B}}, in bits per byte; got {prediction!r}."
            )


def check_rules(rules: Sequence[dict[str, Any]]) -> None:
    """Check the rules of a draft.

    Raises:
        ValueError: naming the rule and what it must hold.
    """
    for rule in rules:
        where = _where("rule", rule)
        _check_keys(where, rule, {"name", "gain", "sets", "seeds", "outcomes"}, _RULE_KEYS)
        _check_list(where, rule, "seeds", int)
        _check_list(where, rule, "sets", str)
        _check_list(where, rule, "outcomes", dict)
        if rule.get("decides", "smallest") not in ("smallest", "largest"):
            raise ValueError(f"{where}: decides must be 'smallest' or 'largest'.")
        bounds = [outcome.get("at_least") for outcome in rule["outcomes"]]
        for pair in rule_pairs(rule):
            _check_keys(f"{where}: a gain", pair, {"arm", "baseline"}, _GAIN_KEYS)
            part = pair.get("part")
            if part is not None:
                _check_keys(f"{where}: a part", part, {"of", "groups"}, {"of", "groups"})
                _check_list(f"{where}: a part", part, "groups", str)
                try:
                    matching_groups(part["of"], part["groups"])
                except ValueError as error:
                    raise ValueError(f"{where}: {error}.") from None
        numbers = [bound for bound in bounds if bound is not None]
        if bounds[-1:] != [None] or len(numbers) != len(bounds) - 1:
            raise ValueError(
                f"{where}: every outcome but the last must have at_least, the last none, so that "
                "every value has one outcome."
            )
        if numbers != sorted(set(numbers), reverse=True):
            raise ValueError(f"{where}: at_least must fall from outcome to outcome; got {numbers}.")


def judge(entry: dict[str, Any], set_name: str, form: str, find: FindContrast) -> Verdict:
    """Judge one registered contrast.

    Raises:
        ValueError: if a seed's records are missing.
    """
    seeds = []
    for seed in entry["seeds"]:
        found = find(entry["arm"], entry["baseline"], int(seed), set_name, form)
        if found is None:
            raise ValueError(
                f"{entry['name']} needs the records of {entry['arm']} and {entry['baseline']}, "
                f"seed {seed}, on {set_name} in the {form} format. Give their runs."
            )
        bounds = (entry.get("bounds") or {}).get(str(seed))
        seeds.append(
            SeedVerdict(
                seed=int(seed),
                gain=found.gain,
                interval=found.comparison.gain_interval,
                bounds=None if bounds is None else (float(bounds[0]), float(bounds[1])),
            )
        )
    sign = 1 if entry["sign"] == "+" else -1
    return Verdict(entry["name"], entry.get("says", ""), sign, tuple(seeds))


def apply_rule(rule: dict[str, Any], form: str, find: FindContrast) -> RuleOutcome:
    """Decide one rule: its value over all sets and seeds, and the outcome that it falls in."""
    values = []
    for set_name in rule["sets"]:
        for seed in rule["seeds"]:
            try:
                value = _rule_value(rule, int(seed), set_name, rule.get("format", form), find)
            except ValueError as error:  # a gain that cannot be split as the rule asks
                return RuleOutcome(rule["name"], None, str(error))
            if value is None:
                return RuleOutcome(rule["name"], None, f"no records of seed {seed} on {set_name}")
            values.append(value)
    decisive = max(values) if rule.get("decides") == "largest" else min(values)
    for outcome in rule["outcomes"]:
        if decisive >= outcome.get("at_least", float("-inf")):
            return RuleOutcome(rule["name"], decisive, outcome["says"])
    raise AssertionError("the last outcome takes every value")


def _rule_value(
    rule: dict[str, Any], seed: int, set_name: str, form: str, find: FindContrast
) -> float | None:
    values = []
    for pair in rule_pairs(rule):
        found = find(pair["arm"], pair["baseline"], seed, set_name, form)
        if found is None:
            return None
        part = pair.get("part")
        values.append(found.gain if part is None else found.part(part["of"], part["groups"]))
    return values[0] if len(values) == 1 else values[0] / values[1]


def rule_pairs(rule: dict[str, Any]) -> list[dict[str, Any]]:
    """The gain of a rule, and the one that it is relative to, if any."""
    return [rule[name] for name in ("gain", "relative_to") if name in rule]


def check_parts(
    rules: Sequence[dict[str, Any]], form: str, sets: Sequence[str], find: FindContrast
) -> None:
    """Check that the parts of gains exist for these runs, as far as records are there.

    Args:
        rules: of a draft, checked by `check_rules`.
        form: the draft's format, which a rule may replace.
        sets: more sets than a rule's own whose records may tell.
        find: finds the contrasts.

    Raises:
        ValueError: if a gain cannot be split as a rule asks.
    """
    for rule in rules:
        for pair in rule_pairs(rule):
            part = pair.get("part")
            if part is None:
                continue
            for name in dict.fromkeys((*rule["sets"], *sets)):
                for seed in rule["seeds"]:
                    arms = (pair["arm"], pair["baseline"], int(seed))
                    found = find(*arms, name, rule.get("format", form))
                    if found is None:
                        continue
                    try:
                        found.part(part["of"], part["groups"])
                    except ValueError as error:
                        raise ValueError(f"rule {rule['name']!r}: {error}.") from None


def _where(kind: str, entry: Any) -> str:
    if not isinstance(entry, dict):
        raise ValueError(f"Every {kind} must be a mapping; got {entry!r}.")
    return f"{kind} {entry.get('name')!r}"


def _check_list(where: str, entry: dict[str, Any], key: str, kind: type) -> None:
    found = entry[key]
    if not isinstance(found, list) or not found or not all(_is(one, kind) for one in found):
        raise ValueError(
            f"{where}: {key} must be a list of one {kind.__name__} or more, as {key}: [...]; got "
            f"{found!r}."
        )


def _has_form(entry: Any, form: dict[str, type]) -> bool:
    """Whether a mapping has exactly these keys, with values of these types."""
    return (
        isinstance(entry, dict)
        and set(entry) == set(form)
        and all(_is(entry[key], kind) for key, kind in form.items())
    )


def _is(value: Any, kind: type) -> bool:
    if isinstance(value, bool):
        return False
    return isinstance(value, (int, float) if kind is float else kind)


def _check_keys(where: str, entry: dict[str, Any], needed: set[str], known: set[str]) -> None:
    if not isinstance(entry, dict):
        raise ValueError(f"{where} must be a mapping; got {entry!r}.")
    missing, unknown = sorted(needed - set(entry)), sorted(set(entry) - known)
    if missing or unknown:
        raise ValueError(
            f"{where} must have {', '.join(sorted(needed))}; missing {missing}, unknown {unknown}."
        )
