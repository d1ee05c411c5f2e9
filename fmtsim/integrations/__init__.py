# SPDX-License-Identifier: Apache-2.0
"""Callbacks for the trainers that people use; each needs its package, which nothing else imports."""
