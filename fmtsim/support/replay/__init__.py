# SPDX-License-Identifier: Apache-2.0
"""What a function asks of a GPU, written down in one call and asked for again in those that follow.

A pass over a layer is a dozen launches, and a hundred calls of Python functions that decide on them, which take the
host longer than the GPU. What they decide follows from dtypes, shapes and strides. So the second call of a kind is
written down as lines of Python: the memory that it takes, torch's operations, launches; later calls run these alone.
Keys of random words are drawn again, in the same order. What looks at numbers, at memory of the host, or at anything
else that may differ the next time is not written down, and always runs as it is.
"""
