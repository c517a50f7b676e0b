"""An OpenAI-compatible endpoint for one checkpoint, plain or under `compress`.

jobs.py      what one request asks of the model, checked;   text → tokens → pieces of text
worker.py    the thread that runs the model: a bounded queue, batches of what waits
app.py       HTTP: routes, streams, errors, limits
"""
