"""The report from hand-made results: summary, verdicts, page, and the page in a real browser."""

import html.parser
import json
import math
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from example import METHODS, results, run
from matplotlib.figure import Figure

from fathom.report import page as page_module
from fathom.report import plots
from fathom.report.page import write_report
from fathom.report.results import Difference, Results, Run, tables
from fathom.report.style import MARKER_PATHS, styles
from fathom.report.wording import _small, disturbances, overall, si, verdict
from fathom_cli import cost
from fathom_cli.compare import command as compare_verb

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome", "chrome") if (path := shutil.which(name))), None
)


def test_results_file_round_trip(tmp_path):
    path = tmp_path / "results.json"
    results().save(path)
    assert Results.load(path) == results()
    assert set(json.loads(path.read_text())["runs"][0]) >= {"method", "options", "seed", "bits_per_byte", "commit"}
    assert list(tmp_path.iterdir()) == [path]


def test_results_of_another_shape_are_refused_by_name(tmp_path):
    path = tmp_path / "results.json"
    path.write_text('{"runs": [{"method": "vanilla"}]}')
    with pytest.raises(ValueError, match=r"results\.json: not a results\.json of this version"):
        Results.load(path)


def test_difference_is_paired_over_seeds():
    gains = {"vanilla": (0.0, 0.02, 0.04), "pondering": (-0.1, -0.08, -0.06)}  # seeds move both alike
    (table,) = tables(results([run(m, seed=s, gain=g) for m, gs in gains.items() for s, g in enumerate(gs)]))
    gap = table.rows[1].minus(table.rows[0])
    assert gap.value == pytest.approx(-0.05)
    assert gap.margin == pytest.approx(0.0, abs=1e-9)
    assert gap.clear
    assert table.rows[0].spread("bits_per_byte") > 0


def with_pieces(made, values):
    return replace(made, held_out={"unit": "documents", "values": values, "weights": [10.0] * len(values)})


def test_a_difference_must_be_outside_seeds_texts_and_retraining():
    """Pieces whose differences all have one sign, and such as have both; and a run that was trained again."""
    seeds = range(3)
    even, mixed = [20.0] * 12, [20.0 + (-1) ** n * 3 for n in range(12)]
    for values, clear in ((even, True), (mixed, False)):
        vanilla = [with_pieces(run("vanilla", seed=s), [20.5] * 12) for s in seeds]
        loop = [with_pieces(run("loop", seed=s), values) for s in seeds]
        (table,) = tables(results([*vanilla, *loop]))
        gap = table.rows[1].minus(table.rows[0])
        assert gap.clear == clear and (gap.over_texts[0] <= 0 <= gap.over_texts[1]) != clear
        if clear:
            assert gap.over_texts == pytest.approx((-0.05, -0.05))  # 0.5 bits of 10 bytes
        assert "over documents" in verdict(table).details[0]
        assert ("too little to call" in verdict(table).details[0]) != clear
    other = with_pieces(run("loop"), [*even, 1.0])  # another text: nothing to pair
    assert (
        tables(results([with_pieces(run("vanilla"), even), other]))[0].rows[1].minus(table.rows[0]).over_texts is None
    )

    again = replace(run("vanilla", gain=0.08), again=1)  # 0.04 bits per byte from the first time
    (table,) = tables(results([*(run("vanilla", seed=s) for s in seeds), *(run("loop", seed=s) for s in seeds), again]))
    assert [len(row.runs) for row in table.rows] == [3, 3]  # it is in no mean
    gap = table.rows[1].minus(table.rows[0])
    assert gap.value == pytest.approx(-0.025) and gap.retraining == pytest.approx(0.04) and not gap.clear
    assert "trained again came out up to 0.0400 bits per byte from itself" in verdict(table).details[-1]


@pytest.mark.parametrize("count", [1, 7])
def test_a_handful_of_pieces_gives_no_interval(count):
    """One piece, drawn anew, is always itself: an interval of no width, outside which is everything."""
    pair = [with_pieces(run("vanilla"), [20.5] * count), with_pieces(run("loop"), [20.0] * count)]
    (table,) = tables(results(pair))
    assert table.rows[1].minus(table.rows[0]).over_texts is None
    assert "over documents" not in " ".join(verdict(table).details)


