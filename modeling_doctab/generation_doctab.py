"""Generation: padding kept in sight, and drafts from the table verified in one forward pass.

The lookup that feeds the model also predicts whole continuations: where the last n tokens occurred
before, the tokens after that occurrence are a draft. `generate(..., table_draft_tokens=8)` turns it
on. Greedy output is that of plain greedy decoding; only the number of forward passes falls.
"""

from typing import Any

import torch
from transformers.generation import GenerationMixin
from transformers.generation.candidate_generator import CandidateGenerator

from .document_table import lookup_last


class TableCandidateGenerator(CandidateGenerator):
    """Drafts for transformers' assisted decoding, from the tokens so far.

    Args:
        num_tokens: longest draft.
        max_length: of prompt and output together, in tokens.
        table_orders: longest suffix that is looked up.
        min_order: shorter matches give no draft: after one matching token the continuation is
            right too rarely to pay for its verification.
        bos_token_id: opens a document; no match lies before it.
    """

    def __init__(
        self,
        num_tokens: int,
        max_length: int,
        table_orders: int,
        bos_token_id: int,
        min_order: int = 2,
    ) -> None:
        if isinstance(num_tokens, bool) or not isinstance(num_tokens, int) or num_tokens < 1:
            raise ValueError(f"table_draft_tokens must be a positive integer; got {num_tokens!r}.")
        self.num_tokens = num_tokens
        self.max_length = max_length
        self.table_orders = table_orders
        self.bos_token_id = bos_token_id
        self.min_order = min(min_order, table_orders)
        self.length = num_tokens

    def get_candidates(
        self, input_ids: torch.Tensor, **kwargs: object
    ) -> tuple[torch.Tensor, None]:
        """The ids [1, length] followed by a draft, which may be empty."""
        room = min(self.length, self.max_length - input_ids.shape[1] - 1)
        if room < 1:
            return input_ids, None
        # One longer suffix than the table's makes drafts surer at no cost.
        table = lookup_last(input_ids, self.table_orders + 1, self.bos_token_id)
        if int(table.order) < self.min_order:
            return input_ids, None
        # Inside a run that repeats with period `distance`, the draft repeats its own beginning.
        distance = int(table.distance)
        start = input_ids.shape[1] - distance
        index = start + torch.arange(room, device=input_ids.device) % distance
        return torch.cat([input_ids, input_ids[:, index]], 1), None

    def update_candidate_strategy(
        self, input_ids: torch.Tensor, scores: torch.Tensor, num_matches: int
    ) -> None:
        """Draft more after a draft that was accepted whole, less after one that failed early."""
        matched = int(num_matches)
        if matched >= self.length:
            self.length = min(2 * self.length, self.num_tokens)
        else:
            self.length = max(2, min(self.num_tokens, 2 * matched + 1))


class DocTabGenerationMixin(GenerationMixin):
    """transformers' generation, and `table_draft_tokens`."""

    def prepare_inputs_for_generation(
        self, input_ids: torch.Tensor, **kwargs: Any
    ) -> dict[str, Any]:
        """As in transformers; keeps the padding in sight where the mask takes another form."""
        inputs: dict[str, Any] = super().prepare_inputs_for_generation(input_ids, **kwargs)
        mask = kwargs.get("attention_mask")
        if isinstance(mask, torch.Tensor) and mask.dim() == 2:
            inputs["token_mask"] = mask[:, -inputs["input_ids"].shape[1] :]
        return inputs

    def _prepare_generation_config(
        self, generation_config: Any, *args: Any, **kwargs: Any
    ) -> tuple[Any, dict[str, Any]]:
        """Understands `table_draft_tokens`: the longest draft from the table, None for none."""
        draft = kwargs.pop("table_draft_tokens", None)
        prepared, model_kwargs = super()._prepare_generation_config(
            generation_config, *args, **kwargs
        )
        if draft is None:
            draft = getattr(prepared, "table_draft_tokens", None)
        prepared.table_draft_tokens = draft
        if draft is not None:
            # Selects assisted decoding; `_get_candidate_generator` then brings the table's drafts.
            prepared.prompt_lookup_num_tokens = draft
        return prepared, model_kwargs

    def _get_candidate_generator(self, generation_config: Any, **kwargs: Any) -> Any:
        draft = getattr(generation_config, "table_draft_tokens", None)
        if draft is None:
            return super()._get_candidate_generator(generation_config=generation_config, **kwargs)
        return TableCandidateGenerator(
            draft,
            generation_config.max_length,
            self.config.table_orders,
            self.config.bos_token_id,
        )
