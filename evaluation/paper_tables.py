"""Tables 1 to 7 in the paper's layout: `ours / paper / difference` in every cell.

An arm that was not scored stands with the paper's value alone; arms that the paper does not have
follow its own. Every row, or where arms are columns the last row, names the records' hashes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from evaluation.class_bpb.statistics import BY_MATCH, grouping_labels
from evaluation.contrasts import PARTITIONS, Contrast, records_bits_per_byte
from evaluation.paper import SET_NAMES, beside, by_seed, paper_results, paper_rows
from evaluation.records import Records
from evaluation.study import Study
from evaluation.tables import MISSING, Table, signed_interval

_CELL = "ours / paper / difference"


def paper_tables(study: Study) -> list[Table]:
    """All seven."""
    makers = (table_1, table_2, table_3, table_4, table_5, table_6, table_7)
    return [make(study) for make in makers]


def short_hash(*records: Records | None) -> str:
    """First digits of the records' hashes, a dash where there are none."""
    found = [one.sha256[:8] for one in records if one is not None]
    return " ".join(found) or MISSING


def _title(number: int) -> str:
    return f"Table {number}. {paper_results()[f'table_{number}']['title']} ({_CELL})"


def _sets(study: Study, paper: Sequence[str]) -> list[str]:
    """The paper's sets, then others that were scored."""
    return [*paper, *(name for name in study.sets() if name not in paper)]


def table_1(study: Study) -> Table:
    """Bits per byte of every arm and seed on every set."""
    sets = _sets(study, tuple(SET_NAMES))
    published = {row["arm"]: row for row in paper_rows(1)}
    keys = [(row["arm"], seed) for row in published.values() for seed in row["seeds"]]
    keys += [key for key in study.arms if key not in keys]
    rows = []
    for arm, seed in keys:
        row = published.get(arm, {})
        results = study.results(arm, seed)
        cells = []
        for name in sets:
            paper = by_seed(row.get("bits_per_byte", {}).get(name), seed)
            cells.append(beside(study.bits_per_byte(arm, seed, name), paper, 5, signed=False))
        flops, paper_flops = results.get("flops_per_token"), row.get("flops_per_token")
        parameters = results.get("parameters")
        millions = None if parameters is None else parameters / 1e6
        rows.append(
            (
                study.own_name(arm, row.get("name", arm)),
                str(seed),
                *cells,
                _scientific(flops, paper_flops),
                beside(millions, row.get("parameters_millions"), 1, signed=False),
                short_hash(*(study.records(arm, seed, name) for name in sets)),
            )
        )
    columns = (
        *("arm", "seed", *(SET_NAMES.get(name, name) for name in sets)),
        *("FLOPs/token", "params (M)", "records"),
    )
    return Table("table_1", _title(1), columns, tuple(rows))


def _scientific(ours: float | None, paper: float | None) -> str:
    cells = [MISSING if value is None else f"{value:.2e}" for value in (ours, paper)]
    ratio = MISSING if ours is None or paper is None else f"x{ours / paper:.3f}"
    return " / ".join([*cells, ratio])


def table_2(study: Study) -> Table:
    """Gains over the same-seed base arm, with intervals on the confirmation set."""
    paper_sets = ("dev_val", "dev_heldout", "confirmation")
    sets = _sets(study, paper_sets)
    last = "confirmation" if "confirmation" in study.sets() else study.main_set
    published = {(row["arm"], row["baseline"]): row for row in paper_rows(2)}
    keys = [(*pair, seed) for pair, row in published.items() for seed in row["seeds"]]
    keys += [pair for pair in study.pairs if pair not in keys]
    rows = []
    for arm, baseline, seed in keys:
        row = published.get((arm, baseline), {})
        found = {name: study.contrast(arm, baseline, seed, name) for name in sets}
        cells = [
            beside(_gain(found[name]), by_seed(row.get("gain", {}).get(name), seed))
            for name in sets
        ]
        chosen = None if last is None else found[last]
        improved = None if chosen is None else 100 * chosen.comparison.documents_improved
        # The paper gives intervals and shares for its confirmation set alone.
        theirs = row if last == "confirmation" else {}
        paper_improved = by_seed(theirs.get("documents_improved"), seed)
        rows.append(
            (
                study.own_name(arm, f"{row.get('name', baseline)} -> {arm}"),
                str(seed),
                *cells,
                _intervals(chosen, by_seed(theirs.get("interval"), seed)),
                beside(
                    improved, None if paper_improved is None else 100 * paper_improved, 1, False
                ),
                short_hash(*(one.arm for one in found.values() if one is not None)),
            )
        )
    columns = (
        *("base -> arm", "seed", *(SET_NAMES.get(name, name) for name in sets)),
        f"95% interval, {SET_NAMES.get(last or '', last or MISSING)} (ours / paper)",
        *("documents improved (%)", "records"),
    )
    return Table("table_2", _title(2), columns, tuple(rows))


