"""Bits per byte by target class, with a paired document bootstrap, as an `evaluate` metric.

The engine is `statistics.py` beside this file. This file declares the columns, checks them as they
are added, and turns columns into document x class sums.
"""

from __future__ import annotations

from typing import Any

import datasets
import evaluate
import numpy as np
import pyarrow as pa

from .statistics import (
    CLASS_NAMES,
    bits_per_byte,
    class_indices,
    compare,
    contributions,
    document_index,
    sum_by_class,
)

_DESCRIPTION = """\
Bits per byte of a language model, split by what the document holds for each target (new, a seen
bigram, or a copy by distance and visibility) and by what a document table returned for it. With a
baseline's losses on the same targets: the gain, its 95% paired document-bootstrap interval, its
split by class and the share of documents that improve.
"""

_INPUTS = """
Args:
    nats: negative log-likelihood of each target.
    num_bytes: UTF-8 bytes of each target token; targets of 0 bytes (special tokens) do not count.
    target_order: 0..4, the longest context seen before in the document with this same target.
    target_distance: tokens back to the latest such place; 0 where target_order is 0.
    visible: whether that earlier target is an input of the row the target is scored in.
    table_order: 0..4, the match order the model received; 0 is no match.
    table_right: whether the candidate the model received is the target.
    document: an integer that names the document.
    Each is one value a target, or one list a chunk; `document` may stay one integer a chunk.
    baseline_nats: the baseline's nats, in the shape and order of what was added.
    chunk_length: tokens; the distance bands are fractions of it. Default 8192.
    num_resamples: bootstrap resamples. Default 2000.
    seed: of the bootstrap. Default 0.
Returns:
    bits_per_byte, nats_per_target, perplexity: over all counted targets.
    classes: for each of the 126 classes `share` of targets, mean `nats` (NaN where the class is
        empty) and `contribution` to bits per byte; contributions sum to bits_per_byte.
    gain: baseline minus model, in bits per byte (this and the rest with baseline_nats only).
    gain_interval: its 95% percentile interval over documents.
    gain_by_class: class name -> contribution to the gain.
    documents_improved: fraction of documents with a positive gain.
    median_document_gain: median of the documents' own gains.
    gain_without_top_decile: the gain without the 10% of documents with the largest summed gain.
"""

_CITATION = ""

_COLUMNS = {
    "nats": "float64",
    "num_bytes": "int32",
    "target_order": "int8",
    "target_distance": "int32",
    "visible": "bool",
    "table_order": "int8",
    "table_right": "bool",
    "document": "int64",
}


def _feature_sets() -> list[datasets.Features]:
    """One row a target; one row a chunk; one row a chunk with a document for each target."""
    values = {name: datasets.Value(dtype) for name, dtype in _COLUMNS.items()}
    lists = {name: datasets.List(value) for name, value in values.items()}
    return [
        datasets.Features(values),
        datasets.Features({**lists, "document": values["document"]}),
        datasets.Features(lists),
    ]


