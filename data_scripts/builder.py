"""A chunk set as a `datasets` dataset: built in processes, or streamed, bit for bit the same.

    from data_scripts.builder import ChunkSetBuilder

    builder = ChunkSetBuilder("demo/chunk_set")                      # training chunks
    builder.download_and_prepare(num_proc=4)
    train = builder.as_dataset(split="train")
    for chunk in ChunkSetBuilder("demo/chunk_set").as_streaming_dataset(split="train"): ...
    ChunkSetBuilder("demo/chunk_set", "documents")                   # evaluation documents
    ChunkSetBuilder("demo/chunk_set", "rows", row_length=256)        # what the model is given

The training loop reads the memory map itself, several times as fast; this is for everything else
that speaks `datasets`, transformers' Trainer among it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
from datasets import Features, List, Value

from data_scripts.chunk_set import ChunkSet
from data_scripts.rows import TableOptions, chunk_rows

KINDS = ("chunks", "documents", "rows")
_ROWS_PER_TABLE = 256
_FIELD_TYPES = {
    "input_ids": "int32",
    "shift_labels": "int32",
    "table_order": "int8",
    "table_candidate": "int32",
    "table_distance": "int32",
}


@dataclass
class ChunkSetConfig(datasets.BuilderConfig):
    """What a dataset is made of; the cache folder's name depends on all of it.

    Attributes:
        chunk_set: the folder.
        fingerprint: of the chunk set, so that a rebuilt set at the same path is built again here.
        row_length: of the rows; None for the other kinds.
        confirmation: whether splits marked as confirmation are among the documents.
    """

    chunk_set: str = ""
    fingerprint: str = ""
    row_length: int | None = None
    confirmation: bool = False


class ChunkSetBuilder(datasets.ArrowBasedBuilder):
    """Builds "chunks" (targets in training order), "documents" (evaluation) or "rows".

    Args:
        chunk_set: the folder that `python -m data_scripts.build` wrote.
        kind: "chunks": `targets`, `document`, `start`. "documents": `id`, `tokens`. "rows": the
            training chunks as `input_ids`, `shift_labels` and the table's fields, a row a sample.
        row_length: inputs in a row, for "rows" alone; divides the chunk length.
        confirmation: include splits marked as confirmation (Section 3.6).
        **options: of `datasets.ArrowBasedBuilder`, such as `cache_dir`.

    Raises:
        ValueError: if the folder is no chunk set, or an option does not fit the kind.
    """

    BUILDER_CONFIG_CLASS = ChunkSetConfig

    def __init__(
        self,
        chunk_set: str | Path,
        kind: str = "chunks",
        *,
        row_length: int | None = None,
        confirmation: bool = False,
        **options: Any,
    ) -> None:
        self._set = ChunkSet.open(chunk_set)
        if kind not in KINDS:
            raise ValueError(f"kind must be one of {', '.join(KINDS)}; found {kind!r}.")
        if (kind == "rows") != (row_length is not None):
            raise ValueError(
                f"row_length is for kind 'rows', which needs it; found {row_length} for {kind!r}."
            )
        if row_length is not None and (row_length < 1 or self._set.chunk_length % row_length):
            raise ValueError(
                f"row_length must divide chunk_length; found {row_length} and "
                f"{self._set.chunk_length}."
            )
        super().__init__(
            config_name=kind,
            chunk_set=str(Path(chunk_set).resolve()),
            fingerprint=self._set.fingerprint,
            row_length=row_length,
            confirmation=confirmation,
            **options,
        )

    def _info(self) -> datasets.DatasetInfo:
        return datasets.DatasetInfo(features=self._features())

    def _features(self) -> Features:
        if self.config.name == "rows":
            length = self.config.row_length
            return Features(
                {name: List(Value(kind), length=length) for name, kind in _FIELD_TYPES.items()}
            )
        return set_features(self._set, self.config.name)

    def _split_generators(
        self, dl_manager: datasets.DownloadManager
    ) -> list[datasets.SplitGenerator]:
        return [
            datasets.SplitGenerator(
                name=split,
                gen_kwargs={"split": split, "starts": list(range(0, num, _ROWS_PER_TABLE))},
            )
            for split, num in split_sizes(
                self._set, self.config.name, self.config.confirmation
            ).items()
        ]

    def _generate_tables(self, split: str, starts: list[int]) -> Iterator[tuple[Any, pa.Table]]:
        for start in starts:
            stop = start + _ROWS_PER_TABLE
            if self.config.name == "rows":
                table = self._rows_table(split, start, stop)
            else:
                table = split_table(self._set, split, self.config.name, start, stop)
            yield start, table

    def _rows_table(self, split: str, start: int, stop: int) -> pa.Table:
        """Chunks `start` to `stop` as rows with the lookup's fields."""
        rows = chunk_rows(
            self._set.train_chunks(split)[start:stop],
            self.config.row_length,
            self._set.bos_token_id,
            TableOptions(),
        )
        columns = [
            _fixed_lists(rows[name].astype(kind), self.config.row_length)
            for name, kind in _FIELD_TYPES.items()
        ]
        return pa.Table.from_arrays(columns, schema=self._features().arrow_schema)


