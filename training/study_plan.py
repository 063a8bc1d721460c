"""A study as its YAML file states it: what is built, trained, scored and registered."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

import yaml

T = TypeVar("T")


@dataclass(frozen=True)
class Group:
    """Arms that share their data."""

    data: str
    """Name of their chunk set."""
    sets: tuple[str, ...]
    """Evaluation splits, scored in the training format."""
    arms: Mapping[str, tuple[int, ...]]
    """Arm, the stem of its recipe file -> seeds."""
    detailed: bool = False
    """Also score strides and ablated tables, of the detail's seed and set."""


@dataclass(frozen=True)
class Detail:
    """What one seed is looked at more closely for (Sections 4.1, 4.4 and 4.6)."""

    seed: int = 44
    """Of the arms looked at."""
    set_name: str = "dev_val"
    """Split of the strides, ablations, attention weights and the mixture's fit."""
    packed: tuple[str, str] | None = None
    """Chunk set and split of packed rows that every arm is scored on too (Table 1)."""
    mixture: tuple[str, ...] = ()
    """Arms without a table that get the output mixture."""
    attention: tuple[str, ...] = ()
    """Arms whose attention to copy sources is measured."""
    strides: tuple[str, ...] = ()
    """Arms scored under strides on all sets of their group and with every seed (Section 4.6)."""


@dataclass(frozen=True)
class StudyPlan:
    """A whole study."""

    title: str
    """One line."""
    recipes: Path
    """Folder with one recipe an arm."""
    data: Mapping[str, tuple[str, ...]]
    """Chunk set -> commands that make it at {out}/NAME, in order; {corpus} is the user's folder."""
    groups: Mapping[str, Group]
    """What is trained, in order."""
    detail: Detail = field(default_factory=Detail)
    """What is looked at closely."""
    registration: tuple[Path, ...] = ()
    """Drafts for the confirmation; a later arm's comes behind the first. Empty: no confirmation."""
    cards: tuple[str, ...] = ()
    """Arms of the detail's seed that get a model card."""
    download_gigabytes: float = 0.0
    """What the data commands fetch from the Hub, about."""
    data_gigabytes: float = 0.1
    """Disk that the chunk sets and the scores need, about."""


_ARMS_OF_DETAIL = ("mixture", "attention", "strides")


def read_study(path: Path) -> StudyPlan:
    """Read a study's YAML file and check it.

    Raises:
        ValueError: naming the key and what it must hold.
    """
    try:
        plain = yaml.safe_load(path.read_text())
    except (OSError, yaml.YAMLError) as error:
        raise ValueError(f"{path} must be a study in YAML: {error}") from None
    plan = dict(_mapping(plain, str(path)))
    where = f"{path}: groups."
    groups = _mapping(plan.get("groups"), where)
    plan["groups"] = {
        name: _build(Group, _group(group, where + name), where + name)
        for name, group in groups.items()
    }
    detail = _mapping(plan.get("detail") or {}, f"{path}: detail")
    plan["detail"] = _build(Detail, _tuples(detail), f"{path}: detail")
    plan["cards"] = tuple(plan.get("cards") or ())
    plan["data"] = _tuples(_mapping(plan.get("data"), f"{path}: data"))
    if plan.get("recipes") is not None:
        plan["recipes"] = Path(plan["recipes"])
    drafts = plan.get("registration") or ()
    plan["registration"] = tuple(map(Path, [drafts] if isinstance(drafts, str) else drafts))
    found = _build(StudyPlan, plan, str(path))
    sources = {name: group.data for name, group in found.groups.items()}
    if found.detail.packed is not None:
        sources["detail.packed"] = found.detail.packed[0]
    for name, data in sources.items():
        if data not in found.data:
            raise ValueError(
                f"{path}: {name} names the chunk set {data!r}; data has {', '.join(found.data)}"
            )
    for group in found.groups.values():
        for arm in group.arms:
            if not (found.recipes / f"{arm}.yaml").is_file():
                raise ValueError(f"{path}: no recipe {found.recipes / f'{arm}.yaml'}")
    trained = {arm for group in found.groups.values() for arm in group.arms}
    named = {f"detail.{key}": getattr(found.detail, key) for key in _ARMS_OF_DETAIL}
    for key, arms in {**named, "cards": found.cards}.items():
        for arm in arms:
            if arm not in trained:
                raise ValueError(
                    f"{path}: {key} names the arm {arm!r}; no group trains it: "
                    f"{', '.join(sorted(trained))}"
                )
    return found


def _group(plain: Any, where: str) -> dict[str, Any]:
    group = _tuples(_mapping(plain, where))
    return group | {"arms": _tuples(_mapping(group.get("arms"), f"{where}.arms"))}


def _mapping(plain: Any, where: str) -> dict[str, Any]:
    if not isinstance(plain, dict):
        raise ValueError(f"{where} must be a mapping of keys; got {plain!r}")
    return plain


def _tuples(plain: dict[str, Any]) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in plain.items()}


def _build(cls: type[T], values: dict[str, Any], where: str) -> T:
    known = [f.name for f in fields(cls)]  # type: ignore[arg-type]
    unknown = sorted(set(values) - set(known))
    if unknown:
        raise ValueError(f"{where}: {unknown[0]} is not a key; known: {', '.join(known)}")
    try:
        return cls(**values)
    except TypeError as error:
        raise ValueError(f"{where}: {error}") from None