class ClassBPB(evaluate.Metric):
    """`evaluate.load("evaluation/class_bpb")`; the folder's README is the card."""

    def _info(self) -> evaluate.MetricInfo:
        info = evaluate.MetricInfo(
            description=_DESCRIPTION,
            citation=_CITATION,
            inputs_description=_INPUTS,
            features=_feature_sets(),
        )
        # Arrow columns, not Python lists, reach _compute ("numpy" would round nats to float32). The
        # constructor accepts a format for a single feature set only.
        info.format = "arrow"
        return info

    def add_batch(self, *, predictions: Any = None, references: Any = None, **columns: Any) -> None:
        """Check a batch of columns and add it.

        Raises:
            ValueError: naming the column that is missing, has another length or form than the rest,
                holds NaN, or is not of its type.
        """
        if predictions is not None or references is not None:
            raise ValueError(
                "class_bpb has no `predictions` or `references`; its columns are "
                f"{', '.join(_COLUMNS)}."
            )
        lists, document_lists = _check_batch(columns)
        expected = _feature_sets()[lists + document_lists]
        if self.selected_feature_format not in (None, expected):
            raise ValueError(
                "Every batch must have the form of the first one (one row a target, or one row a "
                "chunk). Start a new metric for the other form."
            )
        super().add_batch(**columns)

    def add(self, *, prediction: Any = None, reference: Any = None, **columns: Any) -> None:
        """Check one row, a target or a chunk, and add it; errors as `add_batch`."""
        if prediction is not None or reference is not None:
            raise ValueError(f"class_bpb takes the columns {', '.join(_COLUMNS)}.")
        self.add_batch(**{name: [value] for name, value in columns.items()})

    def _compute(
        self,
        *,
        baseline_nats: Any = None,
        chunk_length: int = 8192,
        num_resamples: int = 2000,
        seed: int = 0,
        **columns: Any,
    ) -> dict[str, Any]:
        flat = {name: _arrow_values(column) for name, column in columns.items()}
        lengths = _arrow_lengths(columns["nats"])
        if lengths is not None and _arrow_lengths(columns["document"]) is None:
            flat["document"] = np.repeat(flat["document"], lengths)
        counted = flat["num_bytes"] > 0
        classes = class_indices(
            flat["target_order"],
            flat["target_distance"],
            flat["visible"],
            flat["table_order"],
            flat["table_right"],
            chunk_length,
        )[counted]
        if not counted.any():
            raise ValueError("No target has bytes, so bits per byte are undefined.")
        ids, document = document_index(flat["document"][counted])
        num_bytes = flat["num_bytes"][counted]
        sums = sum_by_class(document, classes, flat["nats"][counted], num_bytes, len(ids))
        result = _one_arm(sums)
        if baseline_nats is not None:
            baseline = _check_baseline(baseline_nats, lengths, len(flat["nats"]))[counted]
            baseline_sums = sum_by_class(document, classes, baseline, num_bytes, len(ids))
            result |= _paired(sums, baseline_sums, num_resamples, seed)
        return result


def _one_arm(sums: Any) -> dict[str, Any]:
    num_targets = sums.num_targets.sum(axis=0)
    class_nats = sums.nats.sum(axis=0)
    total_targets = int(num_targets.sum())
    nats_per_target = float(class_nats.sum() / total_targets)
    mean_nats = np.full(len(CLASS_NAMES), np.nan)
    np.divide(class_nats, num_targets, out=mean_nats, where=num_targets > 0)
    share = num_targets / total_targets
    parts = contributions(sums.nats, sums.num_bytes)
    return {
        "bits_per_byte": bits_per_byte(sums.nats, sums.num_bytes),
        "nats_per_target": nats_per_target,
        "perplexity": float(np.exp(nats_per_target)),
        "classes": {
            name: {"share": float(s), "nats": float(n), "contribution": float(c)}
            for name, s, n, c in zip(CLASS_NAMES, share, mean_nats, parts, strict=True)
        },
    }


def _paired(sums: Any, baseline: Any, num_resamples: int, seed: int) -> dict[str, Any]:
    found = compare(sums.nats, baseline.nats, sums.num_bytes, num_resamples, seed)
    gains = zip(CLASS_NAMES, found.gain_by_class, strict=True)
    return {
        "gain": found.gain,
        "gain_interval": list(found.gain_interval),
        "gain_by_class": {name: float(gain) for name, gain in gains},
        "documents_improved": found.documents_improved,
        "median_document_gain": found.median_document_gain,
        "gain_without_top_decile": found.gain_without_top_decile,
    }


