"""Evaluation of checkpoints: perplexity, bits per byte, lm_eval tasks, retrieval from long texts."""

from fathom.evaluate.load_model import load_checkpoint
from fathom.evaluate.long_context import evaluate_long, nats_by_position
from fathom.evaluate.steps_run import Steps, is_adaptive, steps_run
from fathom.evaluate.tasks import evaluate_tasks, find_tasks
from fathom.evaluate.text import (
    TextBound,
    TextScore,
    bits_per_byte,
    evaluate_text,
    read_documents,
    read_text,
    text_loss,
)
from fathom.evaluate.unigram import unigram_loss

__all__ = [
    "Steps",
    "TextBound",
    "TextScore",
    "bits_per_byte",
    "evaluate_long",
    "evaluate_tasks",
    "evaluate_text",
    "find_tasks",
    "is_adaptive",
    "load_checkpoint",
    "nats_by_position",
    "read_documents",
    "read_text",
    "steps_run",
    "text_loss",
    "unigram_loss",
]
