# SPDX-License-Identifier: Apache-2.0
"""Arguments of the commands about models and their training."""

import argparse
import sys
from typing import Any

from fmtsim.formats.scaling import SCALINGS
from fmtsim.lab.cli import names
from fmtsim.lab.cli.options import (
    EXECUTOR,
    add_device,
    add_formats,
    add_json,
    add_model,
    add_quiet,
    add_simulate,
    add_target,
    count,
    flag,
    one_of,
    option,
    repeated,
)
from fmtsim.support.errors import ArgumentError, shown

_IGNORE = "leave this layer, or what 're:PATTERN' matches, in high precision (default: the head of a language model)"


def declare_observe(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    add_formats(parser.add_argument_group("the formats to cast the operands to (the model itself is unchanged)"))
    option(parser, "--steps", "batches, each run forward and backward", 8)
    option(parser, "--every", "observe the first of every N steps", 1)
    option(parser, "--lr", "also train with AdamW at this learning rate (default: weights do not change)", type=float)
    result = parser.add_argument_group("result")
    option(result, "--worst", "show this many operands, those that lose most", 10)
    option(result, "--by", "the measure of loss", "underflow", choices=("underflow", "saturation", "sqnr"))
    option(result, "--report", "write an HTML report (.html)", metavar="FILE")
    add_quiet(result)
    add_json(result)


def declare_attribute(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    add_formats(parser.add_argument_group("the formats to which the model's operands are rounded"))
    flag(parser, "--exact", "round operands one at a time, a pass for each, instead of an estimate from 8 passes")
    result = parser.add_argument_group("result")
    option(result, "--by", "the cost by which layers are named", "loss", choices=("loss", "kl", "gradient"))
    option(result, "--share", "name the most costly layers, which together have this share of the cost", 0.5)
    option(result, "--out", "write rules that leave these layers in high precision (.json)", metavar="FILE")
    option(result, "--report", "write an HTML report (.html)", metavar="FILE")
    add_quiet(result)
    add_json(result)


def declare_mismatch(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    sides = parser.add_argument_group("the two engines; --model may be a name such as llama-8b as well")
    for side in ("trainer", "rollout"):
        option(sides, f"--{side}", "a GPU with its library, such as h200, or a plan file", metavar="NAME",
               names=names.targets, required=True)  # fmt: skip
    option(sides, "--trainer-tokens", "rows of the trainer's products: batch times length", 8192)
    option(sides, "--prefill", "rows of the rollout's products in prefill: tokens of the prompts", 512)
    option(sides, "--decode", "rows in decode, a list (1,64) or a range (1..256)", "1..256", "LIST")
    flag(sides, "--measure", "emulate both on the first batch: log-probabilities of the full vocabulary")
    add_json(parser)


def declare_ptq(parser: argparse.ArgumentParser) -> None:
    scheme = "a scheme of post-training quantisation, such as int8_static, or a JSON file; 'list' prints all names"
    option(parser, "--scheme", scheme, names=names.schemes, required=True)
    add_model(parser, required=False)
    option(parser, "--batches", "batches for calibration, and as many others to measure the loss", 8)
    repeated(parser, "--ignore", _IGNORE, "NAME")
    rules = "exceptions for layers, ahead of the scheme's: JSON, as attribute --out and search --out write it"
    option(parser, "--rules", rules, names=names.rules)
    add_target(parser.add_argument_group("simulated arithmetic (default: float32 in no particular order)"))
    result = parser.add_argument_group("result")
    option(result, "--out", "folder for the quantised model (model.pt), its scheme and report", metavar="DIR")
    layouts = ("compressed-tensors", "torchao", "gguf")
    option(result, "--export", "also write it to --out for another library", choices=layouts)
    add_quiet(result)
    add_json(result)


def check_ptq(arguments: argparse.Namespace) -> None:
    """Refuse a scheme without a model."""
    if arguments.scheme != "list" and arguments.model is None:
        raise ArgumentError("--model is missing; fmtsim ptq --help shows what is allowed")


def declare_search(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    option(parser, "--batches", "batches for calibration and measurement", 8)
    what = parser.add_argument_group("formats and budget (--bits or --budget)")
    option(what, "--bits", "the bit operations of this many bits in both operands of every layer", type=float)
    option(what, "--budget", "bit operations of a batch", type=float)
    schemes = "schemes of fmtsim ptq to choose from, JSON files too (default w4a4,minifloat_e3m2,e4m3_static)"
    option(what, "--schemes", schemes, metavar="LIST", names=names.schemes)
    repeated(what, "--ignore", _IGNORE, "NAME")
    count(what, "--samples", "also try this many assignments, sampled from a policy that is trained on their results")
    sensitivity = "estimate what layers lose by fmtsim attribute, on the first batch and the model's own loss"
    flag(what, "--sensitivity", sensitivity)
    option(what, "--executor", EXECUTOR, metavar="URL")
    train = parser.add_argument_group("search while training (instead of the search of a trained model)")
    steps = "train the model for this many steps on its batches (--batches) in turn, and search in the same steps"
    count(train, "--while-training", steps)
    option(train, "--lr", "learning rate, of AdamW", 1e-3)
    weights = "write the trained weights (.pt), for --checkpoint"
    option(train, "--weights", weights, metavar="FILE")
    add_target(parser.add_argument_group("simulated arithmetic (default: float32 in no particular order)"))
    result = parser.add_argument_group("result")
    out = "write the chosen formats (.json), for ptq --scheme, --rules and convert(rules=)"
    option(result, "--out", out, metavar="FILE")
    option(result, "--plot", "draw losses and costs (.png)", metavar="FILE")
    add_quiet(result)
    add_json(result)


TRAIN_SIZES = {
    "steps": "optimizer steps of each run", "batch_size": "windows of text per step",
    "context": "bytes the model sees at once", "width": "width of the hidden state", "layers": "transformer blocks",
    "heads": "attention heads per block",
}  # fmt: skip
EVERY = 100
SHARE_LAYERS = 6  # where a recipe leaves a share of the blocks in high precision
TRAIN_DEFAULTS: dict[str, Any] = {
    "steps": 600, "batch_size": 16, "context": 64, "width": 128, "layers": 2, "heads": 4, "lr": 4e-3,
}  # fmt: skip


def declare_train(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("what is simulated")
    recipe = (
        "a published scheme, such as te_nvfp4, or a JSON file, instead of formats, rounding and scaling; 'list' prints "
        "all names, and --target recipe is the GPU that it was designed for"
    )
    option(group, "--recipe", recipe, names=names.recipes)
    option(group, "--format", "format of activations and weights (default e4m3)", names=names.formats)
    gradients = "of gradients; by default e5m2 beside element formats of 8 bits and fewer, else as --format"
    option(group, "--grad-format", gradients, names=names.formats)
    option(group, "--rounding", "of activations and weights (default nearest_even)", names=names.roundings)
    option(group, "--grad-rounding", "of gradients, such as stochastic (default nearest_even)", names=names.roundings)
    rules = "exceptions for layers, ahead of the recipe's: JSON, as attribute --out, search --out and train write it"
    option(group, "--rules", rules, names=names.rules)
    option(group, "--baseline", "fp32 (nothing quantised), bf16, fp16 or any format", "fp32", "NAME", names.formats)
    scaling = (
        "what shares a scale; by default tensor for element formats of 8 bits and fewer, none for wider ones; "
        "block formats have blocks of their own"
    )
    option(group, "--scaling", scaling, choices=SCALINGS)
    group = parser.add_argument_group("simulated arithmetic (default: float32 in no particular order)")
    add_target(group)
    dtype = "dtype of operations other than linear layers, under torch.autocast (default: the recipe's, else none)"
    option(group, "--autocast", dtype, choices=("bfloat16", "float16"))
    fast = "use_fast_accum=True for a target's forward products; gradients promote their accumulators"
    flag(group, "--fast-accum", fast)
    flag(group, "--fast-backward", "use_fast_accum=True for gradients as well")
    check = (
        "native: instead of the comparison with a baseline, train with the device's own products and with emulated "
        "ones in lockstep, and stop at the first bit of a loss, gradient or weight that differs (exit code 1)"
    )
    option(group, "--check", check, choices=("native",))
    minutes = "with --check: start no step after this many minutes, and write the findings"
    option(group, "--minutes", minutes, type=float)
    group = parser.add_argument_group("optimizer and ranks (default: those of the recipe)")
    option(group, "--level", "of a recipe that has levels, such as O1, O2 or O3 of fp8lm", metavar="NAME")
    rule = "optimizer, such as madam (default adamw)"
    option(group, "--optimizer", rule, names=names.optimizers, type=one_of(names.optimizers))
    state = "format of its states, such as coat or bnb8 (docs/optim.md); fp32 switches a recipe's scheme off"
    option(group, "--state", state, names=names.states)
    reduction = "of the gradients of all ranks, such as msamp (docs/distributed.md); fp32 switches a recipe's off"
    option(group, "--reduction", reduction, names=names.reductions)
    ranks = "simulated ranks that share the windows of a step (default 2 with a low-precision reduction, else 1)"
    count(group, "--ranks", ranks)
    how = parser.add_argument_group("model and training")
    model = "gpt, llama, or FILE.py:function that returns a torch.nn.Module; see docs/recipes.md"
    option(how, "--model", model, "gpt", "NAME", names.functions)
    for name, text in TRAIN_SIZES.items():
        if name != "layers":
            option(how, f"--{name.replace('_', '-')}", text, TRAIN_DEFAULTS[name])
    more = f"default {TRAIN_DEFAULTS['layers']}; {SHARE_LAYERS} if a recipe leaves a share of them in high precision"
    count(how, "--layers", f"{TRAIN_SIZES['layers']} ({more})")
    option(how, "--lr", "peak learning rate", TRAIN_DEFAULTS["lr"], None)
    option(how, "--seed", "of weights, batches and stochastic rounding", 0)
    data = "a text file or a folder of them; by default Python's own sources"
    option(how, "--data", data, names=names.texts)
    add_device(how)
    count(how, "--threads", "CPU threads (default: torch's choice)")
    add_simulate(how)
    output = parser.add_argument_group("output")
    option(output, "--out", "folder for the HTML report (report.html), record and table", "fmtsim-train", "DIR")
    every = f"write a checkpoint to DIR after every N steps; 0: none (default {EVERY})"
    count(output, "--checkpoint-every", every)
    flag(output, "--resume", "resume from the checkpoint in DIR with the same bits; start anew if there is none")
    flag(output, "--quiet", "show no progress")
    add_json(parser)


def check_train(arguments: argparse.Namespace) -> None:
    """Say at once what the first seconds go into."""
    if not arguments.quiet and arguments.recipe != "list":
        print("loading torch, compiling kernels", file=sys.stderr, flush=True)


def declare_report(parser: argparse.ArgumentParser) -> None:
    option(parser, "folders", "folders that fmtsim train --out wrote", metavar="DIR", nargs="+", names=names.runs)
    option(parser, "--out", "the HTML report", "fmtsim-report.html", "FILE")


SWEEP_DEFAULTS = {
    "schemes": "bf16,e8m5,e8m4,e8m3,e7m7,e6m7,e5m7", "lr": "2e-3,4e-3,8e-3,1.6e-2", "widths": "64", "steps": "200",
    "seeds": "0..3",
}  # fmt: skip
SWEEP_SIZES = {
    "layers": ("transformer blocks", 2), "heads": ("attention heads per block", 4),
    "context": ("bytes the model sees at once", 32), "batch_size": ("windows of text per step", 8),
}  # fmt: skip


def declare_sweep(parser: argparse.ArgumentParser) -> None:
    what = parser.add_argument_group("runs: every combination of these lists, such as 1,2,4 or 0..3")
    schemes = "recipes and formats; A/B computes forward as A and gradients as B"
    option(what, "--schemes", schemes, SWEEP_DEFAULTS["schemes"], "LIST", names.recipes_and_formats)
    over = "values of a field of --target's datapath: accumulator=e8m3,e8m5 or fraction_bits=2..8; draws over.png"
    option(what, "--over", over, metavar="FIELD=LIST")
    option(what, "--lr", "peak learning rates", SWEEP_DEFAULTS["lr"], "LIST")
    option(what, "--widths", "widths of the hidden state", SWEEP_DEFAULTS["widths"], "LIST")
    option(what, "--steps", "optimizer steps", SWEEP_DEFAULTS["steps"], "LIST")
    option(what, "--seeds", "of weights, batches and stochastic rounding", SWEEP_DEFAULTS["seeds"], "LIST")
    how = parser.add_argument_group("model and training")
    option(how, "--model", "gpt, llama, or FILE.py:function that returns a torch.nn.Module", "gpt", "NAME",
           names.functions)  # fmt: skip
    for name, (text, default) in SWEEP_SIZES.items():
        option(how, f"--{name.replace('_', '-')}", text, default)
    add_target(how, plan=False)
    option(how, "--clip", "norm at which gradients are clipped; 0: not at all", 1.0)
    option(how, "--final-rate", "share of the peak learning rate that is left at the end", 0.1)
    option(how, "--data", "a text file or a folder of them; by default Python's own sources", names=names.texts)
    flag(how, "--tasks", "train on sums, copies and brackets instead, and count right answers")
    option(
        how, "--failed", "last loss from which a run has failed (default: halfway from bytes' entropy to the best)",
        type=float,
    )  # fmt: skip
    add_device(how)
    count(how, "--workers", "processes that share the runs, a CPU thread each (default: one a core)")
    option(how, "--executor", EXECUTOR, metavar="URL")
    law = "fit Quartet's scaling law to widths, steps and schemes; this scheme is the baseline, such as bf16"
    option(how, "--law", law, metavar="SCHEME")
    output = parser.add_argument_group("output")
    out = "folder for the runs and pictures; the same command goes on where it was stopped"
    option(output, "--out", out, "fmtsim-sweep", "DIR")
    flag(output, "--quiet", "show no progress")
    add_json(parser)


def parameters_of(text: str) -> float:
    """Return a number of parameters such as 7e9, 7B, 350M or 1.5T."""
    power = {"k": 3, "m": 6, "b": 9, "t": 12}.get(text.strip()[-1:].lower(), 0)
    try:
        number = float(f"{text.strip()[:-1]}e{power}" if power else text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{shown(text)} is no number of parameters; write 7e9, 7B, 350M") from None
    return round(number) if power else number


def declare_memory(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments; those that are left out are the defaults of ``training_memory``."""
    model = parser.add_argument_group("the model (one of the two)")
    option(model, "--model", "gpt2, llama-8b, ... ('list' prints all), or a Hugging Face config.json", metavar="NAME",
           names=names.models)  # fmt: skip
    option(model, "--params", "a number of parameters, such as 7B or 7e9: no activations, no cache", type=parameters_of)
    weights = parser.add_argument_group("weights and optimizer")
    option(weights, "--recipe", "a recipe of fmtsim train --recipe list, or a file", names=names.recipes)
    option(weights, "--level", "of a recipe that has levels, such as O1, O2 or O3 of fp8lm", metavar="NAME")
    option(weights, "--optimizer", "adamw, lion, ..., AdamW's states as in bnb8, coat, ..., or both: lion:bnb8",
           names=names.optimizers_and_states)  # fmt: skip
    option(weights, "--weights", "format of the weights (default: bf16, or what the recipe needs)", names=names.formats)
    option(weights, "--master", "format of the master weights, or none (default: fp32 beside narrower weights)",
           names=names.formats)  # fmt: skip
    option(weights, "--gradients", "format of the gradients (default: the recipe's, fp32 beside fp32 weights, or bf16)",
           names=names.formats)  # fmt: skip
    count(weights, "--lora", "rank of LoRA adapters; only these are trained")
    option(weights, "--lora-layers", "a regular expression: layers with adapters", metavar="PATTERN")
    saved = parser.add_argument_group("what is saved for the backward pass")
    count(saved, "--tokens", "tokens per sequence; without it, activations are not counted")
    count(saved, "--batch", "sequences on each device (default 1)")
    option(saved, "--activations", "format of activations that are not quantised (default bf16)", names=names.formats)
    option(saved, "--loss-format", "format in which the loss is computed from the logits (default fp32)",
           names=names.formats)  # fmt: skip
    option(saved, "--checkpointing", "what is recomputed in the backward pass", choices=("none", "selective", "full"))
    option(
        saved, "--attention", "whether scores are saved (eager) or not (flash, the default)", choices=("flash", "eager")
    )
    flag(saved, "--dropout", "count dropout masks")
    flag(saved, "--quantize-early", "layers save codes that the forward pass made for the backward product")
    devices = parser.add_argument_group("devices")
    count(devices, "--devices", "number of devices (default 1)")
    count(devices, "--zero", "ZeRO stage: 1 shards states, 2 gradients too, 3 weights too, as FSDP does (default 0)")
    count(devices, "--tensor-parallel", "devices over which each layer is sharded")
    flag(devices, "--sequence-parallel", "shard activations between layers, too")
    served = parser.add_argument_group("serving instead of training (with --weights and --devices)")
    flag(served, "--serve", "count weights and the KV cache")
    count(served, "--context", "cached tokens per request")
    count(served, "--requests", "concurrent requests (default 1)")
    option(served, "--kv-format", "format of the cache (default bf16)", names=names.formats)
    flag(parser, "--formulas", "show the formula of each line, and the tensors that a block saves")
    add_json(parser)


def check_memory(arguments: argparse.Namespace) -> None:
    """Refuse both or neither of a model and a number of parameters."""
    if (arguments.model is None) == (arguments.params is None):
        raise ArgumentError("fmtsim memory needs a model; pass either --model llama-8b, a config.json, or --params 7B")