@pytest.mark.parametrize("texts", [None, (math.nan, math.nan), (0.1, 0.2)])
@pytest.mark.parametrize("margin", [None, 0.1])
def test_a_score_that_is_no_number_decides_nothing(texts, margin):
    assert not Difference(math.nan, math.nan, margin, texts).clear


def test_verdict_at_equal_tokens_names_cost_and_unknown_noise():
    (table,) = tables(results())
    said = verdict(table)
    assert said.headline.startswith("At equal tokens, pondering is best: 2.005 bits per byte, 2.2 % below vanilla")
    assert "2.4× its training FLOPs" in said.headline
    assert any(text.startswith("One seed: the seed noise is unknown") for text in said.details)
    assert "needs the budgets train_flops and inference_flops" in overall([table], reference=3.0).details[-1]


def test_the_baselines_compute_is_read_off_all_dearer_curves_in_one_sentence():
    """The example's losses are 3.6 + gain + 3.2 e^(−step/40): vanilla's 300 steps of compute are 150 of loop, 125 of
    pondering. A cost that differs by seed is told by its mean."""
    (table,) = tables(results())
    [hint] = [text for text in verdict(table).details if "whole training compute" in text]
    found = {name: float(loss) for name, loss in re.findall(r"(loop|pondering) (\d\.\d\d)", hint)}
    expected = {"loop": 3.55 + 3.2 * math.exp(-150 / 40), "pondering": 3.51 + 3.2 * math.exp(-125 / 40)}
    assert found == pytest.approx(expected, abs=0.06)  # the example's ripple
    assert "vanilla ended at 3.60" in hint
    dearer = replace(run("loop", seed=1), answer_flops=3 * run("loop").answer_flops)
    (table,) = tables(results([run("vanilla"), run("vanilla", seed=1), run("loop"), dearer]))
    assert any("4× the FLOPs" in text for text in verdict(table).details)


def test_small_differences_of_one_seed_are_not_called():
    (table,) = tables(results([run("vanilla"), run("loop", gain=-0.01)]))
    assert "cannot be told from vanilla" in verdict(table).headline


@pytest.mark.parametrize(
    ("margin", "over_texts", "said"),
    [(None, (-0.02, -0.01), True), (None, (-0.02, 0.01), False), (None, None, False), (0.1, (-0.02, -0.01), False)],
)
def test_an_interval_that_leaves_out_zero_is_not_left_unexplained(margin, over_texts, said):
    """A headline that gives such an interval and calls nothing says that one seed is the reason."""
    why = _small(Difference(-0.015, -0.5, margin, over_texts))
    assert why == (" (below 1 % with one seed, which is not called)" if said else "")


@pytest.mark.parametrize(("gains", "bold"), [((0.0, -0.01), None), ((0.0, -0.1), "loop"), ((0.0, 0.1), "vanilla")])
def test_only_a_method_that_can_be_told_from_all_others_is_bold(tmp_path, gains, bold):
    page = write_report(results([run("vanilla", gain=gains[0]), run("loop", gain=gains[1])]), tmp_path).read_text()
    marked = re.findall(r'<tr data-method="(\w+)" class="best">', page)
    assert marked == ([] if bold is None else [bold])


def test_a_method_near_the_best_is_named_in_the_headline():
    (table,) = tables(results([run("vanilla"), run("loop", gain=-0.2), run("pondering", gain=-0.21)]))
    assert "pondering is best: " in verdict(table).headline
    assert verdict(table).headline.endswith("FLOPs; loop cannot be told from it.")
    assert not table.best_is_clear


