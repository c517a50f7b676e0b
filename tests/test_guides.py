"""README and the guides: every command and every piece of Python in them works, on tiny models.

What is cheap is run as written, but for names of models and the sizes in a recipe (`RUN`). What needs several GPUs, a
download or minutes is parsed: its verb, options and arguments exist (`PARSED`). What sets an environment up is held
against pyproject.toml, the Makefile and the files it names (`SETUP`). A command that no list knows fails.
docs/caches.md is run by tests/caches/test_guide.py. tests/test_pages.py parses the commands of all other pages.
"""

from __future__ import annotations

import importlib.util
import re
import shlex
import sys
import textwrap
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from fathom import FathomConfig, FathomForCausalLM
from fathom.cost import forward_flops_per_token
from fathom.models import registry
from fathom.train import load_recipe
from fathom_cli import app
from tiny import SIZES, assert_close, tiny_model, tokens
from tiny_checkpoint import TEXT, run_cli, tiny_tokenizer

ROOT = Path(__file__).parents[1]
PAGES = (
    "README.md", "CONTRIBUTING.md", "docs/training.md", "docs/lineage.md", "docs/curation.md", "docs/publishing.md",
)  # fmt: skip
TRAINED = 256  # tokens, of the recipe's 500,000

RUN = (
    "fathom methods",
    'fathom cache MODEL --method treekv --budget 16 --prompt "Once upon a time"',
    "fathom cache show MODEL --text page.txt",
    "fathom lineage compare MODEL OTHER",
    "fathom lineage matrix MODEL OTHER THIRD --output matrix.png",
    "fathom curate raw -o corpus --config curate.yaml",
    "fathom cost mine.yaml",
    "fathom export MODEL",
    "fathom export MODEL --to gguf -o gguf",
    "fathom compare mine.yaml",
    "fathom train mine.yaml --method pondering",
    'fathom generate runs/mine/pondering-seed0/model --prompt "The old man" --stream',
    "fathom evaluate runs/mine/pondering-seed0/model --text my-text/held-out.txt",
    "fathom inspect runs/mine/depth_attention/tokens-500000-seed-0/model --text my-text/held-out.txt",
)
PARSED = (
    "fathom vision bench MODEL --image cat.png --tokens 144",  # all three: tests/vision/test_vision_verbs.py
    "fathom vision show MODEL --image cat.png -o kept.png",
    "fathom vision convert my-llava -o my-llava-144 --tokens 144",
    "fathom --install-completion",  # would change the shell's files
    'fathom generate runs/demo/vanilla/tokens-700000-seed-0/model --prompt "The old man" --stream',  # after the demo
    "fathom cache bench MODEL --text book.txt",  # run by tests/caches/test_guide.py, on a shorter text
    "fathom serve MODEL --cache treekv --budget 1024",  # until it is stopped; run by tests/serve
    "fathom compare recipes/sft_cpu.yaml",  # a minute
    "fathom compare recipes/seq2seq_cpu.yaml",  # two minutes
    "fathom compare recipes/context_cpu.yaml --jobs 2",  # two minutes
    "fathom compare recipes/tables_demo.yaml",  # six minutes
    "fathom latents run recipes/codar_cpu.yaml",  # minutes; run by tests/latents. It trains:
    'fathom generate runs/codar_cpu/seed-0/decoder/model --prompt "The old man" --steps 50',
    "fathom compare recipes/table_text_cpu.yaml",  # two minutes
    "fathom compare recipes/diffusion_cpu.yaml",  # minutes; what it trains:
    "fathom generate runs/diffusion_cpu/masked/tokens-1200000-seed-0/model "
    '--prompt "The old man" --policy fourier_sampler --steps 32',
    "fathom compare recipes/mova_demo.yaml --jobs 2",  # minutes; what it trains:
    'fathom video make runs/mova_demo/both/tokens-1760000-seed-0/model --prompt "a large red wooden block flashes" '
    "-o clip.mp4",
    "fathom curate runs/moon/raw -o runs/moon/corpus --config recipes/curate.yaml",  # all three: minutes
    "fathom train recipes/domain_base_cpu.yaml",
    "fathom compare recipes/domain_cpu.yaml",
    "fathom export runs/mine/vanilla/tokens-500000-seed-0/model -o stock",  # tests/export
    "fathom compare mine.yaml --jobs 4",  # processes on GPUs
    "torchrun --nproc-per-node 8 -m fathom train mine.yaml --method pondering",
    "accelerate launch --config_file fsdp.yaml -m fathom train mine.yaml --method pondering",
    "fathom evaluate runs/mine/pondering-seed0/model --tasks lambada_openai,piqa",  # downloads
    "fathom evaluate MODEL --long niah,vt --lengths 1k,4k --cache treekv --budget 256 --json",  # tests/evaluate
)
SETUP = re.compile(r"make |pip |npm |source |tensorboard |lm_eval |python -m venv |python recipes/|OMP_NUM_THREADS=1 ")


