# SPDX-License-Identifier: Apache-2.0
"""What several test files share; oracles here use nothing of what they check."""
