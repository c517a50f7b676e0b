"""Answering a question about an SQLite file by a trained model: the query and its rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from fathom.models.registry import RELATIONS, build_options, lookup
from fathom.tables.base import require
from fathom.tables.database import Answer, Database, QueryError
from fathom.tables.picard import Picard
from fathom.tables.relations import Turn
from fathom.tables.source import Encoded, Source, begun, query_of


@dataclasses.dataclass(frozen=True)
class Reply:
    """A model's answer to a question.

    query: what the model wrote.   answer: its rows; None if it does not run.   fault: why it does not run.
    cut: what was left out of the question.   unwritable: names that PICARD's grammar lacks, so no query can
        have them.
    """

    query: str
    answer: Answer | None
    fault: str
    cut: str
    unwritable: tuple[str, ...] = ()


def source_of(config: Any) -> Source:
    """The way in which this model's questions are written; the default if its config does not say."""
    kept = getattr(config, "source", None)
    return Source(**kept) if kept else Source()


def options_of(config: Any) -> Any:
    """The options of the model's relations, or None for a model without."""
    section = getattr(config, RELATIONS, None)
    if not section:
        return None
    method: Any = lookup(RELATIONS, section["name"])
    options = build_options(RELATIONS, section)
    return None if method.numbering(options) is None else options


def encode(
    model: Any, tokenizer: Any, database: Database, turns: Sequence[str], spoken: Sequence[Turn] | None = None
) -> tuple[Encoded, dict[str, torch.Tensor]]:
    """The source and the model's inputs. Raises ValueError for a question or schema that has no room, and for a
    tokenizer without "<"."""
    require("`fathom table ask`", "rapidfuzz", "simplemma")
    if tokenizer.unk_token_id is not None and tokenizer.unk_token_id in tokenizer("<")["input_ids"]:
        raise ValueError(
            'tokenizer: reads "<" as unknown, so that no query can compare; add the tokens " <" and " <=", as training '
            "with task text_to_sql does"
        )
    options = options_of(model.config)
    parsed = options is not None and options.dependency
    made = source_of(model.config).encode(tokenizer, turns, database.schema, database, spoken, parsed)
    inputs = {"input_ids": torch.tensor([made.input_ids])}
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    if options is not None:
        inputs["relation_ids"] = torch.from_numpy(made.relation_ids(options))[None]
    return made, {name: value.to(model.device) for name, value in inputs.items()}


@torch.no_grad()
def ask(
    model: Any,
    tokenizer: Any,
    database: Database,
    turns: Sequence[str],
    spoken: Sequence[Turn] | None = None,
    picard: Picard | None = None,
    beams: int = 4,
    new_tokens: int = 256,
) -> Reply:
    """The query that a model writes for the last of `turns`, and what it returns.

    Args:
        spoken: for each turn, what files say about its words.
        picard: constraint on the query; None: there is none.
    """
    made, inputs = encode(model, tokenizer, database, turns, spoken)
    name = database.schema.name
    processors = [picard.processor(tokenizer, {name: database.schema}, [name])] if picard else []
    # Which database it is need not be guessed: the answer begins with its name.
    start = torch.tensor([[model.config.decoder_start_token_id, *begun(tokenizer, name)]], device=model.device)
    out = model.generate(
        **inputs, decoder_input_ids=start, num_beams=beams, max_new_tokens=new_tokens, do_sample=False,
        logits_processor=processors,
    )  # fmt: skip
    query = query_of(str(tokenizer.decode(out[0], skip_special_tokens=True)), name)
    unwritable = tuple(lost for one in processors for lost in one.acceptor.unwritable(name))
    try:
        return Reply(query, database.run(query), "", made.cut, unwritable)
    except QueryError as error:
        return Reply(query, None, str(error), made.cut, unwritable)


@torch.no_grad()
def attention_of(model: Any, tokenizer: Any, database: Database, turns: Sequence[str]) -> tuple[Encoded, np.ndarray]:
    """The source, and the attention between its items in the encoder, averaged over layers and heads. The weights of an
    item's tokens are summed over the tokens of the other item."""
    made, inputs = encode(model, tokenizer, database, turns)
    model.set_attn_implementation("eager")
    out = model.get_encoder()(**inputs, output_attentions=True)
    weights = torch.stack([layer[0].float().mean(0) for layer in out.attentions]).mean(0).cpu().numpy()
    rows = np.array(sorted({row for row in made.rows.tolist() if row >= 0}))
    member = (made.rows[None] == rows[:, None]).astype(float)
    return made, (member @ weights @ member.T) / member.sum(1)[:, None]
