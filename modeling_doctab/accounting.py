"""Parameters and FLOPs of a configuration, by formula (Section 3.1, compute accounting)."""

from collections.abc import Iterator

from .configuration_doctab import DocTabConfig


def count_parameters(config: DocTabConfig) -> int:
    """Number of parameters of a DocTabForCausalLM, tables included.

    For the paper's shapes: 2Vd + ceil(L/2)Vd + 12Ld^2, the gates, and 2L scalars; the document
    table adds 4Vd + 57d and the bigram table its rows times d.
    """
    c = config
    embeddings = 2 * c.vocab_size * c.hidden_size
    embeddings += sum(map(c.has_value_embedding, range(c.num_hidden_layers))) * (
        c.vocab_size * c.num_key_value_heads * c.head_dim
    )
    scalars = 2 * c.num_hidden_layers
    if c.query_scaling is not None:
        scalars += c.num_hidden_layers * c.num_attention_heads
    tables = c.bigram_rows * c.hidden_size
    if c.document_table:
        tables += (c.table_orders * c.vocab_size + c.num_table_states) * c.hidden_size
    return embeddings + _layer_matrices(c) + scalars + tables


def flops_per_token(config: DocTabConfig, sequence_length: int) -> float:
    """Matrix FLOPs of forward and backward per token, without recomputation.

    6 per parameter of the layers' matrices and of the head, plus 12 x (heads x head_dim) per key
    and layer. Position t of a layer with window w has min(t, w) + 1 keys. The table adds none.

    Args:
        config: the model.
        sequence_length: row length T in tokens.
    """
    c = config
    matrices = _layer_matrices(c) + c.vocab_size * c.hidden_size
    query_size = c.num_attention_heads * c.head_dim
    keys = sum(mean_keys(window, sequence_length) for window in _windows(c))
    return 6.0 * matrices + 12.0 * query_size * keys


def flops_per_token_with_recomputation(config: DocTabConfig, sequence_length: int) -> float:
    """The same with one more forward pass in the backward pass: 4/3 (Table 3)."""
    return flops_per_token(config, sequence_length) * 4 / 3


def mean_keys(window: int, sequence_length: int) -> float:
    """Mean over positions t of min(t, window) + 1, in keys."""
    w = min(window, sequence_length)
    total = w * (w - 1) / 2 + (sequence_length - w) * w
    return total / sequence_length + 1


def _windows(config: DocTabConfig) -> Iterator[int]:
    return (config.window(i) for i in range(config.num_hidden_layers))


def _layer_matrices(config: DocTabConfig) -> int:
    """Weights of all 2-D matrices inside the layers, the gates of the value embeddings included."""
    c = config
    query_size = c.num_attention_heads * c.head_dim
    key_size = c.num_key_value_heads * c.head_dim
    layer = c.hidden_size * (2 * query_size + 2 * key_size + 2 * c.intermediate_size)
    num_gates = sum(map(c.has_value_embedding, range(c.num_hidden_layers)))
    gates = num_gates * c.value_gate_channels * c.num_key_value_heads
    return c.num_hidden_layers * layer + gates
