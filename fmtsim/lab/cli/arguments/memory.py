# SPDX-License-Identifier: Apache-2.0
"""The arguments of ``fmtsim memory``."""

import argparse

from fmtsim.lab.cli import names
from fmtsim.lab.cli.options import add_json, count, flag, option


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments; those that are left out are the defaults of ``training_memory``."""
    model = parser.add_argument_group("the model (one of the two)")
    option(model, "--model", "gpt2, llama-8b, ..., or the config.json of a Hugging Face model", metavar="NAME",
           known=names.models)  # fmt: skip
    option(model, "--params", "a number of parameters, such as 7e9: no activations, no cache")
    weights = parser.add_argument_group("weights and optimizer")
    option(weights, "--recipe", "a recipe of fmtsim train --recipe list, or a file", metavar="NAME",
           known=names.recipes)  # fmt: skip
    option(weights, "--level", "of a recipe that has levels, such as O1, O2 or O3 of fp8lm", metavar="NAME")
    option(weights, "--optimizer", "adamw, lion, ..., AdamW's states as in bnb8, coat, ..., or both: lion:bnb8",
           metavar="NAME", known=names.optimizers_and_states)  # fmt: skip
    option(weights, "--weights", "format of the weights (default: bf16, or what the recipe needs)", metavar="FORMAT",
           known=names.formats)  # fmt: skip
    option(weights, "--master", "format of the master weights, or none (default: fp32 beside narrower weights)",
           metavar="FORMAT", known=names.formats)  # fmt: skip
    option(weights, "--gradients", "format of the gradients (default: the recipe's, fp32 beside fp32 weights, or bf16)",
           metavar="FORMAT", known=names.formats)  # fmt: skip
    count(weights, "--lora", "rank of LoRA adapters; only these are trained")
    option(weights, "--lora-layers", "a regular expression: layers with adapters", metavar="PATTERN")
    kept = parser.add_argument_group("what is saved for the backward pass")
    count(kept, "--tokens", "tokens per sequence; without it, activations are not counted")
    count(kept, "--batch", "sequences on each device (default 1)")
    option(kept, "--activations", "format of activations that are not quantised (default bf16)", metavar="FORMAT",
           known=names.formats)  # fmt: skip
    option(kept, "--loss-format", "format in which the loss is computed from the logits (default fp32)",
           metavar="FORMAT", known=names.formats)  # fmt: skip
    option(kept, "--checkpointing", "what is recomputed in the backward pass", choices=("none", "selective", "full"))
    option(
        kept, "--attention", "whether scores are saved (eager) or not (flash, the default)", choices=("flash", "eager")
    )
    flag(kept, "--dropout", "count dropout masks")
    flag(kept, "--quantize-early", "layers save codes that the forward pass made for the backward product")
    _add_devices(parser.add_argument_group("devices"))
    _add_serving(parser.add_argument_group("serving instead of training (with --weights and --devices)"))
    flag(parser, "--formulas", "show the formula of each line, and the tensors that a block saves")
    add_json(parser)


def _add_devices(devices: argparse._ArgumentGroup) -> None:
    count(devices, "--devices", "number of devices (default 1)")
    count(devices, "--zero", "ZeRO stage: 1 shards states, 2 gradients too, 3 weights too, as FSDP does (default 0)")
    count(devices, "--tensor-parallel", "devices over which each layer is sharded")
    flag(devices, "--sequence-parallel", "shard activations between layers, too")


def _add_serving(served: argparse._ArgumentGroup) -> None:
    flag(served, "--serve", "count weights and the KV cache")
    count(served, "--context", "cached tokens per request")
    count(served, "--requests", "concurrent requests (default 1)")
    option(served, "--kv-format", "format of the cache (default bf16)", metavar="FORMAT", known=names.formats)
