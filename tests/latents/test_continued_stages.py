"""A stage that goes on from another's model."""

from __future__ import annotations

from types import SimpleNamespace

from latent_models import model

from fathom.tasks import latents as tasks_latents
from fathom.tasks import lookup


def test_embeddings_that_train_again_leave_the_decoder_behind(tmp_path, monkeypatch):
    """A decoder reads the vectors that it was trained on, and those are others now."""
    monkeypatch.setattr(tasks_latents, "refuse_other_tokenizer", lambda checkpoint, tokenizer: None)
    data = SimpleNamespace(train=[{"input_ids": list(range(12))}], tokenizer=None)
    for options, kept in (({"source": "learned", "normalisation": "l2"}, []), ({}, ["contextual_decoder"])):
        made = model(**options)
        made.save_pretrained(tmp_path / f"{len(kept)}")
        fields = {"checkpoint": str(tmp_path / f"{len(kept)}")}
        found = lookup("latent_diffusion")().new_model(made.config, fields, data)
        assert found.config.trained == [*kept, "latent_diffusion"]