def test_the_front_has_only_what_is_told_apart_and_bars_are_of_the_difference():
    """Loop's gain has both signs over texts: it is below vanilla and not on the front, and its bar reaches vanilla."""
    gains = {"vanilla": [20.5] * 12, "loop": [20.4 + (-1) ** n * 2 for n in range(12)], "pondering": [19.5] * 12}
    again = replace(run("vanilla", gain=0.01), again=1)  # 0.005 bits per byte from the first time
    runs = [with_pieces(run(m, gain=(sum(v) / 12 - 20.5) / 5), v) for m, v in gains.items()]
    (table,) = tables(results([*runs, again]))
    vanilla, loop, pondering = table.rows
    assert plots.front(table) == [vanilla, pondering] and loop.result < vanilla.result
    ((below,), (above,)) = plots.error_bar(loop, vanilla)
    low, high = loop.minus(vanilla).over_texts
    assert (below, above) == pytest.approx((-0.01 - low, high + 0.01)) and loop.result + above > vanilla.result
    assert plots.error_bar(pondering, vanilla)[1] == pytest.approx([0.0205])  # one seed: 1 % of vanilla's 2.05
    assert plots.error_bar(vanilla, vanilla) == [pytest.approx([0.005])] * 2
    seeds = [replace(run(m, seed=s), held_out={}) for m in ("vanilla", "loop") for s in range(3)]
    (table,) = tables(results([*seeds, again]))  # three seeds that agree: of retraining
    assert plots.error_bar(table.rows[1], table.rows[0]) == [pytest.approx([0.005])] * 2


@pytest.mark.parametrize("seeds", [1, 3])
def test_the_quality_axis_does_not_zoom_into_noise(tmp_path, monkeypatch, seeds):
    def share_of_axis(gain):
        """The gap between two methods, as a share of the axis."""
        gains = [("vanilla", seed, 0.0) for seed in range(seeds)]
        gains += [("loop", seed, gain + 0.002 * seed) for seed in range(seeds)]
        (table,) = tables(results([run(m, seed=seed, gain=g) for m, seed, g in gains]))
        shown = []

        def keep(plot, theme, path):
            axes = Figure().add_subplot()
            plot(axes, theme)
            shown.append(axes)
            return path

        monkeypatch.setattr(plots, "_write", keep)
        plots.draw(table, styles(["vanilla", "loop"]), 4.6, tmp_path)
        axes = next(axes for axes in shown if axes.get_ylabel() == "held-out bits per byte")
        vanilla, loop = table.rows
        low, high = axes.get_ylim()
        gap = loop.mean("bits_per_byte") - vanilla.mean("bits_per_byte")
        return loop.minus(vanilla).clear, abs(gap) / (high - low)

    clear, share = share_of_axis(-0.003)
    assert not clear and share < 1 / 8
    clear, share = share_of_axis(-0.5)
    assert clear and share > 0.5


@pytest.mark.parametrize(
    "names",
    [
        ["vanilla", "loop"],
        [f"depth_attention-first-onl{i}" for i in "0123456789a"],
        ["depth_attention-and-a-long-option"],
    ],
)
def test_names_of_a_plot_stand_inside_it_and_cover_no_curve(tmp_path, monkeypatch, names):
    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda self, path, **_: (figures.append(self), path.touch()))
    runs = [replace(run("vanilla"), method=name) for name in names]
    plots.draw(tables(results(runs))[0], styles(names), 4.6, tmp_path)
    assert len(figures) == 6  # three plots, light and dark
    for figure in figures:
        figure.draw_without_rendering()
        (legend,), (axes,) = figure.legends, figure.axes
        box = legend.get_window_extent()
        assert [text.get_text() for text in legend.get_texts()] == names
        assert box.y1 <= axes.get_tightbbox().y0
        assert box.x0 >= 0 and box.x1 <= figure.bbox.x1 and box.y0 >= 0
        assert axes.bbox.height > 0.4 * axes.bbox.width


def test_28_methods_look_different_in_every_picture():
    looks = list(styles([str(i) for i in range(28)]).values())
    for theme in ("light", "dark"):
        assert len({(getattr(look, theme), look.line) for look in looks}) == 28  # curves
        assert len({(getattr(look, theme), look.path) for look in looks}) == 28  # points, and marks in the page
    assert {look.marker for look in looks} == set(MARKER_PATHS)


