# SPDX-License-Identifier: Apache-2.0
"""Draw the README's picture, light and dark: ``python docs/site/picture.py`` (two minutes on two cores).

A small GPT trains in float32 while ``fmtsim.observe`` counts, in every second of 100 steps, how many elements of the
gradients that enter each layer's backward products would become zero in E5M2 without a scale, and in E4M3 with one
scale for each tensor.
"""

from pathlib import Path

import matplotlib.pyplot as plt
import torch

import fmtsim
from fmtsim.lab.training.corpus import load_corpus, sample
from fmtsim.lab.training.decoders import GPT, GPTConfig

STEPS, EVERY = 100, 2
DARK = "#0d1117"  # the background of dark pages on GitHub
CASTS = {
    "E5M2 without a scale": fmtsim.linear_config(x="e5m2", w="e5m2", g="e5m2", scaling="none"),
    "E4M3, one scale for each tensor": fmtsim.linear_config(x="e4m3", w="e4m3", g="e4m3", scaling="tensor"),
}


def underflow(recipe: fmtsim.LinearConfig) -> tuple[list[str], list[int], list[list[float]]]:
    """Return layers, observed steps and the share of each layer's gradients that becomes zero, in percent."""
    corpus, batches = load_corpus(None, 64), torch.Generator().manual_seed(0)
    model = GPT(GPTConfig(context=64, width=64, layers=4, heads=4), seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    with fmtsim.observe(model, recipe=recipe, every=EVERY) as seen:
        for _ in range(STEPS):
            model(*sample(corpus.train, 16, 64, batches)).backward()
            optimizer.step()
            optimizer.zero_grad()
    layers = [name for name, operands in seen.layers.items() if "g_d" in operands]
    steps = list(seen.history)
    return layers, steps, [[seen.history[step][layer]["g_d"].underflow_percent for step in steps] for layer in layers]


def draw(shares: dict[str, tuple[list[str], list[int], list[list[float]]]], path: Path) -> None:
    """Draw both heatmaps on one scale into a file."""
    figure, panels = plt.subplots(1, 2, figsize=(10, 3.8), sharey=True, layout="constrained")
    for panel, (title, (layers, steps, percent)) in zip(panels, shares.items(), strict=True):
        edges = [*steps, steps[-1] + EVERY], list(range(len(layers) + 1))
        image = panel.pcolormesh(*edges, percent, cmap="viridis", vmin=0, vmax=100)
        panel.set(title=title, xlabel="training step")
        panel.set_yticks([row + 0.5 for row in range(len(layers))], layers, fontsize=8)
        panel.spines[:].set_visible(False)
    panels[0].invert_yaxis()
    figure.colorbar(image, ax=panels, label="gradients that become zero, %", pad=0.02)
    figure.savefig(path, dpi=110)


def main() -> None:
    """Draw the picture into docs/assets, for light and for dark pages."""
    shares = {title: underflow(recipe) for title, recipe in CASTS.items()}
    assets = Path(__file__).parents[1] / "assets"
    draw(shares, assets / "underflow.png")
    with plt.style.context("dark_background"), plt.rc_context({"figure.facecolor": DARK, "savefig.facecolor": DARK}):
        draw(shares, assets / "underflow_dark.png")


if __name__ == "__main__":
    main()
