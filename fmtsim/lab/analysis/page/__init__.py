# SPDX-License-Identifier: Apache-2.0
"""One report in the browser: a self-contained HTML file with curves, heatmaps, histograms and what they are of."""

from fmtsim.lab.analysis.page.page import write_page

__all__ = ["write_page"]