def speed_and_memory(**changes):
    """The small print under tokens/s and peak memory of vanilla and of loop, whose runs are changed so."""
    (table,) = tables(results([run("vanilla"), replace(run("loop"), **changes)]))
    columns = {column.name: column.cell for column in page_module.COLUMNS}
    return [
        [(cell.text, *cell.note.splitlines()) for cell in (columns[name](row, table) for row in table.rows)]
        for name in ("tokens_per_second", "peak_memory_bytes")
    ]


def test_a_ratio_of_speeds_has_the_interval_of_both():
    """The example's stretches lie between 20/21 and 22/21 of the median: ratios between 20/22 and 22/20 of one half."""
    speed, memory = speed_and_memory()
    assert speed == [("21.0 k", "20.0 k to 22.0 k"), ("10.5 k", "10.0 k to 11.0 k", "0.5× (0.455 to 0.55)")]
    assert memory == [("not measured",), ("not measured",)]  # a CPU's is not the model's own, whatever the file says


@pytest.mark.parametrize(
    ("change", "note"),
    [
        ({"device": "8 CPU cores (x86_64)"}, "device differs"),
        ({"device": "2 CPU cores (x86_64), shared by 2 runs"}, "shared device"),
        ({"interruptions": 2}, "interrupted"),
        ({"busy": 0.6}, "disturbed"),
        ({"tokens_per_second_interval": None}, None),
    ],
)
def test_speeds_of_runs_that_were_not_alike_are_not_compared(change, note):
    speed, _ = speed_and_memory(**change)
    spread = "spread unknown" if "tokens_per_second_interval" in change else "10.0 k to 11.0 k"
    assert speed[1] == ("10.5 k", spread, *([note] if note else []))
    # and none of the others against a baseline that was disturbed
    runs = [replace(run("vanilla"), **change), run("loop")]
    (table,) = tables(results(runs))
    assert "×" not in page_module._speed(table.rows[1], table).note


def test_memory_of_a_gpu_has_its_range_over_seeds():
    gpu = {"device": "a GPU"}
    runs = [
        replace(run(m, seed=s), **gpu, peak_memory_bytes=b + s)
        for m, b in (("vanilla", 100), ("loop", 200))
        for s in (0, 10)
    ]
    (table,) = tables(results(runs))
    assert page_module._memory(table.rows[1], table).note == "200 B to 210 B\n1.95× (1.82 to 2.1)"
    (table,) = tables(results(runs[::2]))
    assert page_module._memory(table.rows[1], table).note == ""  # one seed: no interval, no ratio


def test_interrupted_and_disturbed_runs_are_named(tmp_path):
    runs = [run("vanilla"), replace(run("loop"), interruptions=2, busy=0.6)]
    assert disturbances(runs) == [
        "loop/tokens-seed-0: interrupted 2 times and resumed from a checkpoint; disturbed: it had a core for 60 % of "
        "the time; for the rest, other programs had the cores or data came late."
    ]
    page = write_report(results(runs), tmp_path).read_text()
    assert "Not every run was left alone" in page and "interrupted 2 times" in page
    assert "interrupted, disturbed</td></tr>" in page
    assert "Not every run was left alone" not in write_report(results(), tmp_path).read_text()


@pytest.mark.parametrize("name", ["adaptive_h200", "depth_attention_small_h200", "latent_thoughts_h200"])
def test_results_of_earlier_versions_are_read_and_their_speeds_not_compared(name):
    path = Path(__file__).parents[2] / "docs" / "results" / f"{name}.json"
    for table in tables(Results.load(path)):
        for row in table.rows:
            assert row.memory > 0 and "×" not in page_module._speed(row, table).note


def test_seed_noise_is_said_where_only_some_methods_have_seeds():
    runs = [run(m, seed=seed) for m in ("vanilla", "loop") for seed in range(3)] + [run("pondering")]
    (table,) = tables(results(runs))
    assert table.seeds == [1, 3]
    assert "3 seeds, paired" in verdict(table).details[-1]
    assert "One seed in the rows without ±: the seed noise is unknown" in verdict(table).details[-1]


def bounded(bound: float, exact: float) -> list[Run]:
    """An exact baseline, and a method of which a bound is known."""
    made = [run("vanilla"), run("loop")]
    scores = ({"bits_per_byte": exact}, {"bits_per_byte": bound})
    kinds = ({"exact": True}, {"exact": False, "error": 0.0123})
    return [replace(r, scores=s, **k) for r, s, k in zip(made, scores, kinds, strict=True)]


