# SPDX-License-Identifier: Apache-2.0
"""The main job: train a small language model in a baseline precision and under simulated precision, side by side."""
