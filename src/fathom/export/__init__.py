"""From a checkpoint of ours to what other programs read: a stock one of transformers, LLaDA's layout, or GGUF."""

from fathom.export.forms import FORMS, export, forms_of

__all__ = ["FORMS", "export", "forms_of"]
