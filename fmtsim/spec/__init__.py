# SPDX-License-Identifier: Apache-2.0
"""The records that say what is asked: pure data that verbs and engines both import."""