def _gain(found: Contrast | None) -> float | None:
    return None if found is None else found.gain


def _intervals(found: Contrast | None, paper: Any) -> str:
    ours = None if found is None else found.comparison.gain_interval
    cells = [MISSING if ends is None else signed_interval(ends) for ends in (ours, paper)]
    return " / ".join(cells)


def table_3(study: Study) -> Table:
    """Measured cost, from results files."""
    published = {row["arm"]: row for row in paper_rows(3)}
    keys = [(arm, 44) for arm in published]
    keys += [key for key in study.trained_arms if key not in keys and study.results(*key)]
    rows = []
    for arm, seed in keys:
        row, results = published.get(arm, {}), study.results(arm, seed)
        paper = row if seed == 44 else {}
        peak, cpu = results.get("peak_memory_bytes"), results.get("cpu_seconds")
        digest = str(results.get("final_sha256", MISSING))[:8]
        rows.append(
            (
                study.own_name(arm, row.get("name", arm)),
                str(seed),
                _scientific(results.get("flops_per_token"), paper.get("flops_per_token")),
                _scientific(
                    results.get("flops_per_token_with_recomputation"),
                    paper.get("flops_per_token_with_recomputation"),
                ),
                *(
                    beside(results.get(name), paper.get(name), 0, signed=False)
                    for name in ("training_seconds", "loop_seconds")
                ),
                beside(
                    None if peak is None else peak / 2**30,
                    paper.get("peak_memory_gib"),
                    2,
                    signed=False,
                ),
                MISSING if cpu is None else f"{cpu:,.0f}",
                digest,
            )
        )
    columns = (
        *("arm", "seed", "FLOPs/token", "with recomputation", "train s", "loop s", "peak GiB"),
        *("CPU s (ours)", "weights"),
    )
    return Table("table_3", _title(3), columns, tuple(rows))


def _split_pairs(study: Study, published: Sequence[str]) -> list[tuple[str, str, int]]:
    """Arm, baseline and seed of each column: the paper's table arms, then ours."""
    named = {row["arm"]: row["baseline"] for row in paper_rows(2)}
    seeds = sorted({44, *(seed for _, seed in study.arms)})
    keys = [(arm, named[arm], seed) for arm in published for seed in seeds]
    set_name = study.main_set
    for arm, baseline, seed in study.pairs:
        records = set_name and study.records(arm, seed, set_name)
        if (arm, baseline, seed) not in keys and records and records.header.has_table:
            keys.append((arm, baseline, seed))
    return keys


def _split_table(study: Study, number: int, partition: str) -> Table:
    """Tables 4 and 5: one column a contrast, one row a group."""
    published = paper_rows(number)
    grouping, _ = PARTITIONS[partition]
    keys = _split_pairs(study, list(published[0]["gain"]))
    set_name = study.main_set
    found = [
        None if set_name is None else study.contrast(arm, baseline, seed, set_name)
        for arm, baseline, seed in keys
    ]
    splits = [None if one is None else one.gain_by(partition) for one in found]
    chunk_length = next((one.arm.header.chunk_length for one in found if one is not None), 8192)
    labels = dict(zip(grouping.names, grouping_labels(grouping, chunk_length), strict=True))
    paper_groups = [row["group"] for row in published]
    rest = [group for group in grouping.names if group not in paper_groups]
    rows = []
    for group in [*paper_groups, *rest]:
        row = published[paper_groups.index(group)] if group in paper_groups else {}
        shares = [one for one in (_share(c, partition, group) for c in found) if one is not None]
        cells = [
            beside(
                None if split is None else split[group],
                by_seed(row.get("gain", {}).get(arm), seed),
            )
            for split, (arm, _, seed) in zip(splits, keys, strict=True)
        ]
        share = beside(shares[0] if shares else None, _percent(row.get("share")), 1, signed=False)
        rows.append((labels[group], share, *cells))
    hashes = [MISSING if one is None else short_hash(one.arm, one.baseline) for one in found]
    rows.append(("records", "", *hashes))
    columns = tuple(f"{arm} s{seed}" for arm, _, seed in keys)
    title = _title(number)
    if set_name not in (None, "dev_val"):
        title += f"; ours on {set_name}"
    return Table(f"table_{number}", title, ("class", "share (%)", *columns), tuple(rows))


