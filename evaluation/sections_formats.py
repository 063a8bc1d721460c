"""Sections on the evaluation's format: spans cut apart, and gains under both formats (4.6)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from evaluation.class_bpb.statistics import CLASS_NAMES
from evaluation.contrasts import Contrast, records_bits_per_byte
from evaluation.paper import beside, by_seed, paper_arm, paper_gain
from evaluation.paper_tables import short_hash
from evaluation.profiles import cell_nats, class_effects
from evaluation.records import Records
from evaluation.section import Section, all_pairs, pair_hashes, pair_name, paper_text
from evaluation.study import Study
from evaluation.tables import MISSING, Table

_UNMATCHED_VISIBLE = np.array(
    [name.startswith("copy_") and name.endswith("visible.no_match") for name in CLASS_NAMES]
)


def reach_mistakes(study: Study) -> Section:
    """Strided scores whose table and window are cut at different points (4.6)."""
    title = "Both reach mistakes, recreated (Section 4.6)"
    rows, contrasts = [], []
    for form in study.formats:
        for name in study.sets(form):
            for arm, baseline, seed in study.pairs:
                found = study.contrast(arm, baseline, seed, name, form)
                if found is None or found.arm.reach is None:
                    continue
                if not found.arm.header.has_table:
                    continue
                rows.append(_mistake_row(found))
                if found.arm.reach.violations.any():
                    twin = form.replace("-chunk", "-window")
                    pair = [found, study.contrast(arm, baseline, seed, name, twin)]
                    contrasts += [one for one in pair if one is not None]
    if not rows:
        return Section(title, "Missing: table arms and their baselines, scored by this code.")
    columns = (
        *("contrast", "set", "format", "violations", "reaches past the row"),
        *("visible copies without a match", "their nats, base", "with table", "contribution"),
        *("gain", "records"),
    )
    heading = "Violations of the invariant of training (ours, or ours / paper / difference)"
    tables = [Table("reach", heading, columns, tuple(rows))]
    if contrasts:
        tables.append(class_effects("reach.classes", "Gain by class, bpb", contrasts))
        sides = [side for one in contrasts for side in (one.baseline, one.arm)]
        arms = list({one.sha256: one for one in sides}.values())
        tables.append(cell_nats("reach.cells", "Mean nats by target cell", arms))
    far = paper_text("reach_mistakes")["a_table_visible_2k_4k_nats"]
    text = (
        "A violation is a position where the table knows less than the row shows. Paper, seed 44, "
        f"dev-val: visible copies 2K to 4K back cost A {far['a']} nats, A + table {far['chunk']} "
        f"with the mistaken reach and {far['window']} with the window's. Results with violations "
        "are none: they are here to show what the mistake does."
    )
    return Section(title, text, tuple(tables))


def _mistake_row(found: Contrast) -> tuple[str, ...]:
    header, reach = found.arm.header, found.arm.reach
    assert reach is not None
    published = _paper_mistakes(found)
    counts = int(found.arm.sums.num_targets.sum(axis=0)[_UNMATCHED_VISIBLE].sum())
    nats = [float(one.sums.nats.sum(axis=0)[_UNMATCHED_VISIBLE].sum())
            for one in (found.baseline, found.arm)]  # fmt: skip
    saved = (nats[0] - nats[1]) / (np.log(2) * found.arm.sums.num_bytes.sum())
    comparable = counts > 0 and found.baseline.header.row_length == header.row_length
    total = int(reach.positions.sum())

    def shown(key: str, ours: float | None, decimals: int = 4, sign: bool = True) -> str:
        if key in published:
            return beside(ours, published[key], decimals, sign)
        return MISSING if ours is None else f"{ours:{'+' if sign else ','}.{decimals}f}"

    return (
        pair_name(found),
        header.set_name,
        header.format,
        f"{int(reach.violations.sum()):,} ({reach.violations.sum() / total:.2%})",
        f"{reach.further.sum() / total:.1%}",
        shown("visible_copies_without_match", counts, 0, False),
        shown("base_nats", nats[0] / counts if comparable else None, 3, False),
        shown("nats", nats[1] / counts if comparable else None, 3, False),
        shown("contribution", saved if comparable else None),
        shown("gain", found.gain),
        pair_hashes(found),
    )


def _paper_mistakes(found: Contrast) -> dict[str, float]:
    """What the paper says of one row of `reach_mistakes`, by column."""
    header, published = found.arm.header, paper_text("reach_mistakes")
    arm, name = paper_arm(header.arm), header.set_name
    row = {}
    gain = _paper_strided_gain(found)
    if gain is not None:
        row["gain"] = gain
    if (arm, header.seed) != ("b_table", 44):
        return row
    if header.format == "training" and name == "dev_val":
        return row | published["training_format"]
    if header.format == f"stride{header.row_length // 2}-chunk":
        columns = ("visible_copies_without_match", "base_nats", "nats", "contribution")
        row |= {key: published[key][name] for key in columns if name in published[key]}
    return row


def _paper_strided_gain(found: Contrast) -> float | None:
    """The paper's gain under half-row strides, of the format's reach."""
    header = found.arm.header
    for reach, gains in paper_text("both_formats")["gain"].items():
        if header.format == f"stride{header.row_length // 2}-{reach}":
            return by_seed(gains.get(paper_arm(header.arm), {}).get(header.set_name), header.seed)
    return None


def both_formats(study: Study) -> Section:
    """Gains and rankings of the arms under the training and the stride formats (4.6)."""
    title = "Gains and rankings under both formats (Section 4.6)"
    strided = [form for form in study.formats if form.startswith("stride")]
    if not strided:
        return Section(title, "Missing: scores with --format stride.")
    rows, rankings = [], []
    for form in ("training", *strided):
        for found in all_pairs(study, form):
            header = found.arm.header
            paper = _paper_strided_gain(found)
            if form == "training":
                pair = (paper_arm(header.arm), paper_arm(header.baseline or ""))
                paper = paper_gain(*pair, header.seed, header.set_name)
            cells = (pair_name(found), header.set_name, form, beside(found.gain, paper))
            rows.append((*cells, pair_hashes(found)))
    half_rows = list(dict.fromkeys(form.partition("-")[2] for form in strided))
    for name in study.sets():
        rankings.append((name, "training", _ranking(study, name, ["training"])))
        for reach in half_rows:
            forms = [form for form in strided if form.endswith(reach)]
            rankings.append((name, f"stride, {reach} reach", _ranking(study, name, forms)))
    columns = ("contrast", "set", "format", "gain: ours / paper / difference", "records")
    order = ("set", "format", "arms from the lowest bpb up")
    tables = [
        Table("formats.gain", "Gains, bpb", columns, tuple(rows)),
        Table("formats.ranking", "Rankings", order, tuple(rankings)),
    ]
    if between := _layouts_under_both(study, strided):
        title_of = "LG512 over B + table, each under strides of half its row, bpb"
        tables.insert(1, Table("formats.layouts", title_of, columns, tuple(between)))
    return Section(title, "The evaluation format must be stated with a gain.", tuple(tables))


def _layouts_under_both(study: Study, strided: Sequence[str]) -> list[tuple[str, ...]]:
    """Claim 2 under both formats: rows of other lengths, so no contrast, but the same targets."""
    arm, baseline = "lg512", "b_table"
    published = paper_text("both_formats")["lg512_over_b_table"]
    rows: list[tuple[str, ...]] = []
    for name in study.sets():
        for seed in dict.fromkeys(seed for _, seed in study.arms):
            whole = study.contrast(arm, baseline, seed, name)
            if whole is not None:
                shown = beside(whole.gain, paper_gain(arm, baseline, seed, name))
                rows.append((pair_name(whole), name, "training", shown, pair_hashes(whole)))
            for reach in ("chunk", "window"):
                forms = [form for form in strided if form.endswith(f"-{reach}")]
                mine, theirs = (_half_row(study, one, seed, name, forms) for one in (arm, baseline))
                if mine is None or theirs is None:
                    continue
                if mine.sums.num_bytes.sum() != theirs.sums.num_bytes.sum():
                    continue
                difference = records_bits_per_byte(theirs) - records_bits_per_byte(mine)
                paper = by_seed(published.get(name), seed) if reach == "chunk" else None
                label = f"{mine.header.label} over {theirs.header.label} s{seed}"
                cells = (label, name, f"stride, {reach} reach", beside(difference, paper))
                rows.append((*cells, short_hash(mine, theirs)))
    return rows


def _half_row(
    study: Study, arm: str, seed: int, set_name: str, forms: Sequence[str]
) -> Records | None:
    """An arm's records in the one of these formats whose stride is half its row."""
    for form in forms:
        found = study.records(arm, seed, set_name, form)
        if found is not None and form.startswith(f"stride{found.header.row_length // 2}-"):
            return found
    return None


def _ranking(study: Study, set_name: str, forms: Sequence[str]) -> str:
    """Arms by bits per byte, each in the first of the formats that it has."""
    found = []
    for arm, seed in study.arms:
        records = [study.records(arm, seed, set_name, form) for form in forms]
        scored = [one for one in records if one is not None]
        if scored:
            found.append((records_bits_per_byte(scored[0]), f"{arm} s{seed}"))
    return " < ".join(name for _, name in sorted(found)) or MISSING
