"""Configuration of a DocTab model: sizes, window layout, document table, controls (Section 3)."""

from dataclasses import fields
from typing import Any

from transformers.configuration_utils import PreTrainedConfig
from transformers.generation import GenerationConfig

# Bumped when an old version of this code could no longer read a new config correctly.
CONFIG_FORMAT = 1

# Keys beyond the declared fields that transformers itself writes into or passes to a config.
_LIBRARY_KEYS = {
    *("_attn_implementation_internal", "_experts_implementation_internal", "attn_implementation"),
    *("experts_implementation", "output_attentions", "use_return_dict", "per_layer_config"),
    *("name_or_path", "_name_or_path", "_commit_hash", "model_type", "auto_map"),
    *("trust_remote_code", "custom_pipelines", "num_labels", "quantization_config"),
    *("torch_dtype", "rope_theta", "rope_scaling"),
}


class DocTabConfig(PreTrainedConfig):
    r"""Everything that distinguishes the paper's arms (Section 3.1, Section 3.4).

    The defaults are the paper's B with the document table. Each arm is a few fields away:
    `window_pattern="S", short_window=512, max_position_embeddings=8192` is LG512.

    Args:
        vocab_size: number of token ids, V.
        hidden_size: width of the residual stream.
        num_hidden_layers: number of blocks.
        num_attention_heads: query heads.
        num_key_value_heads: key and value heads; a divisor of `num_attention_heads`, which is
            also the default.
        head_dim: size of one head.
        intermediate_size: width of the MLP; 4 x `hidden_size` by default.
        max_position_embeddings: the row length T that the model is trained on, in tokens.
        window_pattern: letters S (short window) and L (the whole row), repeated over the layers;
            the last layer is always L.
        short_window: number of *earlier* tokens that a short layer attends to, the paper's w;
            itself comes on top. Half a row by default. `sliding_window` is w + 1, because
            transformers counts the token itself.
        document_table: whether the model has the tables E and G of Section 3.3.
        table_orders: longest suffix that the lookup matches, in tokens.
        table_reach: number of tokens that the lookup reaches back, the chunk length in training.
        table_distance_buckets: rows of G per order; distances share a row per power of two.
        bigram_rows: rows of the hashed bigram table (Section 3.4); 0 for none.
        query_scaling: None, "head_gain" (a learned gain per head after QK-norm) or "log_length"
            (that gain times log(min(t, w) + 1) / log(query_scaling_base), Section 4.8).
        query_scaling_base: row length at which the log-length factor is 1.
        value_gate_channels: leading channels of the block input that gate the value embeddings.
        final_logit_softcapping: c of the soft cap c * tanh(logits / c); None for none.
        rms_norm_eps: epsilon of every RMSNorm; none of them has a weight.
        rope_parameters: as in transformers; rotary base 10,000 by default.
        rotary_dtype: "float32", or "bfloat16" to round cos and sin as the reference recipe does.
        embedding_dtype: storage type of the token and value embeddings and of all tables,
            their gradients and optimizer state included: "bfloat16" as in the recipe, or "float32".
            A checkpoint loaded with an explicit `dtype` follows that instead.
        bos_token_id: the id that opens every row and splits documents for the lookup; the
            reference tokenizer's `vocab_size - 4` by default.
        config_format: version of this list of fields; a newer one is refused.

    Raises:
        ValueError: if a field is out of range, two fields contradict each other, or a key is
            unknown.
    """

    model_type = "doctab"
    keys_to_ignore_at_inference = ["past_key_values", "cache"]  # noqa: RUF012 (the Trainer adds to it)
    default_theta = 10000.0

    vocab_size: int = 8192
    hidden_size: int = 512
    num_hidden_layers: int = 8
    num_attention_heads: int = 4
    num_key_value_heads: int = None  # type: ignore[assignment]  # set on construction
    head_dim: int = 128
    intermediate_size: int = None  # type: ignore[assignment]  # likewise
    max_position_embeddings: int = 2048
    window_pattern: str = "SSSL"
    short_window: int = None  # type: ignore[assignment]  # likewise
    document_table: bool = True
    table_orders: int = 4
    table_reach: int = 8192
    table_distance_buckets: int = 14
    bigram_rows: int = 0
    query_scaling: str | None = None
    query_scaling_base: int = 2048
    value_gate_channels: int = 32
    final_logit_softcapping: float | int | None = 15.0
    rms_norm_eps: float = 2.0**-23
    rope_parameters: dict[str, Any] = None  # type: ignore[assignment]  # likewise
    rotary_dtype: str = "float32"
    embedding_dtype: str = "bfloat16"
    bos_token_id: int = None  # type: ignore[assignment]  # likewise
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None
    use_cache: bool = True
    tie_word_embeddings: bool = False
    layer_types: list[str] = None  # type: ignore[assignment]  # likewise
    sliding_window: int = None  # type: ignore[assignment]  # likewise
    config_format: int = CONFIG_FORMAT

    def __post_init__(self, **kwargs: Any) -> None:
        self._refuse_unknown(kwargs)
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        if self.intermediate_size is None:
            self.intermediate_size = 4 * self.hidden_size
        if self.short_window is None:
            self.short_window = self.max_position_embeddings // 2
        if self.bos_token_id is None:
            self.bos_token_id = max(self.vocab_size - 4, 0)
        self._check_fields()
        self._derive_layers()
        if not kwargs.get("auto_map"):
            kwargs["auto_map"] = {
                "AutoConfig": "configuration_doctab.DocTabConfig",
                "AutoModel": "modeling_doctab.DocTabModel",
                "AutoModelForCausalLM": "modeling_doctab.DocTabForCausalLM",
            }
        super().__post_init__(**kwargs)

    def window(self, layer_idx: int) -> int:
        """Number of earlier tokens that a layer attends to, the paper's w (itself comes on top)."""
        is_short = self.layer_types[layer_idx] == "sliding_attention"
        return self.short_window if is_short else self.max_position_embeddings

    def has_value_embedding(self, layer_idx: int) -> bool:
        """Whether a layer has a value embedding: every second one, counted so that the last has."""
        return layer_idx % 2 == (self.num_hidden_layers - 1) % 2

    @property
    def num_table_states(self) -> int:
        """Rows of G: one per order and distance bucket, and one for "no match" (the last)."""
        return self.table_orders * self.table_distance_buckets + 1

    def _refuse_unknown(self, kwargs: dict[str, Any]) -> None:
        if self.config_format > CONFIG_FORMAT:
            raise ValueError(
                f"This config has config_format {self.config_format}, but this version of "
                f"modeling_doctab reads up to {CONFIG_FORMAT}. Update modeling_doctab."
            )
        known = _LIBRARY_KEYS | set(GenerationConfig().to_dict())
        unknown = sorted(key for key in kwargs if key not in known)
        if unknown:
            names = ", ".join(sorted(f.name for f in fields(DocTabConfig) if f.name in _OWN_FIELDS))
            raise ValueError(
                f"DocTabConfig has no field {', '.join(map(repr, unknown))}. "
                f"Remove it, or use one of: {names}."
            )

    def _check_fields(self) -> None:
        positive = (
            "vocab_size hidden_size num_hidden_layers num_attention_heads num_key_value_heads "
            "head_dim intermediate_size max_position_embeddings short_window table_orders "
            "table_reach table_distance_buckets value_gate_channels"
        )
        for name in positive.split():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be a positive integer; got {value!r}.")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                "num_key_value_heads must divide num_attention_heads; got "
                f"{self.num_key_value_heads} and {self.num_attention_heads}."
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even for rotary embeddings; got {self.head_dim}.")
        if not self.window_pattern or set(self.window_pattern) - set("SL"):
            raise ValueError(
                "window_pattern must be letters S (short) and L (whole row); got "
                f"{self.window_pattern!r}. The paper's are 'SSSL' and, for LG512, 'S'."
            )
        if self.table_orders > 8:
            raise ValueError(f"table_orders must be 1 to 8; got {self.table_orders}.")
        if isinstance(self.bigram_rows, bool) or self.bigram_rows < 0:
            raise ValueError(f"bigram_rows must be 0 (none) or positive; got {self.bigram_rows}.")
        if self.value_gate_channels > self.hidden_size:
            raise ValueError(
                "value_gate_channels cannot exceed hidden_size; got "
                f"{self.value_gate_channels} and {self.hidden_size}. Use hidden_size or less."
            )
        choices = {
            "query_scaling": (None, "head_gain", "log_length"),
            "rotary_dtype": ("float32", "bfloat16"),
            "embedding_dtype": ("float32", "bfloat16"),
        }
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be one of {allowed}; got {getattr(self, name)!r}.")
        if self.query_scaling_base < 2:
            raise ValueError(f"query_scaling_base must be >= 2; got {self.query_scaling_base}.")
        if self.final_logit_softcapping is not None and self.final_logit_softcapping <= 0:
            raise ValueError(
                "final_logit_softcapping must be positive, or None for no cap; got "
                f"{self.final_logit_softcapping}."
            )
        if not 0 <= self.bos_token_id < self.vocab_size:
            raise ValueError(
                f"bos_token_id must lie in the vocabulary (0 .. {self.vocab_size - 1}); got "
                f"{self.bos_token_id}."
            )

    def _derive_layers(self) -> None:
        """`layer_types` and `sliding_window`, the form in which transformers reads the layout."""
        letters = (self.window_pattern * self.num_hidden_layers)[: self.num_hidden_layers - 1] + "L"
        layer_types = ["sliding_attention" if c == "S" else "full_attention" for c in letters]
        if self.layer_types not in (None, layer_types):
            raise ValueError(
                f"layer_types follows from window_pattern; {self.window_pattern!r} over "
                f"{self.num_hidden_layers} layers gives {layer_types}, but layer_types is "
                f"{self.layer_types}. Leave layer_types out and set window_pattern."
            )
        if self.sliding_window not in (None, self.short_window + 1):
            raise ValueError(
                f"sliding_window is short_window + 1 (it counts the token itself); got "
                f"{self.sliding_window} and {self.short_window}. Leave sliding_window out."
            )
        self.layer_types = layer_types
        self.sliding_window = self.short_window + 1


_OWN_FIELDS = frozenset(DocTabConfig.__annotations__)

__all__ = ["DocTabConfig"]