def _percent(share: float | None) -> float | None:
    return None if share is None else 100 * share


def _share(found: Contrast | None, partition: str, group: str) -> float | None:
    """Percent of the targets in one group."""
    if found is None:
        return None
    grouping, _ = PARTITIONS[partition]
    counts = grouping.collapse(found.arm.sums.num_targets.sum(axis=0))
    return float(100 * counts[grouping.names.index(group)] / counts.sum())


def table_4(study: Study) -> Table:
    """Gain by target class."""
    return _split_table(study, 4, "band")


def table_5(study: Study) -> Table:
    """Gain by the target's order and the table's state."""
    return _split_table(study, 5, "table_state")


def table_6(study: Study) -> Table:
    """Packed rows: gain by the table's match."""
    sets = ("val", "heldout")
    found = {
        name: study.contrast("packed_table", "packed", 44, name, "packed")
        or study.contrast("packed_table", "packed", 44, f"climbmix_{name}", "packed")
        for name in sets
    }
    first = found["val"]
    rows = []
    for row in paper_rows(6):
        group = row["group"]
        nats = [None if one is None else one.mean_nats(BY_MATCH, [group]) for one in _sides(first)]
        splits = {name: one and one.gain_by("match") for name, one in found.items()}
        rows.append(
            (
                grouping_labels(BY_MATCH, 8192)[BY_MATCH.names.index(group)],
                beside(_share(first, "match", group), 100 * row["share"], 1, signed=False),
                beside(nats[0], row["baseline_nats"], 3, signed=False),
                beside(nats[1], row["nats"], 3, signed=False),
                *(
                    beside(split[group] if split else None, row["gain"][name])
                    for name, split in splits.items()
                ),
            )
        )
    published = paper_results()["table_6"]["bits_per_byte"]
    for name, one in found.items():
        cells = [
            beside(
                None if side is None else records_bits_per_byte(side),
                published[arm][name],
                5,
                signed=False,
            )
            for arm, side in zip(("packed", "packed_table"), _sides(one), strict=True)
        ]
        paper = published["packed"][name] - published["packed_table"][name]
        gain = beside(_gain(one), paper)
        in_its_column = (gain, "") if name == "val" else ("", gain)
        rows.append((f"all, bits per byte on {name}", "", *cells, *in_its_column))
    hashes = [
        MISSING if one is None else short_hash(one.arm, one.baseline) for one in found.values()
    ]
    rows.append(("records", "", "", "", *hashes))
    columns = ("table state", "share (%)", "base nats", "with table", "gain, val", "gain, held-out")
    return Table("table_6", _title(6), columns, tuple(rows))


def _sides(found: Contrast | None) -> tuple[Records | None, Records | None]:
    return (None, None) if found is None else (found.baseline, found.arm)


def table_7(study: Study) -> Table:
    """LG512 at three widths."""
    sets = ("dev_val", "dev_heldout", "confirmation")
    rows = []
    for row in paper_rows(7):
        arm, baseline = row["arm"], row["baseline"]
        cells = []
        for name in sets:
            found = study.contrast(arm, baseline, 44, name)
            cells += [
                beside(
                    study.bits_per_byte(baseline, 44, name),
                    row["baseline_bits_per_byte"][name],
                    5,
                    signed=False,
                ),
                beside(
                    study.bits_per_byte(arm, 44, name), row["bits_per_byte"][name], 5, signed=False
                ),
                beside(_gain(found), row["gain"][name]),
            ]
        hashes = short_hash(
            *(study.records(one, 44, name) for one in (baseline, arm) for name in sets)
        )
        flops = study.results(baseline, 44).get("flops_per_token")
        width = study.recipe(baseline, 44).get("model", {}).get("hidden_size", row["width"])
        label = f"{row['width']}" if width == row["width"] else f"{row['width']}, ours {width}"
        rows.append((label, _scientific(flops, row["flops_per_token"]), *cells, hashes))
    columns = [
        f"{what}, {SET_NAMES[name]}" for name in sets for what in ("LG512", "+ table", "gain")
    ]
    return Table("table_7", _title(7), ("width", "FLOPs/token", *columns, "records"), tuple(rows))