def fences(page: str, language: str) -> list[str]:
    found = re.findall(rf"^( *)```{language}[^\n]*\n(.*?)^\1```", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE)
    return [textwrap.dedent(block) for _, block in found]


def commands(page: str) -> list[str]:
    lines = [line.split(" #")[0].strip() for block in fences(page, "sh") for line in block.splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


COMMANDS = list(dict.fromkeys(command for page in PAGES for command in commands(page)))


@pytest.fixture(scope="module")
def workspace(tmp_path_factory) -> Path:
    """What a reader has: three stock checkpoints, texts, and README's recipe, made small."""
    folder = tmp_path_factory.mktemp("reader")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=300, max_position_embeddings=2048, bos_token_id=0, eos_token_id=0, **sizes)
    for seed, name in enumerate(("my-llama", "my-other", "my-third")):
        torch.manual_seed(seed)
        LlamaForCausalLM(config).save_pretrained(folder / name)
        tiny_tokenizer().save_pretrained(folder / name)
    (folder / "quiz.jsonl").write_text('{"question": "How many fathoms are there under the keel of the made-up ship?"}')
    (folder / "curate.yaml").write_text(fences("docs/curation.md", "yaml")[0])
    for name in ("my-text/train/a.txt", "my-text/held-out.txt", "book.txt", "page.txt", "raw/a.txt"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(TEXT)
    recipe = yaml.safe_load(fences("README.md", "yaml")[0])
    recipe["model"] |= {"hidden_size": 32, "num_hidden_layers": 2}
    recipe["data"] |= {"block_size": 32, "tokenizer": {"bpe": 300}}
    recipe["training"] |= {"tokens": TRAINED, "sequences": 2, "lr": 1e-3}
    recipe["budgets"] = ["tokens"]
    (folder / "mine.yaml").write_text(yaml.safe_dump(recipe))
    return folder


@pytest.fixture
def here(workspace, monkeypatch) -> Path:
    monkeypatch.chdir(workspace)
    return workspace


def parse(arguments: list[str]) -> Any:
    """The context of the verb that a command line names. Raises click's UsageError for what does not exist."""
    command: Any = typer.main.get_command(app)
    context = command.make_context("fathom", list(arguments))
    while hasattr(command, "resolve_command"):
        name, command, rest = command.resolve_command(context, [*context._protected_args, *context.args])
        context = command.make_context(name, rest, parent=context)
    return context


def test_every_command_is_known():
    assert not [c for c in COMMANDS if c not in RUN and c not in PARSED and not SETUP.match(c)]
    assert set(RUN) | set(PARSED) <= set(COMMANDS)  # none has left the pages


def test_what_is_cheap_runs(here, monkeypatch, capsys):
    names = {"MODEL": "my-llama", "OTHER": "my-other", "THIRD": "my-third"}
    for command in RUN:
        words = [names.get(word, word.replace("500000", str(TRAINED))) for word in shlex.split(command)[1:]]
        code, out, err = run_cli(monkeypatch, capsys, *words)
        assert out and code in ((0, 3, 4, 5) if words[:2] == ["lineage", "compare"] else (0,)), (command, out, err)
    for made in ("runs/mine/report.html", "runs/mine/pondering-seed0/model", "matrix.png", "cache.png"):
        assert (here / made).exists()
    # and again from Python, in the guide
    names = {}
    for block in fences("docs/training.md", "python"):
        exec(compile(block, "training.md", "exec"), names)
    assert {run.method for run in names["results"].runs} == {"vanilla", "pondering", "depth_attention"}


@pytest.mark.parametrize("command", PARSED)
def test_what_is_dear_parses(command):
    if command != "fathom --install-completion":
        words = shlex.split(command)
        assert parse(words[words.index("fathom") + 1 :]).command.callback


def test_the_readme_lists_every_extra_with_its_packages():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    rows = re.findall(r"^\| (`[a-z`, ]+) \|.*\| ([^|]+) \|$", (ROOT / "README.md").read_text(), re.MULTILINE)
    listed = {name: packages.split(", ") for names, packages in rows for name in re.findall("[a-z]+", names)}
    for name, needs in extras.items():
        if name in ("test", "check", "docs"):  # one row for the three
            assert name in listed
        else:
            assert set(listed[name]) == {re.split("[>=]", need)[0] for need in needs}, name


@pytest.mark.parametrize("command", [command for command in COMMANDS if SETUP.match(command)])
def test_what_sets_up_names_things_that_exist(command):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for extras in re.findall(r"\[([a-z,]+)\]", command):
        assert set(extras.split(",")) <= set(project["optional-dependencies"])
    if command.startswith("make "):
        assert re.search(rf"^{command.split()[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for path in re.findall(r"\b(?:tests|recipes)/\S+", command):
        assert (ROOT / path).exists()
    if "torch==" in command:
        lowest = next(need for need in project["dependencies"] if need.startswith("torch>="))
        version = re.search(r"torch==([\d.]+)", command)
        assert version and version.group(1).split(".") >= lowest.removeprefix("torch>=").split(".")


def test_the_recipes_are_valid_as_written(tmp_path):
    whole, asked, task = fences("docs/training.md", "yaml")
    written = fences("README.md", "yaml")
    assert written == [whole]
    (tmp_path / "mine.yaml").write_text(whole + asked)
    recipe = load_recipe(tmp_path / "mine.yaml")
    assert recipe.training.tokens == 500_000
    assert recipe.downstream.tasks == ("piqa", yaml.safe_load(task)["task"])
    assert "budgets: [tokens, train_flops]" in written[0]


def test_python_of_the_readme(here, capsys):
    methods, caches, _vision = fences("README.md", "python")  # _vision: tests/vision/test_vision_verbs.py
    tokenizer = AutoTokenizer.from_pretrained("my-llama")
    model = AutoModelForCausalLM.from_pretrained("my-llama")
    names = {"model": model, "inputs": tokenizer("The sea", return_tensors="pt")}
    exec(compile(caches.replace("=200", "=5"), "README.md", "exec"), names)
    assert names["output"].shape[1] == names["inputs"].input_ids.shape[1] + 5
    names = {}
    exec(compile(methods, "README.md", "exec"), names)
    assert capsys.readouterr().out.strip()
    again = AutoModelForCausalLM.from_pretrained("my-pondering-llama")
    assert type(again) is FathomForCausalLM and again.config.depth["name"] == "pondering"


def test_python_of_the_lineage_guide_compiles():
    for block in fences("docs/lineage.md", "python"):  # needs the extra `zk`
        compile(block, "lineage.md", "exec")


def test_the_methods_of_the_contributing_guide(tmp_path, monkeypatch):
    texts = fences("CONTRIBUTING.md", "python")
    blocks = {}
    for section, name in (("depth", "injected"), ("positions", "interpolated")):
        (blocks[name],) = (text for text in texts if f'@register("{section}", "{name}")' in text)
    try:
        for name, block in blocks.items():
            (tmp_path / f"{name}.py").write_text(block)
            spec = importlib.util.spec_from_file_location(name, tmp_path / f"{name}.py")
            module = importlib.util.module_from_spec(spec)
            monkeypatch.setitem(sys.modules, name, module)
            spec.loader.exec_module(module)
        logits = tiny_model()(tokens(2, 7)).logits
        for section, name, option, neutral in (
            ("depth", "injected", "passes", 1),
            ("positions", "interpolated", "factor", 1.0),
        ):
            same, other = (tiny_model(**{section: {"name": name, option: value}}) for value in (neutral, 2 * neutral))
            assert_close(same(tokens(2, 7)).logits, logits)
            assert not torch.allclose(other(tokens(2, 7)).logits, logits)
        config = FathomConfig(**SIZES, depth={"name": "injected", "passes": 2})
        assert forward_flops_per_token(config, 8).matmul > forward_flops_per_token(FathomConfig(**SIZES), 8).matmul
    finally:
        for section, name in (("depth", "injected"), ("positions", "interpolated")):
            registry.filled()[section].pop(name, None)
