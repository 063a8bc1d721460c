"""A decoder with a window layout and a document table, for transformers (Sections 3.1 and 3.3).

Shape suffixes: B batch, T row length, D hidden_size, H query heads, K key/value heads, C head_dim.
`naive.py` is the same model in plain loops.
"""

import hashlib
import inspect
import math
import shutil
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from torch.nn import functional as F
from transformers import initialization as init
from transformers.cache_utils import Cache, DynamicCache
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel
from transformers.utils.generic import can_return_tuple
from transformers.utils.output_capturing import capture_outputs

from .attention_doctab import WINDOWED, eager_attention_forward, flex_kernel_options
from .cache_doctab import append_to_history
from .configuration_doctab import DocTabConfig
from .document_table import (
    DocumentTable,
    DocumentTableEmbedding,
    hash_bigrams,
    lookup_document_table,
    lookup_last,
)
from .generation_doctab import DocTabGenerationMixin
from .inputs_doctab import NO_RESIZE, check_ids, checked_fields, mark_padding, packed_documents
from .loss_doctab import (
    IGNORE_INDEX,
    linear_cross_entropy_sum,
    softcapped_logits,
    token_nats,
)
from .rotary_doctab import DocTabRotaryEmbedding, rotate

# transformers 5.24 renamed `past_key_values` to `cache` everywhere.
CACHE_NAME = (
    "cache" if "cache" in inspect.signature(create_causal_mask).parameters else "past_key_values"
)


# The files that a saved model needs to load where this package is not installed.
REMOTE_CODE = (
    "configuration_doctab.py",
    "modeling_doctab.py",
    "document_table.py",
    "attention_doctab.py",
    "cache_doctab.py",
    "generation_doctab.py",
    "inputs_doctab.py",
    "loss_doctab.py",
    "rotary_doctab.py",
)


