# SPDX-License-Identifier: Apache-2.0
"""The one record of scale rules, among the records that say what is asked (it lies below: block formats have one)."""

from fmtsim.formats.scaling import Arithmetic, History, PowerOfTwo, Scaling, Statistic, TensorScale

__all__ = ["Arithmetic", "History", "PowerOfTwo", "Scaling", "Statistic", "TensorScale"]