def set_features(chunk_set: ChunkSet, kind: str) -> Features:
    """The columns of "chunks" or "documents", in the set's own integer type."""
    token = Value(chunk_set.dtype.name)
    if kind == "documents":
        return Features({"id": Value("string"), "tokens": List(token)})
    return Features(
        {
            "targets": List(token, length=chunk_set.chunk_length),
            "document": Value("int64"),
            "start": Value("int64"),
        }
    )


def split_sizes(chunk_set: ChunkSet, kind: str, confirmation: bool = False) -> dict[str, int]:
    """Samples of every split that has this kind: chunks of training splits, or documents.

    Raises:
        ValueError: if a split's name is none that `datasets` takes.
    """
    splits = chunk_set.manifest["splits"]
    if kind == "documents":
        names = [
            name
            for name in chunk_set.evaluation_splits()
            if confirmation or not chunk_set.is_confirmation(name)
        ]
        sizes = {name: splits[name]["num_documents"] for name in names}
    else:
        sizes = {name: splits[name]["num_chunks"] for name in chunk_set.training_splits()}
    for name in sizes:
        if "-" in name:
            raise ValueError(
                f"split names must be letters, digits and _ for `datasets`; found {name!r}. "
                "Build the set with another name."
            )
    return sizes


def split_table(chunk_set: ChunkSet, split: str, kind: str, start: int, stop: int) -> pa.Table:
    """Samples `start` to `stop` of a split as an Arrow table."""
    schema = set_features(chunk_set, kind).arrow_schema
    if kind == "chunks":
        index = np.array(chunk_set.chunk_index(split)[start:stop])
        targets = np.array(chunk_set.train_chunks(split)[start:stop])
        columns = [
            _fixed_lists(targets, chunk_set.chunk_length),
            pa.array(index[:, 0]),
            pa.array(index[:, 1]),
        ]
        return pa.Table.from_arrays(columns, schema=schema)
    # `split_sizes` names a confirmation split only where it was asked for.
    documents = chunk_set.documents(split, opened_by="build for datasets")
    offsets = documents.offsets[start : stop + 1]
    tokens = np.array(documents.tokens[offsets[0] : offsets[-1]])
    lists = pa.ListArray.from_arrays(
        pa.array((offsets - offsets[0]).astype(np.int32)), pa.array(tokens)
    )
    ids = pa.array(documents.ids[start:stop], pa.string())
    return pa.Table.from_arrays([ids, lists], schema=schema)


def _fixed_lists(array: np.ndarray, length: int) -> pa.FixedSizeListArray:
    return pa.FixedSizeListArray.from_arrays(pa.array(array.reshape(-1)), length)