def rms_norm(x: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm without a weight over the last dimension; keeps the dtype."""
    return F.rms_norm(x, (x.shape[-1],), eps=eps).to(x.dtype)


class DocTabAttention(nn.Module):
    """Attention with QK-norm after the rotary embedding and, on every second layer, a gated value
    embedding (Section 3.1); optionally a learned query scale per head (Section 4.8)."""

    def __init__(self, config: DocTabConfig, layer_idx: int) -> None:
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.head_dim = config.head_dim
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.scaling = config.head_dim**-0.5
        self.is_causal = True
        is_short = config.layer_types[layer_idx] == "sliding_attention"
        self.sliding_window = config.sliding_window if is_short else None
        self.window = config.window(layer_idx)
        query_size = config.num_attention_heads * config.head_dim
        key_size = config.num_key_value_heads * config.head_dim
        self.q_proj = _uniform(nn.Linear(config.hidden_size, query_size, bias=False), config)
        self.k_proj = _uniform(nn.Linear(config.hidden_size, key_size, bias=False), config)
        self.v_proj = _uniform(nn.Linear(config.hidden_size, key_size, bias=False), config)
        self.o_proj = _zeros(nn.Linear(query_size, config.hidden_size, bias=False))
        self.has_value_embedding = config.has_value_embedding(layer_idx)
        if self.has_value_embedding:
            self.value_embedding = _uniform(nn.Embedding(config.vocab_size, key_size), config)
            self.value_gate = _zeros(
                nn.Linear(config.value_gate_channels, config.num_key_value_heads, bias=False)
            )
        if config.query_scaling is not None:
            self.query_gain = nn.Parameter(torch.ones(config.num_attention_heads))
            _initial(self, "constant", 1.0, "query_gain")

    def forward(
        self,
        hidden_states: torch.Tensor,
        input_ids: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        position_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        cache: Cache | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """[B, T, D] to [B, T, D], and the attention weights where the implementation has them."""
        input_shape = hidden_states.shape[:-1]
        heads = (*input_shape, -1, self.head_dim)
        query = self.q_proj(hidden_states).view(heads).transpose(1, 2)
        key = self.k_proj(hidden_states).view(heads).transpose(1, 2)
        value = self.v_proj(hidden_states).view(heads)
        if self.has_value_embedding:
            channels = hidden_states[..., : self.config.value_gate_channels]
            gate = 2 * torch.sigmoid(self.value_gate(channels)).unsqueeze(-1)
            value = value + gate * self.value_embedding(input_ids).view(heads).to(value.dtype)
        value = value.transpose(1, 2)

        cos, sin = position_embeddings
        query, key = rotate(query, cos, sin), rotate(key, cos, sin)
        query = rms_norm(query, self.config.rms_norm_eps)
        key = rms_norm(key, self.config.rms_norm_eps)
        query = self._scale_query(query, position_ids)

        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)
        implementation = self.config._attn_implementation
        attention = ALL_ATTENTION_FUNCTIONS.get_interface(implementation, eager_attention_forward)
        if implementation == "flex_attention":
            kwargs.setdefault("kernel_options", flex_kernel_options(query))
        output, weights = attention(
            self,
            query,
            key,
            value,
            attention_mask,
            dropout=0.0,
            scaling=self.scaling,
            sliding_window=self.sliding_window,
            **kwargs,
        )
        return self.o_proj(output.reshape(*input_shape, -1)), weights

    def _scale_query(self, query: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        """g_h, or g_h * log(min(t, w) + 1) / log(base), times the query [B,H,T,C] (Section 4.8)."""
        if self.config.query_scaling is None:
            return query
        scale = self.query_gain.float()[None, :, None, None]
        if self.config.query_scaling == "log_length":
            length = position_ids.clamp_max(self.window).float() + 1
            factor = length.log() / math.log(self.config.query_scaling_base)
            scale = scale * factor[:, None, :, None]
        return (query * scale).to(query.dtype)


class DocTabMLP(nn.Module):
    """ReLU-squared MLP."""

    def __init__(self, config: DocTabConfig) -> None:
        super().__init__()
        size = config.intermediate_size
        self.up_proj = _uniform(nn.Linear(config.hidden_size, size, bias=False), config)
        self.down_proj = _zeros(nn.Linear(size, config.hidden_size, bias=False))

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[B, T, D] to [B, T, D]."""
        return self.down_proj(F.relu(self.up_proj(hidden_states)).square())


class DocTabDecoderLayer(GradientCheckpointingLayer):
    """Pre-norm attention and pre-norm MLP, each added to the residual stream."""

    def __init__(self, config: DocTabConfig, layer_idx: int) -> None:
        super().__init__()
        self.eps = config.rms_norm_eps
        self.self_attn = DocTabAttention(config, layer_idx)
        self.mlp = DocTabMLP(config)

    def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """[B, T, D] to [B, T, D]; the keyword arguments are DocTabAttention's."""
        attended, _ = self.self_attn(rms_norm(hidden_states, self.eps), **kwargs)
        hidden_states = hidden_states + attended
        return hidden_states + self.mlp(rms_norm(hidden_states, self.eps))


class DocTabPreTrainedModel(PreTrainedModel):
    """Loading, saving and initialisation common to the DocTab models."""

    config: DocTabConfig
    config_class = DocTabConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["DocTabDecoderLayer"]  # noqa: RUF012 (transformers reads lists and dicts)
    _skip_keys_device_placement = ["past_key_values", "cache"]  # noqa: RUF012
    _supports_flash_attn = True
    _supports_sdpa = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True
    _can_record_outputs = {  # noqa: RUF012
        "hidden_states": DocTabDecoderLayer,
        "attentions": DocTabAttention,
    }

    def get_correct_attn_implementation(
        self, requested_attention: str | None, is_init_check: bool = False
    ) -> str:
        """Our windowed attention unless another implementation is asked for."""
        return super().get_correct_attn_implementation(
            WINDOWED if requested_attention is None else requested_attention, is_init_check
        )

    @property
    def dtype(self) -> torch.dtype:
        """Type of the matrices, in which the model computes; embeddings may be stored in bf16."""
        return cast(nn.Linear, self.get_submodule(self._matrix_name)).weight.dtype

    @property
    def _matrix_name(self) -> str:
        prefix = "" if isinstance(self, DocTabModel) else f"{self.base_model_prefix}."
        return f"{prefix}layers.0.mlp.up_proj"

    def save_pretrained(self, save_directory: str | Path, **kwargs: Any) -> None:
        """As in transformers, and with this package's files, so that the folder loads anywhere
        with `trust_remote_code=True`."""
        super().save_pretrained(save_directory, **kwargs)
        for name in REMOTE_CODE:
            source = Path(__file__).with_name(name)
            if Path(save_directory, name).resolve() != source.resolve():
                shutil.copyfile(source, Path(save_directory, name))

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Draw a module's own parameters, each from a generator keyed by its name and the seed.

        The seed is `torch.initial_seed()`, what `torch.manual_seed` or `set_seed` last set. The
        values of a parameter therefore do not depend on which other parameters exist: a base model
        and its table model of one seed start with equal common parameters.
        """
        if isinstance(module, DocTabRotaryEmbedding):
            # Buffers that no checkpoint holds: from_pretrained leaves their memory unset.
            inv_freq, _ = module.compute_frequencies()
            init.copy_(module.inv_freq, inv_freq)
            init.copy_(module.original_inv_freq, inv_freq)
        for name, parameter in module.named_parameters(recurse=False):
            kind, scale = getattr(module, "_initial", {}).get(name, (None, 0.0))
            if kind is None:
                continue
            if kind == "constant":
                init.constant_(parameter, scale)
                continue
            key = f"{torch.initial_seed()}:{module._name}.{name}".encode()
            seed = int.from_bytes(hashlib.sha256(key).digest()[:7], "little")
            generator = torch.Generator().manual_seed(seed)
            values = torch.empty(parameter.shape, dtype=torch.float32)
            if kind == "normal":
                values.normal_(0.0, scale, generator=generator)
            else:
                values.uniform_(-scale, scale, generator=generator)
            init.copy_(parameter, values)

    def _name_modules(self, prefix: str = "") -> None:
        """Tell every module its name, the key of its initial values."""
        for name, module in self.named_modules():
            module._name = prefix + name


class DocTabModel(DocTabPreTrainedModel):
    """The decoder without its head: token ids to hidden states."""

    def __init__(self, config: DocTabConfig) -> None:
        super().__init__(config)
        self.embed_tokens = _initial(
            nn.Embedding(config.vocab_size, config.hidden_size), "normal", 1.0
        )
        if config.document_table:
            self.document_table = DocumentTableEmbedding(
                config.vocab_size,
                config.hidden_size,
                config.table_orders,
                config.table_distance_buckets,
            )
            _zeros(self.document_table.candidate_embedding)
            _zeros(self.document_table.state_embedding)
        if config.bigram_rows:
            self.bigram_table = _zeros(nn.Embedding(config.bigram_rows, config.hidden_size))
        layers = [DocTabDecoderLayer(config, i) for i in range(config.num_hidden_layers)]
        self.layers = nn.ModuleList(layers)
        self.resid_lambdas = nn.Parameter(torch.ones(config.num_hidden_layers))
        self.x0_lambdas = nn.Parameter(torch.full((config.num_hidden_layers,), 0.1))
        _initial(self, "constant", 1.0, "resid_lambdas")
        _initial(self, "constant", 0.1, "x0_lambdas")
        self.rotary_emb = DocTabRotaryEmbedding(config)
        self.gradient_checkpointing = False
        self._name_modules()
        self.post_init()
        self.store_embeddings()

    def store_embeddings(self, dtype: torch.dtype | None = None) -> None:
        """Store token and value embeddings and all tables in `dtype` (default: the config's).

        The recipe stores them, their gradients and their optimizer state in bf16 (Section 3.1).
        Call it again after loading a checkpoint that training is to continue from, because
        loading brings every parameter to one type.
        """
        dtype = dtype or getattr(torch, self.config.embedding_dtype)
        for module in self.modules():
            if isinstance(module, nn.Embedding):
                module.to(dtype)

    def get_input_embeddings(self) -> nn.Embedding:
        """The token embedding."""
        return self.embed_tokens

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        """Replace the token embedding."""
        self.embed_tokens = value

    @can_return_tuple
    @capture_outputs
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | dict[str, Any] | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        cache: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        use_cache: bool | None = None,
        table_order: torch.Tensor | None = None,
        table_candidate: torch.Tensor | None = None,
        table_distance: torch.Tensor | None = None,
        ablate_table: bool = False,
        token_mask: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """Hidden states after the final norm.

        Args:
            input_ids: [B, T].
            attention_mask: [B, past + T], 1 for tokens and 0 for padding; or masks that
                transformers prepared.
            position_ids: [B, T]; counted on from the cache by default. Where they start again
                inside a row, another document begins: attention and lookup do not cross.
            past_key_values: the KV cache, up to transformers 5.23.
            cache: the same, from 5.24.
            inputs_embeds: not supported: the value embeddings and the table need ids.
            use_cache: whether to return a cache; by default the config's choice outside training.
            table_order: [B, T] match order of each position, 0 to `table_orders`. All three table
                fields are given, or none; then they are looked up in the row itself.
            table_candidate: [B, T] candidate tokens, -1 at no match.
            table_distance: [B, T] distances in tokens, 0 at no match.
            ablate_table: treat every position as "no match" (Section 3.4, ablated table).
            token_mask: [B, T], 0 for padding, where `attention_mask` is already in another form.
            **kwargs: passed on to the attention implementation.
        """
        if input_ids is None or inputs_embeds is not None:
            raise ValueError(
                "DocTab models need input_ids: the value embeddings and the document table are "
                "looked up by token id, so inputs_embeds cannot replace them."
            )
        check_ids(input_ids, self.config.vocab_size)
        cache = cache if cache is not None else past_key_values
        packed = packed_documents(position_ids, attention_mask, cache)
        if packed is not None:
            # transformers separates packed documents only without a cache and without a mask.
            attention_mask = None
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training
        if use_cache and cache is None and packed is None:
            cache = DynamicCache(config=self.config)
        past_length = cache.get_seq_length() if cache is not None else 0
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device)
            position_ids = position_ids.unsqueeze(0) + past_length

        if token_mask is None and isinstance(attention_mask, torch.Tensor):
            token_mask = attention_mask
        passed = (table_order, table_candidate, table_distance)
        hidden_states = self._embed(input_ids, token_mask, packed, cache, passed, ablate_table)
        masks = self._masks(hidden_states, attention_mask, position_ids, cache)
        position_embeddings = self.rotary_emb(hidden_states, position_ids)
        embedded = hidden_states
        for i, layer in enumerate(self.layers):
            hidden_states = self.resid_lambdas[i] * hidden_states + self.x0_lambdas[i] * embedded
            hidden_states = layer(
                hidden_states.to(embedded.dtype),
                input_ids=input_ids,
                attention_mask=masks[self.config.layer_types[i]],
                position_ids=position_ids,
                position_embeddings=position_embeddings,
                cache=cache,
                **kwargs,
            )
        hidden_states = rms_norm(hidden_states, self.config.rms_norm_eps)
        return BaseModelOutputWithPast(
            last_hidden_state=hidden_states, **{CACHE_NAME: cache if use_cache else None}
        )

    def _embed(
        self,
        input_ids: torch.Tensor,
        token_mask: torch.Tensor | None,
        packed: torch.Tensor | None,
        cache: Cache | None,
        passed: tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None],
        ablate_table: bool,
    ) -> torch.Tensor:
        """Token vector plus table vectors, normalised: x0 of the recipe, [B, T, D]."""
        c = self.config
        dtype = self._compute_dtype(input_ids.device)
        hidden_states = self.embed_tokens(input_ids).to(dtype)
        if c.document_table or c.bigram_rows:
            history = mark_padding(input_ids, token_mask)
            if cache is not None:
                history = append_to_history(cache, c.num_hidden_layers, history)
            if c.document_table:
                table = self._table(input_ids, history, packed, passed, ablate_table)
                hidden_states = hidden_states + self.document_table(table, dtype)
            if c.bigram_rows:
                vectors = self._bigrams(history, packed, input_ids.shape[1], dtype)
                hidden_states = hidden_states + vectors
        return rms_norm(hidden_states, c.rms_norm_eps)

    def _table(
        self,
        input_ids: torch.Tensor,
        history: torch.Tensor,
        packed: torch.Tensor | None,
        passed: tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None],
        ablate_table: bool,
    ) -> DocumentTable:
        """The table fields [B, T] of the new positions: ablated, passed in, or looked up."""
        c = self.config
        if ablate_table:
            none = torch.zeros_like(input_ids)
            return DocumentTable(none, none - 1, none)
        if any(field is not None for field in passed):
            return checked_fields(passed, input_ids, c)
        length = input_ids.shape[1]
        # What lies a whole reach before the first new token can neither match nor be part of one.
        history = history[:, -(length + c.table_reach + c.table_orders) :]
        if length == 1:
            return lookup_last(history, c.table_orders, c.bos_token_id, c.table_reach)
        documents = self._documents(history, packed)
        whole = lookup_document_table(history, c.table_orders, documents, c.table_reach)
        return DocumentTable(*(field[:, -length:].contiguous() for field in whole))

    def _bigrams(
        self, history: torch.Tensor, packed: torch.Tensor | None, length: int, dtype: torch.dtype
    ) -> torch.Tensor:
        """Vectors of the bigram table [B, length, D]; none at a document's first token."""
        recent = history[:, -(length + 1) :]
        documents = self._documents(recent, packed)
        rows = hash_bigrams(recent.clamp_min(0), self.config.bigram_rows)
        present = (recent[:, :-1] >= 0) & (documents[:, :-1] == documents[:, 1:])
        vectors = self.bigram_table(rows).to(dtype) * present.unsqueeze(-1)
        # Without a history the first token has no predecessor.
        return F.pad(vectors, (0, 0, length - vectors.shape[1], 0))

    def _documents(self, history: torch.Tensor, packed: torch.Tensor | None) -> torch.Tensor:
        """Number of each position's document: BOS opens one, and so does a restart of positions."""
        documents = (history == self.config.bos_token_id).long().cumsum(1)
        return documents if packed is None else documents + packed

    def _masks(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | dict[str, Any] | None,
        position_ids: torch.Tensor,
        cache: Cache | None,
    ) -> dict[str, Any]:
        """The mask of each layer type, in the form that the attention implementation takes."""
        if isinstance(attention_mask, dict):
            return attention_mask
        makers = {
            "full_attention": create_causal_mask,
            "sliding_attention": create_sliding_window_causal_mask,
        }
        arguments = {
            "config": self.config,
            "inputs_embeds": hidden_states,
            "attention_mask": attention_mask,
            "position_ids": position_ids,
            CACHE_NAME: cache,
        }
        return {kind: makers[kind](**arguments) for kind in set(self.config.layer_types)}

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> nn.Embedding:
        """Not supported: E has four rows per token and the order of ids is fixed in all tables."""
        raise ValueError(NO_RESIZE)

    def _compute_dtype(self, device: torch.device) -> torch.dtype:
        """Type of the residual stream: autocast's, else that of the matrices."""
        if torch.is_autocast_enabled(device.type):
            return torch.get_autocast_dtype(device.type)
        return self.dtype


class DocTabForCausalLM(DocTabPreTrainedModel, DocTabGenerationMixin):
    """The decoder with its untied head, soft-capped logits and loss."""

    def __init__(self, config: DocTabConfig) -> None:
        super().__init__(config)
        self.model = DocTabModel(config)
        self.lm_head = _initial(
            nn.Linear(config.hidden_size, config.vocab_size, bias=False), "normal", 0.001
        )
        self.lm_head._name = "lm_head"
        self.post_init()
        self.model.store_embeddings()

    def get_output_embeddings(self) -> nn.Linear:
        """The head."""
        return self.lm_head

    def set_output_embeddings(self, value: nn.Linear) -> None:
        """Replace the head."""
        self.lm_head = value

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> nn.Embedding:
        """Not supported: E has four rows per token and the order of ids is fixed in all tables."""
        raise ValueError(NO_RESIZE)

    def target_nats(
        self, input_ids: torch.Tensor, targets: torch.Tensor, **fields: Any
    ) -> torch.Tensor:
        """Negative log-likelihood of every target in nats, [B, T] float32, for scoring.

        Logits are never whole and no gradients are recorded.

        Args:
            input_ids: [B, T].
            targets: [B, T] ids aligned with the inputs; -100 gives 0.
            **fields: table fields and whatever else `DocTabModel.forward` takes.
        """
        with torch.no_grad():
            hidden = self.model(input_ids, use_cache=False, **fields).last_hidden_state
            cap = self.config.final_logit_softcapping
            nats = token_nats(hidden.flatten(0, 1), self.lm_head.weight, targets.flatten(), cap)
        return nats.view_as(targets)

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | dict[str, Any] | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: Cache | None = None,
        cache: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        table_order: torch.Tensor | None = None,
        table_candidate: torch.Tensor | None = None,
        table_distance: torch.Tensor | None = None,
        ablate_table: bool = False,
        token_mask: torch.Tensor | None = None,
        num_items_in_batch: int | torch.Tensor | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Logits, and the loss where targets are given.

        Args:
            input_ids: [B, T], and so on as in `DocTabModel.forward`.
            attention_mask: as there.
            position_ids: as there.
            past_key_values: as there.
            cache: as there.
            inputs_embeds: as there.
            labels: [B, T] in transformers' meaning: the loss of position t is that of labels[t+1].
                Ids of -100 count nothing.
            use_cache: as there.
            logits_to_keep: how many last positions to compute logits for, or which; 0 for all.
            table_order: as there.
            table_candidate: as there.
            table_distance: as there.
            ablate_table: as there.
            token_mask: as there.
            num_items_in_batch: divisor of the summed loss (gradient accumulation); by default the
                number of targets here.
            **kwargs: as there; and `shift_labels` [B, T] in place of `labels`, targets aligned with
                the inputs: the loss of position t is that of shift_labels[t].

        Returns:
            `loss` in nats per target. `logits` are float32 [B, kept, vocab_size]; in training
            with targets they are None, as they never exist as a whole.
        """
        # Not a named argument, or the Trainer would expect it as a second column of labels.
        shift_labels: torch.Tensor | None = kwargs.pop("shift_labels", None)
        if labels is not None and shift_labels is not None:
            raise ValueError("Pass labels or shift_labels, not both: they would disagree.")
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            cache=cache,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            table_order=table_order,
            table_candidate=table_candidate,
            table_distance=table_distance,
            ablate_table=ablate_table,
            token_mask=token_mask,
            return_dict=True,
            **kwargs,
        )
        hidden_states = outputs.last_hidden_state
        cap = self.config.final_logit_softcapping
        if labels is not None:
            shift_labels = F.pad(labels[:, 1:], (0, 1), value=IGNORE_INDEX)
        loss = None
        if shift_labels is not None:
            targets = shift_labels.reshape(-1).to(hidden_states.device)
            total = linear_cross_entropy_sum(
                hidden_states.reshape(-1, hidden_states.shape[-1]),
                self.lm_head.weight,
                targets,
                cap,
            )
            count = (targets != IGNORE_INDEX).sum()
            loss = total / (count if num_items_in_batch is None else num_items_in_batch)
        logits = None
        if loss is None or not self.training:
            keep = slice(-logits_to_keep, None)
            kept = keep if isinstance(logits_to_keep, int) else logits_to_keep
            logits = softcapped_logits(hidden_states[:, kept], self.lm_head.weight, cap)
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            **{CACHE_NAME: outputs.get(CACHE_NAME)},
        )


def _initial(module: Any, kind: str, scale: float, parameter: str = "weight") -> Any:
    """Note how a module's own parameter is drawn; `_init_weights` carries it out."""
    module._initial = {**getattr(module, "_initial", {}), parameter: (kind, scale)}
    return module


def _uniform(module: nn.Module, config: DocTabConfig) -> Any:
    return _initial(module, "uniform", math.sqrt(3 / config.hidden_size))


def _zeros(module: nn.Module) -> Any:
    return _initial(module, "constant", 0.0)


__all__ = ["DocTabForCausalLM", "DocTabModel", "DocTabPreTrainedModel"]