def _check_batch(columns: dict[str, Any]) -> tuple[bool, bool]:
    """Check every column; return whether rows are lists, and whether documents are lists too."""
    missing = [name for name in _COLUMNS if columns.get(name) is None]
    unknown = [name for name in columns if name not in _COLUMNS]
    if missing or unknown:
        raise ValueError(
            f"A batch must have exactly the columns {', '.join(_COLUMNS)}; "
            f"missing {missing}, unknown {unknown}."
        )
    lengths = {name: len(columns[name]) for name in _COLUMNS}
    if len(set(lengths.values())) != 1 or not lengths["nats"]:
        raise ValueError(f"Columns must have one common length of at least 1; got {lengths}.")
    listed = {name: _is_listed(name, columns[name]) for name in _COLUMNS}
    document_lists = listed.pop("document")
    if len(set(listed.values())) != 1 or (document_lists and not listed["nats"]):
        raise ValueError(
            "All columns must have one value a target, or all one list a chunk (`document` may be "
            f"one integer a chunk); the columns that hold lists are "
            f"{[name for name in listed if listed[name]] + ['document'] * document_lists}."
        )
    rows = _row_lengths(columns["nats"])
    for name, dtype in _COLUMNS.items():
        is_list = document_lists if name == "document" else listed[name]
        if is_list and not np.array_equal(rows, _row_lengths(columns[name])):
            raise ValueError(
                f"The lists of `{name}` must be as long as those of `nats`, row by row."
            )
        _check_type(name, dtype, _flatten(columns[name]))
    return listed["nats"], document_lists


def _is_listed(name: str, column: Any) -> bool:
    if hasattr(column, "ndim"):
        forms = {column.ndim - 1}
    else:
        # One row of each type: np.ndim on a million floats would take longer than all the sums.
        forms = {np.ndim(row) for row in {type(row): row for row in column}.values()}
    if len(forms) != 1 or not forms <= {0, 1}:
        raise ValueError(
            f"`{name}` must hold one number a row, or one flat list a row; found a mixture or "
            "nested lists."
        )
    return forms == {1}


def _check_type(name: str, dtype: str, values: Any) -> None:
    if dtype == "float64":
        if values.dtype.kind not in "fiu" or not np.isfinite(values).all():
            raise ValueError(f"`{name}` must hold finite numbers; found NaN, infinity or text.")
    elif dtype == "bool":
        if values.dtype.kind not in "biu" or not np.isin(values, (0, 1)).all():
            raise ValueError(f"`{name}` must hold booleans; found {values.dtype}.")
    elif values.dtype.kind not in "iu":
        raise ValueError(
            f"`{name}` must hold integers; found {values.dtype}. Floats would be cut silently."
        )
    elif values.min() < (0 if name != "document" else np.iinfo(np.int64).min):
        raise ValueError(f"`{name}` must not be negative; found {values.min()}.")
    elif name.endswith("_order") and values.max() > 4:
        raise ValueError(f"`{name}` must lie in 0..4; found {values.max()}.")


def _check_baseline(baseline: Any, lengths: Any, num_targets: int) -> Any:
    """Flatten the baseline's nats, [targets], after checking that they follow what was added."""
    same_rows = lengths is None or np.array_equal(_row_lengths(baseline), lengths)
    if _is_listed("baseline_nats", baseline) != (lengths is not None) or not same_rows:
        raise ValueError("baseline_nats must have the shape and order of the nats that were added.")
    values = _flatten(baseline)
    _check_type("baseline_nats", "float64", values)
    if len(values) != num_targets:
        raise ValueError(
            f"baseline_nats must hold one value a target; got {len(values)} for {num_targets}."
        )
    return values


def _row_lengths(column: Any) -> Any:
    """[rows] lengths of the lists of a column, or None for one value a row."""
    if len(column) == 0 or np.ndim(column[0]) == 0:
        return None
    return np.array([len(row) for row in column])


def _flatten(column: Any) -> Any:
    if len(column) and np.ndim(column[0]) > 0:
        return np.concatenate([np.asarray(row) for row in column])
    return np.asarray(column)


def _arrow_lengths(column: Any) -> Any:
    """[rows] lengths of the lists of an Arrow column, or None for one value a row."""
    if not pa.types.is_list(column.type):
        return None
    return column.combine_chunks().value_lengths().to_numpy(zero_copy_only=False)


def _arrow_values(column: Any) -> Any:
    array = column.combine_chunks()
    if pa.types.is_list(column.type):
        array = array.flatten()
    return array.to_numpy(zero_copy_only=False)
