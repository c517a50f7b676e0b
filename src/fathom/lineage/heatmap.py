"""The matrix of many models as a picture: a tree beside a heat map in the tree's order."""

from pathlib import Path

from matplotlib.figure import Figure
from scipy.cluster.hierarchy import dendrogram

from fathom.lineage.pairs import Matrix
from fathom.writing import whole


def save_matrix(result: Matrix, path: Path) -> None:
    """Write a PNG: average-linkage tree on 1 − score, scores printed in the cells."""
    n = len(result.names)
    short = [Path(name).name or name for name in result.names]
    side = 0.55 * n + 1.5
    figure = Figure(figsize=(side + 4.5, side), layout="constrained")
    left, right = figure.subplots(1, 2, gridspec_kw={"width_ratios": [1.2, side / 2.2]})
    drawn = dendrogram(
        result.tree, orientation="left", ax=left, no_labels=True, color_threshold=0, above_threshold_color="0.3"
    )
    left.set_xlabel("1 − score")
    left.spines[["top", "left", "right"]].set_visible(False)
    order = drawn["leaves"][::-1]  # the tree draws from the bottom
    grid = result.scores[order][:, order]
    right.imshow(grid, vmin=0, vmax=1, cmap="Blues", aspect="auto")
    right.set_xticks(range(n), [short[i] for i in order], rotation=40, ha="right")
    right.set_yticks(range(n), [short[i] for i in order])
    right.yaxis.tick_right()
    for i in range(n):
        for j in range(n):
            colour = "white" if grid[i, j] > 0.6 else "black"
            right.text(j, i, f"{grid[i, j]:.2f}", ha="center", va="center", color=colour, fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole(path) as partial:
        figure.savefig(partial, dpi=120, format="png")
