# SPDX-License-Identifier: Apache-2.0
"""The verbs quantize, encode and decode: arguments, layouts, gradient, dispatch to an engine."""
