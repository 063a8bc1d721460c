"""doctab's model: a transformers decoder with a window layout and a document table."""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from .configuration_doctab import DocTabConfig
from .document_table import DocumentTable, lookup_document_table
from .modeling_doctab import DocTabForCausalLM, DocTabModel, DocTabPreTrainedModel

AutoConfig.register(DocTabConfig.model_type, DocTabConfig, exist_ok=True)
AutoModel.register(DocTabConfig, DocTabModel, exist_ok=True)
AutoModelForCausalLM.register(DocTabConfig, DocTabForCausalLM, exist_ok=True)

__version__ = "0.1.0"

__all__ = [
    "DocTabConfig",
    "DocTabForCausalLM",
    "DocTabModel",
    "DocTabPreTrainedModel",
    "DocumentTable",
    "lookup_document_table",
]
