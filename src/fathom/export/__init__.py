"""Exports of a checkpoint for other programs: as a stock transformers checkpoint, in LLaDA's layout, or as GGUF."""

from fathom.export.forms import FORMS, export, forms_of

__all__ = ["FORMS", "export", "forms_of"]
