"""Hand-made results for the tests of the report: the numbers are invented, their shape is real."""

import math

from fathom.report.results import Results, Run, Trial

METHODS = {
    "vanilla": ({"name": "vanilla"}, 1.0, 0.00),
    "loop": ({"name": "loop", "passes": 2}, 2.0, -0.05),
    "pondering": ({"name": "pondering", "steps": 1, "top_k": None}, 2.4, -0.09),
}


def run(method: str, budget: str = "tokens", seed: int = 0, lr: float = 0.004, gain: float | None = None) -> Run:
    depth, cost, usual_gain = METHODS[method]
    gain = usual_gain if gain is None else gain
    tokens, per_token = 1_300_000, 9.6e6 * cost
    history = [
        {
            "tokens": step * tokens / 300,
            "train_flops": step * tokens / 300 * per_token,
            "loss": 3.6 + gain + 3.2 * math.exp(-step / 40) + 0.05 * math.sin(step * 12.9898 + seed),
        }
        for step in range(1, 301)
    ]
    return Run(
        method=method,
        options={"depth": depth, "mixer": {"name": "none"}, "residual": {"name": "standard"}},
        budget=budget,
        seed=seed,
        lr=lr,
        layers=4,
        scores={"bits_per_byte": 2.05 + gain / 2 + 0.002 * seed},
        validation_loss=3.7 + gain,
        train_loss=3.6 + gain,
        params=1_900_000,
        non_embedding_params=900_000,
        train_tokens=tokens,
        train_flops=tokens * per_token,
        inference_flops_per_token=per_token / 3,
        answer_flops=per_token / 3,
        kv_bytes_per_token=4096 * (1 if method == "vanilla" else 2),
        tokens_per_second=21_000 / cost,
        peak_memory_bytes=int(7e8 * cost**0.5),
        seconds=62 * cost,
        history=history,
        samples=[
            {"prompt": "The old man", "text": f" <b>looked</b> at the sea & said nothing ({method})."},
            {"prompt": "She opened the door", "text": " and the room was dark, for the lamp had gone out."},
        ],
        device="2 CPU cores (x86_64)",
        versions={"fathom": "0.1.0", "torch": "2.13.0+cpu", "transformers": "5.24.0"},
        commit="0000000",
        folder=f"{method}/{budget}-seed-{seed}",
        tokens_per_second_interval=[20_000 / cost, 22_000 / cost],
        interruptions=0,
        busy=0.99,
    )


def results(runs: list[Run] | None = None) -> Results:
    return Results(
        name="example",
        recipe="name: example\nmethods: [vanilla, loop, pondering]  # <not a tag>\n",
        command="fathom compare recipes/example.yaml",
        block_size=256,
        validation="embedded, 120,000 bytes",
        reference=4.61,
        trials=[Trial("loop", 4, 0.002, 325_000, 4.1, False), Trial("loop", 4, 0.004, 325_000, None, True)],
        runs=[run(method) for method in METHODS] if runs is None else runs,
    )
