"""The report's section on attention weights, from the diagnostic's files (Sections 4.4 and 4.8)."""

from __future__ import annotations

from evaluation.attention import Diagnosis, diagnosis_table
from evaluation.class_bpb.statistics import BAND_NAMES, BY_BAND, grouping_labels
from evaluation.paper import beside
from evaluation.section import Section, paper_text
from evaluation.study import Study
from evaluation.tables import MISSING, Table

_FAR_BAND = BAND_NAMES[4]  # the second half of a chunk: copies 4-8K back in the paper
# What the paper reports, seed 44 on dev-val: its name there -> as our tables name it.
_PAPER_ARMS = {
    "a": "a s44",
    "a_table": "a_table s44",
    "ablated": "a_table (ablated) s44",
    "a_log_length": "a_log_length s44",
}


def attention(study: Study) -> Section:
    """The largest weight on the induction key by distance band: base, table, ablated, scaled."""
    title = "Attention to the copy's source (Sections 4.4 and 4.8)"
    text = (
        "The largest weight that any head puts on the induction key of a copy whose source the row "
        "shows, and the loss on the same copies: first chunk of the first documents. A measurement "
        "of attention weights, not a circuit analysis."
    )
    found = {key: study.attention(*key) for key in study.trained_arms}
    missing = [f"{arm} s{seed}" for (arm, seed), diagnoses in found.items() if not diagnoses]
    if len(missing) < len(found):  # then some arms were chosen, and the paper's are expected
        missing = [label for label in missing if label in _PAPER_ARMS.values()]
    if missing:
        text += f" Missing: {', '.join(missing)} (python -m evaluation.attention_diagnostic)."
    names = sorted({name for diagnoses in found.values() for name in diagnoses})
    tables: list[Table] = []
    for name in names or ["dev_val"]:
        on_set = [diagnoses[name] for diagnoses in found.values() if name in diagnoses]
        tables.append(_far_table(name, on_set))
        if on_set:
            tables.append(diagnosis_table(on_set, f"attention.{name}.bands"))
    return Section(title, text, tuple(tables))


def _far_table(set_name: str, found: list[Diagnosis]) -> Table:
    """The far band beside the paper's values; its arms come first."""
    published = paper_text("attention")
    paper = {label: name for name, label in _PAPER_ARMS.items()} if set_name == "dev_val" else {}
    ours = {label: (one, means) for one in found for label, means in one.variants.items()}
    rows = []
    for label in dict.fromkeys([*paper, *ours]):
        weight = nats = None
        count = documents = digest = MISSING
        if label in ours:
            one, means = ours[label]
            count, documents = f"{means.num_targets[_FAR_BAND]:,}", str(one.num_documents)
            digest = one.checkpoint_sha256[:8]
            if means.num_targets[_FAR_BAND]:
                weight, nats = means.weight[_FAR_BAND], means.nats[_FAR_BAND]
        theirs = [published[value].get(paper.get(label)) for value in ("weight", "nats")]
        cells = [
            beside(*pair, 3, signed=False) for pair in zip((weight, nats), theirs, strict=True)
        ]
        rows.append((label, *cells, count, documents, digest))
    band = "copies from the second half of a chunk"
    if found:
        labels = grouping_labels(BY_BAND, found[0].chunk_length)
        band = labels[BY_BAND.names.index(f"copy_{_FAR_BAND}")]
    columns = (
        *("arm", "largest weight: ours / paper / difference", "nats: ours / paper / difference"),
        *("copies", "documents", "weights"),
    )
    title = f"Weight on the induction key on {set_name}, {band} (paper: 4-8K back)"
    return Table(f"attention.{set_name}", title, columns, tuple(rows))
