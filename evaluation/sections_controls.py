"""Sections on controls: ablation, other fields, dropout, temperature, width."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from evaluation.class_bpb.statistics import BAND_NAMES, BY_BAND
from evaluation.contrasts import Contrast, records_bits_per_byte
from evaluation.paper import beside, paper_gain
from evaluation.profiles import class_effects, class_profile
from evaluation.section import Section, pair_hashes, pair_name, paper_text
from evaluation.study import Study
from evaluation.tables import MISSING, Table, signed, signed_interval, split_table

# What a model's width decides; all other options are its layout.
_WIDTH_KEYS = (
    *("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("intermediate_size", "document_table"),
)


def ablation(study: Study) -> Section:
    """A trained table model with every position set to no match, against its baseline (4.4)."""
    title = "Ablated table (Section 4.4)"
    published = paper_text("ablation")
    tables: list[Table] = []
    lines = []
    for form in study.formats:
        for name in study.sets(form):
            for arm, baseline, seed in study.pairs:
                found = study.contrast(arm, baseline, seed, name, form, ablated=True)
                whole = study.records(arm, seed, name, form)
                if found is None:
                    continue
                before, after = (
                    one.mean_nats(BY_BAND, [f"copy_{BAND_NAMES[0]}"])
                    for one in (found.baseline, found.arm)
                )
                lines.append(
                    f"- {pair_name(found)} on {name}, {form} format: "
                    f"{records_bits_per_byte(found.arm):.5f} bpb, {abs(found.gain):.3f} "
                    f"{'worse' if found.gain < 0 else 'better'} than the base; the nearest copies "
                    f"{before:.3f} to {after:.3f} nats, order 0 "
                    f"{signed((found.gain_by('band') or {}).get('order_0', np.nan))} bpb."
                )
                # The paper's is of A + table under half-row strides.
                half = f"stride{found.arm.header.row_length // 2}-"
                if (arm, seed, name) == ("a_table", 44, "dev_val") and form.startswith(half):
                    near = published["nats_to_1_16"]
                    lines[-1] += (
                        f" Paper: {published['bits_per_byte']:.5f}, "
                        f"{published['worse_than_base']:.3f} worse; {near['a']:.3f} to "
                        f"{near['ablated']:.3f} nats, {signed(published['order_0_contribution'])}."
                    )
                key = f"ablation.{arm}.s{seed}.{name}.{form}"
                arms = [one for one in (found.baseline, whole, found.arm) if one is not None]
                tables.append(class_profile(f"{key}.nats", "Mean nats by class", arms))
                tables.append(class_effects(f"{key}.gain", "Gain by class, bpb", [found]))
    if not lines:
        return Section(title, "Missing: scores with --ablate_table.")
    return Section(title, "\n".join(lines), tuple(tables))


def other_fields(study: Study) -> Section:
    """Tables fed the fields of another document or place, beside the document's own (4.4)."""
    title = "Fields of another document or place (the open question of Section 4.4)"
    text = (
        "The paper does not explain its order-0 gain: tokens that the table cannot predict. "
        "`foreign` tables were trained and scored with the fields of another document's chunk, "
        "`shuffled` ones with those of an earlier position, `empty` ones with no match everywhere: "
        "what they gain, a candidate's being right cannot have brought."
    )
    sources = {pair: _table_source(study, pair) for pair in study.pairs}
    with_table = [pair for pair, source in sources.items() if source is not None]
    controlled = {pair[1:] for pair in with_table if sources[pair] != "document"}
    rows = []
    for pair in (one for one in with_table if one[1:] in controlled):
        for name in study.sets():
            found = study.contrast(*pair, name)
            split = None if found is None else found.gain_by("band")
            if found is None or split is None:
                continue
            copies = sum(value for key, value in split.items() if key.startswith("copy"))
            gain = f"{signed(found.gain)} {signed_interval(found.comparison.gain_interval)}"
            parts = (split["order_0"], split["order_1"], copies)
            shown = (gain, *(signed(value) for value in parts))
            rows.append((pair_name(found), name, *shown, pair_hashes(found)))
    if not rows:
        return Section(
            title, f"{text} Missing: arms with table_source: foreign, shuffled or empty."
        )
    columns = ("contrast", "set", "gain", "order 0", "order 1", "copies", "records")
    return Section(title, text, (Table("other_fields", "Gain, bpb", columns, tuple(rows)),))


def _table_source(study: Study, pair: tuple[str, str, int]) -> str | None:
    """Where an arm's fields come from; None without a recipe or a table, and with dropout."""
    recipe = study.recipe(pair[0], pair[2])
    data = recipe.get("data", {})
    has_table = recipe.get("model", {}).get("document_table", True)
    if not recipe or not has_table or data.get("table_dropout"):
        return None
    return str(data.get("table_source", "document"))


def dropout(study: Study) -> Section:
    """Arms trained with table dropout against their baseline, beside the plain table (4.5)."""
    chosen = [
        (arm, baseline, seed)
        for arm, baseline, seed in study.pairs
        if study.recipe(arm, seed).get("data", {}).get("table_dropout") or arm.endswith("_dropout")
    ]
    published = {"a_table_dropout": paper_text("dropout")["gain"]}
    title = "Table dropout (Section 4.5)"
    return _special_arms(study, title, "dropout", chosen, published, "table_state")


