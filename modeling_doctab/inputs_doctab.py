"""What a forward pass is given: packed documents, padding, table fields; refused if wrong.

Values are checked on a CPU only: on a GPU every look would wait for the device.
"""

from typing import Any

import torch
from torch.nn import functional as F
from transformers.cache_utils import Cache

from .configuration_doctab import DocTabConfig
from .document_table import DocumentTable

NO_RESIZE = (
    "A DocTab model's vocabulary cannot be resized: the document table and the value embeddings "
    "have rows for every token. Train with the vocabulary you need, or build a new model with "
    "another vocab_size and copy the weights you want to keep."
)


def packed_documents(
    position_ids: torch.Tensor | None,
    attention_mask: torch.Tensor | dict[str, Any] | None,
    cache: Cache | None,
) -> torch.Tensor | None:
    """Number of each position's document [B, T] where positions start again inside a row.

    None for rows of one document, for padded rows (whose positions restart after the padding) and
    for rows that continue a cache.
    """
    if position_ids is None or cache is not None or torch.compiler.is_compiling():
        return None
    restarts = F.pad(position_ids[:, 1:] != position_ids[:, :-1] + 1, (1, 0))
    if not bool(restarts.any()):
        return None
    if isinstance(attention_mask, torch.Tensor) and not bool(attention_mask.all()):
        return None
    return restarts.long().cumsum(1)


def mark_padding(input_ids: torch.Tensor, token_mask: torch.Tensor | None) -> torch.Tensor:
    """The ids with -1 at padding, which matches nothing."""
    if token_mask is None or token_mask.dim() != 2:
        return input_ids
    mask = token_mask[:, -input_ids.shape[1] :].to(input_ids.device)
    return torch.where(mask.bool(), input_ids, -1)


def checked_fields(
    passed: tuple[torch.Tensor | None, ...], input_ids: torch.Tensor, config: DocTabConfig
) -> DocumentTable:
    """The table fields that a caller passed: all of them, of the right shape, type and range."""
    names = ("table_order", "table_candidate", "table_distance")
    fields = {n: field for n, field in zip(names, passed, strict=True) if field is not None}
    if len(fields) < len(names):
        raise ValueError(
            f"Pass all of {', '.join(names)}, or none to have them looked up in the row; "
            f"only {', '.join(fields)} came."
        )
    for name, field in fields.items():
        if field.shape != input_ids.shape or field.is_floating_point():
            raise ValueError(
                f"{name} must be integers of the shape of input_ids, {list(input_ids.shape)}; "
                f"got {field.dtype} {list(field.shape)}."
            )
    table = DocumentTable(*(field.long() for field in fields.values()))
    if input_ids.device.type == "cpu" and not torch.compiler.is_compiling():
        bounds = (config.table_orders, config.vocab_size - 1, None)
        for name, field, largest in zip(names, table, bounds, strict=True):
            smallest = -1 if name == "table_candidate" else 0
            if bool((field < smallest).any()) or (
                largest is not None and bool((field > largest).any())
            ):
                raise ValueError(
                    f"{name} must lie in {smallest} .. {largest}; got {int(field.min())} .. "
                    f"{int(field.max())}. Make the fields with the model's vocabulary and orders."
                )
    return table


def check_ids(input_ids: torch.Tensor, vocab_size: int) -> None:
    """Refuse ids beyond the vocabulary, where looking costs no wait for a device."""
    if input_ids.device.type != "cpu" or torch.compiler.is_compiling() or not input_ids.numel():
        return
    smallest, largest = int(input_ids.min()), int(input_ids.max())
    if smallest < 0 or largest >= vocab_size:
        raise ValueError(
            f"input_ids must lie in 0 .. {vocab_size - 1}, the model's vocabulary; got {smallest} "
            f".. {largest}. Use the tokenizer that was saved with the model."
        )