def test_a_bound_above_an_exact_value_is_never_called_worse(tmp_path):
    found = results(bounded(2.4, 2.0))
    (table,) = tables(found)
    gap = table.rows[1].minus(table.rows[0])
    assert gap.undecided and not gap.clear and table.rows[0].minus(table.rows[1]).undecided
    said = verdict(table)
    assert "vanilla has 2.000 bits per byte (exact); the upper bound of loop is 20.0 % above" in said.headline
    assert any("it does not say which is better" in detail for detail in said.details)
    page = write_report(found, tmp_path).read_text()
    assert "upper bound, standard error 0.0123" in page and "a bound above an exact value" in page
    assert not any(word in page for word in ("worse", "nothing beats"))


def test_a_bound_below_an_exact_value_is_better():
    (table,) = tables(results(bounded(1.9, 2.0)))
    assert table.rows[1].minus(table.rows[0]).clear and "loop is best: 1.900" in verdict(table).headline


def test_a_negative_result_is_the_headline_at_equal_training_flops():
    runs = [run(m, "train_flops", seed, gain=g) for m, g in (("vanilla", 0.0), ("loop", 0.1)) for seed in range(3)]
    found = tables(results([*results().runs, *runs]))
    said = overall(found, reference=3.0)
    assert said.headline.startswith("At equal training FLOPs, nothing beats vanilla")
    assert "loop is 2.4 % above" in said.headline  # 0.05 bits more than 2.052, relative to vanilla
    assert said.details[0].startswith("At equal tokens, pondering is best")


def test_methods_that_all_lose_to_the_unigram_model_are_not_compared():
    said = overall(tables(results()), reference=1.5)
    assert said.headline == "No method beats the unigram model (1.500 bits per byte): this comparison says nothing yet."


def test_si_prefixes():
    assert [si(x) for x in (0, 7, 999, 4096, 1.3e6, 4.12e13, 0.5)] == [
        "0",
        "7",
        "999",
        "4.10 k",
        "1.30 M",
        "41.2 T",
        "0.500",
    ]


class Links(html.parser.HTMLParser):
    """Every address a page could fetch."""

    def __init__(self, text):
        super().__init__()
        self.found = re.findall(r"url\(\s*['\"]?([^'\")]+)|@import\s+([^;]+)", text)
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.found += [v for k, v in attributes if k in ("src", "href", "srcset", "action", "data", "poster") and v]


def test_page_is_self_contained(tmp_path):
    page = write_report(results(), tmp_path).read_text()
    links = Links(page).found
    assert len(links) >= 7  # three plots, each light and dark, and the icon
    assert all(link.startswith("data:") for link in links), [link[:80] for link in links]
    assert "http://" not in page and "https://" not in page


def test_page_holds_everything_and_escapes_text(tmp_path):
    one = results()
    page = write_report(one, tmp_path).read_text()
    assert "&lt;b&gt;looked&lt;/b&gt;" in page and "<b>looked" not in page
    assert "# &lt;not a tag&gt;" in page  # the recipe
    for words in ("un-annealed", "4.610", "unigram", "2.13.0+cpu", one.command, "One seed"):
        assert words in page
    plots = {path.name for path in (tmp_path / "plots").iterdir()}
    assert {"tokens_loss_tokens.png", "tokens_loss_flops.png", "tokens_pareto.png"} <= plots
    assert not list(tmp_path.rglob("*.partial"))


def test_failed_runs_are_on_the_page(tmp_path):
    page = write_report(replace(results(), failures=["loop, seed 1: out of memory"]), tmp_path).read_text()
    assert "Not everything ran" in page and "loop, seed 1: out of memory" in page


def test_a_best_rate_at_the_edge_of_the_sweep_is_said(tmp_path):
    one = results()
    assert one.edges == ["loop"]
    assert "best learning rate of loop is at the edge" in write_report(one, tmp_path).read_text()
    wider = replace(one, trials=[*one.trials, replace(one.trials[0], lr=0.008)])
    assert wider.edges == []


