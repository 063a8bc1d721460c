"""The report between its tables: what the paper's text says, from records and results.

Each function takes a study and returns one section; what was not run is said to be missing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import numpy as np

from evaluation.paper import beside, by_seed, paper_arm, paper_gain
from evaluation.profiles import cell_nats
from evaluation.records import filter_records
from evaluation.section import Section, all_pairs, pair_hashes, pair_name, paper_text
from evaluation.section_attention import attention
from evaluation.sections_controls import ablation, dropout, other_fields, temperature, widths
from evaluation.sections_formats import both_formats, reach_mistakes
from evaluation.study import Study
from evaluation.tables import MISSING, Table, signed, signed_interval

MATCHED_WITH = "b_table"
MATCHED = 0.05  # arms within 5% of FLOPs per token count as matched (Section 3.1)


def text_sections(study: Study, exclude: Collection[str] = ()) -> list[Section]:
    """All sections in the paper's order.

    Args:
        study: records and results.
        exclude: documents that overlap with training documents, for `overlap_exclusions`.
    """
    makers: tuple[Callable[[Study], Section], ...] = (
        step0_loss,
        matched_flops,
        visibility_split,
        ablation,
        attention,
        other_fields,
        dropout,
        reach_mistakes,
        both_formats,
        widths,
        temperature,
        robustness,
        mixtures,
        step_times,
    )
    sections = [make(study) for make in makers]
    return [*sections, overlap_exclusions(study, exclude)]


def step0_loss(study: Study) -> Section:
    """The 2K and 8K loaders give equal targets: equal loss before the first update (3.2)."""
    rows = []
    for arm, seed in study.trained_arms:
        results, recipe = study.results(arm, seed), study.recipe(arm, seed)
        if "step0_loss" in results:
            length = recipe.get("model", {}).get("max_position_embeddings", MISSING)
            loss = f"{results['step0_loss']:.4f}"
            rows.append((arm, str(seed), str(length), loss, str(results["target_sha256"])[:8]))
    text = (
        f"The loss before the first update must not depend on the row length; the paper's is "
        f"{paper_text('step0_loss')} for all arms. Equal hashes of the targets say that all arms "
        "were trained on the same ones."
    )
    columns = ("arm", "seed", "row length", "step-0 loss", "targets")
    tables = (Table("step0_loss", "Loss before the first update, nats", columns, tuple(rows)),)
    return Section("Step-0 loss of all arms (Section 3.2)", text, tables if rows else ())


def matched_flops(study: Study) -> Section:
    """Which arms cost what B + table costs, within 5% by formula, and which is better (4.2)."""
    title = "Matched FLOPs (Section 4.2)"
    rows = []
    for arm, seed in study.trained_arms:
        ours = study.results(arm, seed).get("flops_per_token")
        theirs = study.results(MATCHED_WITH, seed).get("flops_per_token")
        if arm == MATCHED_WITH or ours is None or theirs is None:
            continue
        ratio = ours / theirs
        if abs(ratio - 1) > MATCHED and arm not in paper_text("matched_flops"):
            continue  # LG1024, at 1.12 times, is in the paper's comparison too
        for set_name in study.sets():
            found = study.contrast(arm, MATCHED_WITH, seed, set_name)
            if found is None:
                continue
            gain = beside(found.gain, paper_gain(arm, MATCHED_WITH, seed, set_name))
            interval = signed_interval(found.comparison.gain_interval)
            row = (pair_name(found), set_name, f"{ratio:.3f}", gain, interval)
            rows.append((*row, pair_hashes(found)))
    columns = ("arm", "set", "FLOPs ratio", "gain: ours / paper / difference", "95% interval")
    table = Table("matched_flops", "Gain, bpb", (*columns, "records"), tuple(rows))
    text = (
        "Is the table the better buy? Every arm whose estimated matrix FLOPs per token, without "
        "recomputation, are within 5% of B + table's, and the paper's LG1024, against B + table."
    )
    if not rows:
        return Section(title, f"{text} Missing: B + table and another such arm with results.json.")
    return Section(title, text, (table,))


def visibility_split(study: Study) -> Section:
    """How much of each gain comes from copies that the row does not show (4.3)."""
    title = "Copies by visibility (Section 4.3)"
    published = paper_text("visibility")
    rows = []
    for found in all_pairs(study):
        split = found.gain_by("target_cell")
        if split is None:
            continue
        hidden = sum(v for k, v in split.items() if k.endswith("hidden"))
        visible = sum(v for k, v in split.items() if k.endswith("visible"))
        header = found.arm.header
        is_paper_s = (header.arm, header.seed, header.set_name) == ("b_table", 44, "dev_val")
        paper = published if is_paper_s else {}
        rows.append(
            (
                pair_name(found),
                header.set_name,
                beside(hidden, paper.get("hidden_copies")),
                beside(visible, paper.get("visible_copies")),
                f"{hidden / found.gain:.0%}" if found.gain else MISSING,
                pair_hashes(found),
            )
        )
    if not rows:
        return Section(title, "Missing: an arm and its baseline of one row length.")
    columns = ("contrast", "set", "hidden copies", "visible copies", "hidden / gain", "records")
    tables = [Table("visibility", "Gain in bpb (ours / paper / difference)", columns, tuple(rows))]
    name = study.main_set
    arms = [study.records(*key, name) for key in study.arms] if name is not None else []
    if scored := [one for one in arms if one is not None]:
        tables.append(cell_nats("cells", f"Mean nats by target cell on {name}", scored))
    near, far = published["hidden_near_nats"], published["lg512_far_visible_nats"]
    text = (
        "A copy is hidden when its source lies outside the row. Paper, dev-val, seed 44: with the "
        f"table hidden copies up to 512 back fall from {near[0]} to {near[1]} nats on B, visible "
        f"ones 4K to 8K back from {far[0]} to {far[1]} on LG512."
    )
    return Section(title, text, tuple(tables))


def robustness(study: Study) -> Section:
    """Whether a few documents drive the gain (4.10)."""
    title = "Concentration across documents (Section 4.10)"
    published = paper_text("robustness")
    rows = []
    for found in all_pairs(study):
        header, comparison = found.arm.header, found.comparison
        on = header.set_name == "confirmation"
        papers = [
            by_seed(published[key].get(paper_arm(header.arm)), header.seed) if on else None
            for key in ("gain_without_top_decile", "median_document_gain")
        ]
        rows.append(
            (
                pair_name(found),
                header.set_name,
                f"{comparison.documents_improved:.1%}",
                beside(comparison.gain_without_top_decile, papers[0]),
                beside(comparison.median_document_gain, papers[1]),
                pair_hashes(found),
            )
        )
    if not rows:
        return Section(title, "Missing: an arm and its baseline.")
    columns = (
        *("contrast", "set", "documents improved", "gain without the top 10%"),
        *("median document gain", "records"),
    )
    table = Table("concentration", "bpb (ours / paper / difference)", columns, tuple(rows))
    return Section(title, "", (table,))


def mixtures(study: Study) -> Section:
    """The output mixture of each base with the latest match, beside the learned table."""
    title = "A rival without parameters: the output mixture"
    rows = []
    for found in all_pairs(study):
        header = found.arm.header
        if not header.arm.endswith("_mixture"):
            continue
        base = paper_arm(header.baseline or "")
        learned = study.contrast(f"{base}_table", base, header.seed, header.set_name)
        rows.append(
            (
                pair_name(found),
                header.set_name,
                f"{signed(found.gain)} {signed_interval(found.comparison.gain_interval)}",
                MISSING if learned is None else signed(learned.gain),
                pair_hashes(found),
            )
        )
    if not rows:
        return Section(title, "Missing: python -m evaluation.mixture.")
    columns = ("contrast", "set", "gain of the mixture", "gain of the learned table", "records")
    text = (
        "(1 - w) p + w [candidate], w by match order and distance, fitted on the development set "
        "that RUN/mixture/weights.json names: on that set its gain is in-sample."
    )
    return Section(title, text, (Table("mixture", "bpb", columns, tuple(rows)),))


def step_times(study: Study) -> Section:
    """Losses and update times of the runs (learning curves are in the figure)."""
    title = "Learning curves and step times"
    rows = []
    for arm, seed in study.trained_arms:
        entries = study.metrics(arm, seed)
        seconds = [e["update_seconds"] for e in entries[11:] if "update_seconds" in e]
        if seconds:
            middle, low, high = np.quantile(seconds, (0.5, 0.1, 0.9))
            last = np.mean([entry["loss"] for entry in entries[-10:]])
            spread = f"{low:.3f} to {high:.3f}"
            rows.append((arm, str(seed), str(len(entries)), f"{last:.4f}", f"{middle:.3f}", spread))
    if not rows:
        return Section(title, "Missing: metrics.jsonl of the runs.")
    columns = ("arm", "seed", "updates", "loss, last 10", "median s an update", "10% to 90%")
    table = Table("step_times", "Without the first 11 updates", columns, tuple(rows))
    return Section(title, "", (table,))


def overlap_exclusions(study: Study, exclude: Collection[str]) -> Section:
    """Gains without the documents that share an opening with a training document (3.2, 4.10)."""
    title = "Overlap exclusions (Sections 3.2 and 4.10)"
    if not exclude:
        return Section(
            title, "No document was listed (--exclude FILE, or --chunk_set with overlaps)."
        )
    rows = []
    for found in all_pairs(study):
        listed = set(exclude) & set(found.arm.header.document_ids)
        if not listed or len(listed) == len(found.arm.header.document_ids):
            continue
        kept = study.pair(
            filter_records(found.arm, drop=listed), filter_records(found.baseline, drop=listed)
        )
        rows.append(
            (
                pair_name(found),
                found.arm.header.set_name,
                str(len(listed)),
                signed(found.gain),
                signed(kept.gain),
                f"{kept.gain - found.gain:+.5f}",
                pair_hashes(found),
            )
        )
    if not rows:
        return Section(title, "None of the listed documents is in the scored sets.")
    columns = ("contrast", "set", "left out", "gain", "without them", "change", "records")
    text = "The paper's headline gains change by at most .0001."
    return Section(title, text, (Table("overlaps", "bpb", columns, tuple(rows)),))
