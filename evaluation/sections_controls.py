"""Sections on controls and formats: ablation, dropout, temperature, reach, strides, width."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from evaluation.class_bpb.statistics import BY_BAND, CLASS_NAMES, grouping_labels
from evaluation.contrasts import Contrast, records_bits_per_byte
from evaluation.paper import beside, by_seed
from evaluation.paper_tables import short_hash
from evaluation.records import Records
from evaluation.section import Section, all_pairs, pair_hashes, pair_name, paper_text
from evaluation.study import Study
from evaluation.tables import MISSING, Table, signed, signed_interval, split_table


def class_profile(name: str, title: str, records: Sequence[Records]) -> Table:
    """Mean nats per target class of several arms on one set, one column an arm."""
    labels = grouping_labels(BY_BAND, records[0].header.chunk_length)
    columns = []
    for one in records:
        counts = BY_BAND.collapse(one.sums.num_targets.sum(axis=0))
        nats = BY_BAND.collapse(one.sums.nats.sum(axis=0))
        columns.append(
            [f"{n / c:.3f}" if c else MISSING for n, c in zip(nats, counts, strict=True)]
        )
    rows = [(label, *cells) for label, *cells in zip(labels, *columns, strict=True)]
    rows.append(("records", *(short_hash(one) for one in records)))
    names = (f"{one.header.label} s{one.header.seed}" for one in records)
    return Table(name, title, ("class", *names), tuple(rows))


def class_effects(name: str, title: str, contrasts: Sequence[Contrast]) -> Table:
    """Gain of several contrasts by target class, one column a contrast."""
    labels = grouping_labels(BY_BAND, contrasts[0].arm.header.chunk_length)
    splits = [found.gain_by("band") or {} for found in contrasts]
    columns = [
        [signed(value) for value in split.values()] or [MISSING] * len(labels) for split in splits
    ]
    rows = [(label, *cells) for label, *cells in zip(labels, *columns, strict=True)]
    rows.append(("all", *(signed(found.gain) for found in contrasts)))
    rows.append(("records", *(pair_hashes(found) for found in contrasts)))
    names = (f"{pair_name(one)}, {one.arm.header.format}" for one in contrasts)
    return Table(name, title, ("class", *names), tuple(rows))


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
                lines.append(
                    f"{pair_name(found)} on {name}, {form} format: "
                    f"{records_bits_per_byte(found.arm):.5f} bpb, {abs(found.gain):.3f} "
                    f"{'worse' if found.gain < 0 else 'better'} than the base."
                )
                # The paper's is of A + table under half-row strides.
                half = f"stride{found.arm.header.row_length // 2}-"
                if (arm, seed, name) == ("a_table", 44, "dev_val") and form.startswith(half):
                    lines[-1] += (
                        f" Paper: {published['bits_per_byte']:.5f}, "
                        f"{published['worse_than_base']:.3f} worse."
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


_UNMATCHED_VISIBLE = np.array(
    [name.startswith("copy_") and name.endswith("visible.no_match") for name in CLASS_NAMES]
)


def reach_mistakes(study: Study) -> Section:
    """Strided scores whose table and window are cut at different points (4.6)."""
    title = "Both reach mistakes, recreated (Section 4.6)"
    rows, contrasts = [], []
    published = paper_text("reach_mistakes")
    for form in study.formats:
        for name in study.sets(form):
            for arm, baseline, seed in study.pairs:
                found = study.contrast(arm, baseline, seed, name, form)
                if found is None or found.arm.reach is None:
                    continue
                if not found.arm.header.has_table:
                    continue
                rows.append(_mistake_row(found, published))
                if found.arm.reach.violations.any():
                    twin = form.replace("-chunk", "-window")
                    pair = [found, study.contrast(arm, baseline, seed, name, twin)]
                    contrasts += [one for one in pair if one is not None]
    if not rows:
        return Section(title, "Missing: table arms and their baselines, scored by this code.")
    columns = (
        *("contrast", "set", "format", "violations", "reaches past the row"),
        *("visible copies without a match", "their nats: base, table", "contribution", "gain"),
        "records",
    )
    tables = [Table("reach", "Violations of the invariant of training", columns, tuple(rows))]
    if contrasts:
        tables.append(class_effects("reach.classes", "Gain by class, bpb", contrasts))
    text = (
        "A violation is a position where the table knows less than the row shows. Paper, seed 44, "
        "dev-val: A + table gained .0017 with the mistaken reach and .0113 with the window's; on B "
        "15,357 visible copies had no match (.441 to 1.279 nats), in the training format 23. "
        "Results with violations are none: they are here to show what the mistake does."
    )
    return Section(title, text, tuple(tables))


def _mistake_row(found: Contrast, published: dict[str, Any]) -> tuple[str, ...]:
    header, reach = found.arm.header, found.arm.reach
    assert reach is not None
    counts = int(found.arm.sums.num_targets.sum(axis=0)[_UNMATCHED_VISIBLE].sum())
    nats = [float(one.sums.nats.sum(axis=0)[_UNMATCHED_VISIBLE].sum())
            for one in (found.baseline, found.arm)]  # fmt: skip
    saved = (nats[0] - nats[1]) / (np.log(2) * found.arm.sums.num_bytes.sum())
    same_rows = found.baseline.header.row_length == header.row_length
    shown = f"{nats[0] / counts:.3f}, {nats[1] / counts:.3f}" if counts and same_rows else MISSING
    total = int(reach.positions.sum())
    return (
        pair_name(found),
        header.set_name,
        header.format,
        f"{int(reach.violations.sum()):,} ({reach.violations.sum() / total:.2%})",
        f"{reach.further.sum() / total:.1%}",
        f"{counts:,}",
        shown,
        signed(saved) if counts and same_rows else MISSING,
        signed(found.gain),
        pair_hashes(found),
    )


def both_formats(study: Study) -> Section:
    """Gains and rankings of the arms under the training and the stride formats (4.6)."""
    title = "Gains and rankings under both formats (Section 4.6)"
    strided = [form for form in study.formats if form.startswith("stride")]
    if not strided:
        return Section(title, "Missing: scores with --format stride.")
    rows, rankings = [], []
    published = paper_text("both_formats")["b_table"]
    for form in ("training", *strided):
        for found in all_pairs(study, form):
            header = found.arm.header
            paper = None
            if header.arm == "b_table" and form == f"stride{header.row_length // 2}-chunk":
                paper = by_seed(published.get(header.set_name), header.seed)
            cells = (pair_name(found), header.set_name, form, beside(found.gain, paper))
            rows.append((*cells, pair_hashes(found)))
    half_rows = dict.fromkeys(reach for form in strided for reach in [form.partition("-")[2]])
    for name in study.sets():
        rankings.append((name, "training", _ranking(study, name, ["training"])))
        for reach in half_rows:
            forms = [form for form in strided if form.endswith(reach)]
            rankings.append((name, f"stride, {reach} reach", _ranking(study, name, forms)))
    columns = ("contrast", "set", "format", "gain: ours / paper / difference", "records")
    order = ("set", "format", "arms from the lowest bpb up")
    tables = (
        Table("formats.gain", "Gains, bpb", columns, tuple(rows)),
        Table("formats.ranking", "Rankings", order, tuple(rankings)),
    )
    return Section(title, "The evaluation format must be stated with a gain.", tables)


def _ranking(study: Study, set_name: str, forms: Sequence[str]) -> str:
    """Arms by bits per byte, each in the first of the formats that it has."""
    found = []
    for arm, seed in study.arms:
        records = [study.records(arm, seed, set_name, form) for form in forms]
        scored = [one for one in records if one is not None]
        if scored:
            found.append((records_bits_per_byte(scored[0]), f"{arm} s{seed}"))
    return " < ".join(name for _, name in sorted(found)) or MISSING


def widths(study: Study) -> Section:
    """The table's gain on one layout at several widths, with class terms (4.7)."""
    title = "Width (Section 4.7)"
    by_layout: dict[tuple[Any, ...], dict[int, tuple[str, str, int]]] = {}
    for pair in study.pairs:
        arm, baseline, seed = pair
        model = study.recipe(arm, seed).get("model", {})
        theirs = study.recipe(baseline, seed).get("model", {})
        if not model.get("document_table") or theirs.get("document_table"):
            continue
        if _table_source(study, pair) != "document":
            continue  # a control or dropout stands for no width
        keys = ("max_position_embeddings", "window_pattern", "short_window", "num_hidden_layers")
        layout = (*(model.get(key) for key in keys), seed)
        by_layout.setdefault(layout, {})[model.get("hidden_size", 512)] = pair
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
        for (_, small), (_, large) in pairwise(sorted(group.items())):
            versus = study.contrast(large[1], small[0], small[2], name)
            if versus is not None:
                rows.append((pair_name(versus), signed(versus.gain), pair_hashes(versus)))
    columns = ("wider base over narrower table arm", "gain", "records")
    tables = (
        class_effects("width.classes", f"Gain by class on {name}, bpb", contrasts),
        Table("width.versus", "Width against the table, bpb", columns, tuple(rows)),
    )
    return Section(title, "Table 7 has the gains on all sets.", tables)
