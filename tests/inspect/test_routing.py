"""The picture of routing against what the layers say themselves in a forward, and what `fathom inspect` shows."""

import json

import pytest
import torch

from fathom.inspect import RoutingMap, offered
from tiny import tiny_model, tokens
from tiny_checkpoint import TEXT, run_cli, save_fathom, tiny_tokenizer

MOE = {"name": "moe", "experts": 6, "active": 2, "slices": 2, "width": 16}


@torch.no_grad()
def test_loads_and_groups_are_those_of_the_forward():
    model, ids = tiny_model(vocab_size=300, feed_forward=MOE).eval(), tokens(1, 40)[0]
    said = model(ids[None, :-1], output_auxiliary=True, use_cache=False).auxiliary["expert_load"]
    picture = RoutingMap.measure(model, tiny_tokenizer(), ids, window=64)
    torch.testing.assert_close(torch.tensor(picture.loads), said.float())
    assert (picture.groups, picture.slices, picture.tokens) == (3, 2, 39)
    assert torch.tensor(picture.shares).sum(-1).tolist() == pytest.approx([1.0] * len(picture.shares))

    states = []
    for layer in model.model.layers:
        layer.mlp.register_forward_pre_hook(lambda module, given: states.append((module, given[0][0])))
    model(ids[None, :-1], use_cache=False)
    whole = 0.0
    for network, x in states:
        p = (x @ network.gate.weight.T).softmax(-1)
        kept = p * (p >= p.topk(2)[0][:, -1:])
        whole = whole + (kept / kept.sum(-1, keepdim=True)).view(39, 3, 2).sum(-1) / len(states)
    shown = torch.tensor([row[1] for row in picture.passage])  # of two layers in two groups either is right
    assert [row[2] for row in picture.passage] == pytest.approx(whole.amax(-1).tolist(), abs=1e-5)
    torch.testing.assert_close(whole.gather(1, shown[:, None])[:, 0], whole.amax(-1))
    assert picture.chosen == pytest.approx([(shown == g).float().mean().item() for g in range(3)])


def test_windows_count_each_token_once():
    model, ids = tiny_model(vocab_size=300, feed_forward=MOE).eval(), tokens(1, 60)[0]
    picture = RoutingMap.measure(model, tiny_tokenizer(), ids, window=16, batch_size=2)
    assert picture.tokens == len(picture.passage) == 59
    assert all(0 <= group < 3 and 0 < share <= 1 + 1e-6 for _, group, share in picture.passage)
    assert torch.tensor(picture.loads).sum(-1).tolist() == pytest.approx([1.0] * len(picture.loads))


def test_the_command_shows_it(tmp_path, monkeypatch, capsys):
    folder = save_fathom(tmp_path / "run" / "model", feed_forward=MOE)
    layers = [[0.5, 0.25, 0.25, 0.0, 0.0, 0.0], [0.5, 0.0, 0.0, 0.5, 0.0, 0.0]]  # expert by expert, as a run says them
    line = {"expert_load": layers, "load_max_over_mean": [3.0, 3.0], "domain_information": [0.1, 0.2]}
    lines = [{"step": 5, **line}, {"step": 5, "validation_loss": 1.0}, {"step": 10, **line}]
    half = '{"step": 15, "domain_load": {"sea": 1.0}'  # of a process that was killed
    (tmp_path / "run" / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines) + half)
    (tmp_path / "text.txt").write_text(TEXT[:400])
    given = ("inspect", folder, "--text", tmp_path / "text.txt")
    code, out, _ = run_cli(monkeypatch, capsys, *given, "-o", tmp_path / "out")
    page = (tmp_path / "out" / "inspect.html").read_text()
    assert code == 0 and "6 experts in 3 groups of 2" in out
    assert "load over 2 lines of a run, up to step 10" in out and "source, by layer: 0.10 to 0.20 at first" in out
    assert (tmp_path / "out" / "routing_history.png").stat().st_size > 5000
    assert "Which experts tokens run" in page and "group 2" in page and "hsl(" in page
    code, out, _ = run_cli(monkeypatch, capsys, *given, "--json")
    found = json.loads(out)
    assert code == 0 and set(found["routing"]) >= {"loads", "shares", "passage"}
    assert found["routing_history"]["steps"] == [5, 10]
    assert found["routing_history"]["loads"][0] == [0.5, 0.125, 0.125, 0.25, 0.0, 0.0]
    assert offered(tiny_model(feed_forward=MOE).config) == [RoutingMap] and not offered(tiny_model().config)
