"""Fast decoding: the prompt reading and the loop behind `generate()`, for Fathom's models and for any under `compress`.

    entry.py        generate(): which calls run here, and which stay with transformers' own loop
    prompt.py       how many tokens of a long prompt are read in one call
    loop.py         greedy decoding and sampling, token for token what transformers gives
    growing.py      a full cache with room to grow, so that a step copies one token and not the text
    fixed.py        one step at fixed addresses: its inputs and its full cache
    compiled.py     its layers compiled, where the caller asks
    graphs.py       such a step recorded once and replayed, as a CUDA graph
    speculation.py  drafting with fewer passes of the same model

`switch.FAST` turns it off: then transformers' own loop runs everything, each prompt in one piece.
"""