def test_the_terminal_warns_as_the_page_does(monkeypatch, capsys):
    one = replace(results(), runs=[run("vanilla"), replace(run("loop"), interruptions=1)])
    monkeypatch.setattr("fathom.report.compare.compare", lambda *arguments, **options: one)
    compare_verb(Path("recipe.yaml"))
    out = capsys.readouterr().out
    assert "The best learning rate of loop is at the edge of its candidates. A better one may lie outside.\n" in out
    assert "loop/tokens-seed-0: interrupted once and resumed from a checkpoint.\n" in out


def test_parameters_are_those_of_fathom_cost():
    heading = {column.name: column.heading for column in page_module.COLUMNS}
    assert heading["params"] == cost.COLUMNS["parameters"] == "parameters"
    assert heading["non_embedding_params"] == cost.COLUMNS["non_embedding_parameters"]


def test_results_without_runs_are_refused(tmp_path):
    with pytest.raises(ValueError, match="no finished run"):
        write_report(results([]), tmp_path)


def dump_dom(page, tmp_path, *options):
    """The page's HTML after its scripts have run in headless Chromium."""
    flags = [
        "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking",
        "--disable-component-update --disable-sync --disable-dev-shm-usage",
    ]
    command = [CHROMIUM, *" ".join(flags).split(), f"--user-data-dir={tmp_path / 'profile'}", *options]
    done = subprocess.run([*command, "--dump-dom", page.as_uri()], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def requests_of_page(log):
    """Addresses that a page asked the network for; what the browser asks for itself has no origin."""
    lines = [line for line in log.read_text().splitlines() if '"initiator":"' in line]
    return [re.findall(r'"url":"([^"]*)"', line)[0] for line in lines if '"initiator":"not an origin"' not in line]


def order(dom):
    table = dom[dom.index('id="table-tokens"') : dom.index("</table>")]
    return re.findall(r'<tr data-method="(\w+)"', table)


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium or chrome on PATH")
def test_browser_shows_and_sorts_the_table_and_fetches_nothing(tmp_path):
    page = write_report(results(), tmp_path)
    log = tmp_path / "net.json"
    assert order(dump_dom(page, tmp_path, f"--log-net-log={log}")) == list(METHODS)
    assert requests_of_page(log) == []

    clicks = {"bits_per_byte": 1, "tokens_per_second": 2}  # ascending; descending
    expected = {
        "bits_per_byte": ["pondering", "loop", "vanilla"],
        "tokens_per_second": ["vanilla", "loop", "pondering"],
    }
    for column, times in clicks.items():
        click = f"document.querySelector('#table-tokens [data-name={column}] button').click();" * times
        clicked = tmp_path / f"{column}.html"
        clicked.write_text(page.read_text().replace("</body>", f"<script>{click}</script></body>"))
        assert order(dump_dom(clicked, tmp_path)) == expected[column]


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium or chrome on PATH")
def test_the_network_log_would_show_a_fetch(tmp_path):
    page, log = tmp_path / "page.html", tmp_path / "net.json"
    page.write_text('<img src="http://127.0.0.1:9/picture.png">')
    dump_dom(page, tmp_path, f"--log-net-log={log}")
    assert requests_of_page(log) == ["http://127.0.0.1:9/picture.png"]


def test_a_bare_copy_of_the_source_knows_its_commit(tmp_path, monkeypatch):
    from fathom.report import provenance

    package = tmp_path / "src" / "fathom"
    package.mkdir(parents=True)
    monkeypatch.setattr(provenance.fathom, "__file__", str(package / "__init__.py"))
    monkeypatch.delenv("FATHOM_COMMIT", raising=False)
    assert provenance.commit() == "not a checkout"
    for content, said in (("$Format:%H$\n", "not a checkout"), ("0123456789abcdef0123\n", "0123456789ab")):
        (tmp_path / "COMMIT").write_text(content)  # as it lies in a checkout, and as `git archive` fills it in
        assert provenance.commit() == said
    monkeypatch.setenv("FATHOM_COMMIT", "abcdef1")
    assert provenance.commit() == "abcdef1"