def temperature(study: Study) -> Section:
    """Learned query scales: gains, learned values, classes (4.8)."""
    scaled = [
        (arm, seed)
        for arm, seed in study.arms
        if study.recipe(arm, seed).get("model", {}).get("query_scaling")
        or arm.endswith(("_log_length", "_head_gain"))
    ]
    pairs = [pair for pair in study.pairs if (pair[0], pair[2]) in scaled]
    published = paper_text("temperature")["gain"]
    title = "Attention temperature (Section 4.8)"
    section = _special_arms(study, title, "temperature", pairs, published, "band")
    rows = []
    for arm, seed in scaled:
        diagnoses = study.attention(arm, seed).values()
        query_gains = next((one.query_gains for one in diagnoses), [])
        for layer, gains in enumerate(query_gains or [[]]):
            shown = " ".join(f"{gain:.2f}" for gain in gains) or MISSING
            rows.append((arm, str(seed), str(layer) if gains else MISSING, shown))
    if not rows:
        return section
    columns = ("arm", "seed", "layer", "gain of each head")
    learned = Table(
        "learned_gains", "Learned gains g_h (paper: 1.2 to 2.3, one 7.3)", columns, tuple(rows)
    )
    return Section(section.title, section.text, (*section.tables, learned))


def _special_arms(
    study: Study,
    title: str,
    key: str,
    pairs: Sequence[tuple[str, str, int]],
    published: dict[str, dict[str, float]],
    partition: str,
) -> Section:
    """Gains of some arms on every set, and their classes on the main one."""
    rows: list[tuple[str, ...]] = []
    on_main: dict[tuple[str, str, int], Contrast | None] = {}
    for arm, baseline, seed in pairs:
        siblings = [p for p in study.pairs if p[1:] == (baseline, seed)]
        for name in study.sets():
            found = study.contrast(arm, baseline, seed, name)
            if found is None:
                continue
            paper = published.get(arm, {}).get(name) if seed == 44 else None
            rows.append((pair_name(found), name, beside(found.gain, paper), pair_hashes(found)))
            if name == study.main_set:
                on_main |= {sibling: study.contrast(*sibling, name) for sibling in siblings}
    if not rows:
        return Section(title, f"Missing: {', '.join(published)}.")
    columns = ("contrast", "set", "gain: ours / paper / difference", "records")
    tables = [Table(f"{key}.gain", "Gain, bpb", columns, tuple(rows))]
    contrasts = [one for one in on_main.values() if one is not None]
    if contrasts:
        tables.append(class_effects(f"{key}.classes", "Gain by class, bpb", contrasts))
        arms = [contrasts[0].baseline, *(one.arm for one in contrasts)]
        tables.append(class_profile(f"{key}.nats", "Mean nats by class", arms))
    if partition == "table_state" and contrasts:
        split = split_table(contrasts, partition)
        tables += [] if split is None else [split]
    return Section(title, "", tuple(tables))


def widths(study: Study) -> Section:
    """The table's gain on one layout at several widths, with class terms (4.7)."""
    title = "Width (Section 4.7)"
    by_layout: dict[str, dict[int, tuple[str, str, int]]] = {}
    for pair in study.pairs:
        arm, baseline, seed = pair
        model = study.recipe(arm, seed).get("model", {})
        theirs = study.recipe(baseline, seed).get("model", {})
        if not model.get("document_table") or theirs.get("document_table"):
            continue
        if _table_source(study, pair) != "document":
            continue  # a control or dropout stands for no width
        layout = {key: value for key, value in theirs.items() if key not in _WIDTH_KEYS}
        same = json.dumps([layout, seed], sort_keys=True)
        by_layout.setdefault(same, {})[model.get("hidden_size", 512)] = pair
    groups = [group for group in by_layout.values() if len(group) > 1]
    name = study.main_set
    if not groups or name is None:
        return Section(title, "Missing: one layout with and without table at two widths or more.")
    found = [study.contrast(*pair, name) for group in groups for _, pair in sorted(group.items())]
    contrasts = [one for one in found if one is not None]
    if not contrasts:
        return Section(title, f"Missing: their scores on {name}.")
    rows = []
    for group in groups:
        for (_, (narrow, _, seed)), (_, (_, wide, _)) in pairwise(sorted(group.items())):
            for each in study.sets():
                versus = study.contrast(wide, narrow, seed, each)
                if versus is None:
                    continue
                shown = beside(versus.gain, paper_gain(wide, narrow, seed, each))
                rows.append((pair_name(versus), each, shown, pair_hashes(versus)))
    columns = ("wider base over narrower table arm", "set", "gain: ours / paper / difference")
    tables = (
        class_effects("width.classes", f"Gain by class on {name}, bpb", contrasts),
        Table("width.versus", "Width against the table, bpb", (*columns, "records"), tuple(rows)),
    )
    text = (
        "Table 7 has the gains on all sets. Paper, dev-val, at widths 384, 512 and 768: copies 4K "
        "to 8K back +.0028, +.0021, +.0014; order 0 +.0061, +.0059, +.0049."
    )
    return Section(title, text, tables)
