# SPDX-License-Identifier: Apache-2.0
"""Run of ``fmtsim convert-checkpoint``: weights of a checkpoint in another format."""

import argparse
import dataclasses
import json
import os
import re
import shutil
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from fmtsim.casts.encoded import Encoded
from fmtsim.casts.quantize import decode
from fmtsim.formats.block import BlockFormat
from fmtsim.formats.registry import get_format
from fmtsim.formats.tensor_file import stored_tensor, tensor_content
from fmtsim.lab.analysis.recode import Recode, WeightRecode, block_format, check_recode, recode
from fmtsim.lab.cli.output import MISMATCH, answer
from fmtsim.ptq.export import compressed_tensors, open_checkpoint
from fmtsim.ptq.export.checkpoint_files import check_written, digest
from fmtsim.ptq.export.weights import CodedWeight
from fmtsim.spec.quantizer import Quantizer
from fmtsim.support.errors import ArgumentError, FmtsimError
from fmtsim.support.files import TEMPORARY, write_file
from fmtsim.support.progress import make_progress
from fmtsim.support.records import read_json
from fmtsim.support.table import some

_REAL = (get_format("fp32"), get_format("e8m0"))  # formats of scales that are float32 numbers
_SHARD = 1 << 30  # bytes, after which a file is written


def run_convert_checkpoint(arguments: argparse.Namespace) -> int:
    """Write the checkpoint in another format; its folder appears complete or not at all."""
    target = block_format("to", arguments.to)
    if arguments.out is None:
        if arguments.weights is not None or arguments.ignore is not None:
            raise ArgumentError("--weights and --ignore choose what is written; pass --out DIR, or leave them out")
        # Print what is lost, and where; the exit code is 1 where it is anything.
        result = check_recode(arguments.folder, target, scales=arguments.scales)
        answer(arguments, result.to_dict() | {"lossless": result.lossless}, lambda: str(result))
        return 0 if result.lossless else MISMATCH
    out = arguments.out.expanduser()
    if os.path.exists(out):
        raise ArgumentError(f"--out {out} is there already; name a folder that does not exist yet")
    checkpoint = open_checkpoint(arguments.folder)
    patterns: dict[str, re.Pattern[str]] = {}
    for option in ("weights", "ignore"):
        word = getattr(arguments, option)
        try:
            patterns[option] = re.compile("(?!)" if word is None else word)  # which nothing matches
        except re.error as error:
            raise ArgumentError(f"--{option} {word} is not a regular expression: {error}") from None
    out.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=TEMPORARY, dir=out.parent))
    try:
        writer, lost = _Writer(folder, arguments.layout, target), list[WeightRecode]()
        with make_progress(False if arguments.quiet or arguments.json else None) as progress:
            progress.stage(f"converting to {target.name}", len(checkpoint))
            for number, name in enumerate(checkpoint):
                value = checkpoint[name]
                plain = isinstance(value, Tensor) and not (value.dim() > 1 and patterns["weights"].search(name))
                if plain or patterns["ignore"].search(name):
                    writer.tensors({name: checkpoint.decode(name)})
                    writer.plain += [] if isinstance(value, Tensor) else [name.removesuffix(".weight")]
                else:
                    weight, loss = recode(name, value, target, arguments.scales)
                    writer.encoded(name, weight)
                    lost.append(loss)
                progress.step(number + 1)
        writer.close(Path(arguments.folder).expanduser())
        check_written(folder, writer.meant)
        os.replace(folder, out)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    losses = Recode(source="", target=target.name, weights=tuple(lost))
    new_scales = [w.name for w in lost if w.scales != "own"] if arguments.scales == "own" else []
    record = {"out": str(out), "layout": arguments.layout, "format": target.name, "weights": len(writer.schemes),
              "lost": losses.to_dict()["weights"], "changes": writer.changes, "new_scales": new_scales,
              "checked": len(writer.meant)}  # fmt: skip
    lines = [str(losses), *(f"{name}: {change}" for name, change in writer.changes.items())]
    if new_scales:
        why = f"{target.name} has no multiple of their elements, or no scale as large, or they have zero points"
        lines.append(f"--scales rule, as own cannot be carried over: {some(new_scales)} ({why})")
    wrote = f"{out}: {len(writer.schemes)} weights in {target.name}, layout {arguments.layout}"
    lines += [wrote, f"read back: all {len(writer.meant)} tensors have the bits that were meant"]
    answer(arguments, record, lambda: "\n".join(lines))
    return 0


class _Writer:
    """Write tensors to the shards of a folder, weights as a layout has them."""

    def __init__(self, folder: Path, layout: str, target: BlockFormat) -> None:
        self.folder, self.layout, self.target = folder, layout, target
        self.schemes: dict[str, Any] = {}
        self.changes: dict[str, str] = {}
        self.plain: list[str] = []  # layers that are left out
        self.meant: dict[str, bytes] = {}  # digests of what the tensors should be read back as
        self._shard: dict[str, Tensor] = {}
        self._files: dict[str, str] = {}
        self._bytes = 0

    def encoded(self, name: str, weight: Encoded) -> None:
        """Write a weight."""
        fmt, stem = self.target, name.removesuffix(".weight")
        codes, scales, tensor_scale, _ = weight.parts()
        assert scales is not None
        if self.layout == "gpt-oss" and fmt == get_format("mxfp4"):
            blocks = weight.codes.unflatten(-1, (-1, 16))
            assert weight.scales is not None
            self.schemes[name] = "gpt-oss"
            stored = {f"{name}_blocks": blocks, f"{name}_scales": weight.scales.reshape(blocks.shape[:-1])}
        elif self.layout == "deepseek" and fmt.element == get_format("e4m3") and all(fmt.block) and fmt.scale in _REAL:
            self.schemes[name] = "deepseek"
            grid = scales.float().reshape(*weight.shape[:-2], -1, scales.shape[-1])
            stored = {name: codes.view(torch.float8_e4m3fn), f"{name}_scale_inv": grid}
        elif self.layout == "compressed-tensors" and len(weight.shape) == 2 and name.endswith(".weight"):
            block: Any = tuple(
                n if size is None else min(size, n) for n, size in zip(weight.shape, fmt.block, strict=True)
            )
            coded = CodedWeight(
                layer=stem, element=fmt.element, elements=decode(codes, fmt.element), scale=scales, x=Quantizer(),
                tensor_scale=tensor_scale, block=block, dtype=torch.bfloat16, x_scale=None,
            )  # fmt: skip
            tensors, self.schemes[stem], change = compressed_tensors.tensors_of(coded, allow_rescale=True)
            stored = {f"{stem}.{key}": tensor for key, tensor in tensors.items()}
            if change:
                self.changes[stem] = change
                weight = dataclasses.replace(weight, tensor_scale=1 / tensors["weight_global_scale"].reshape(()))
        else:
            raise ArgumentError(
                f"--layout {self.layout} has no place for {name!r} of shape {tuple(weight.shape)} in {fmt.name}; "
                "gpt-oss takes mxfp4, deepseek e4m3 in blocks under float32 scales, compressed-tensors matrices; "
                "--ignore PATTERN leaves weights out"
            )
        self.tensors(stored, {name: digest(weight.decode(torch.float32))})

    def tensors(self, tensors: dict[str, Tensor], meant: dict[str, bytes] | None = None) -> None:
        """Write tensors by name; ``meant`` has digests of what they are read back as, where that is not themselves."""
        self.meant |= {name: digest(t) for name, t in tensors.items()} if meant is None else meant
        self._shard |= tensors
        self._bytes += sum(tensor.nbytes for tensor in tensors.values())
        if self._bytes > _SHARD:
            self._flush()

    def _flush(self) -> None:
        file = f"model-{len(set(self._files.values())) + 1:05}.safetensors"
        content = tensor_content({name: stored_tensor(t) for name, t in self._shard.items()}, {"format": "pt"})
        write_file(self.folder / file, content)
        self._files |= dict.fromkeys(self._shard, file)
        self._shard, self._bytes = {}, 0

    def close(self, source: Path) -> None:
        """Write the last shard, the index and config.json, with the model's own fields where it has one."""
        if not self.schemes:
            raise ArgumentError(f"{source} has no quantised weight; name weights by --weights, a regular expression")
        self._flush()
        path = source / "config.json"
        config = read_json(path, FmtsimError, "config.json", nan=True) if path.is_file() else {}
        config = {
            key: value for key, value in config.items() if key not in ("quantization_config", "compression_config")
        }
        if self.layout == "compressed-tensors":
            model: Any = SimpleNamespace(config=SimpleNamespace(to_dict=lambda: config))
            text = compressed_tensors.config_of(model, self.schemes, self.plain)
        else:
            method: dict[str, Any] = {"quant_method": "mxfp4"}
            if self.layout == "deepseek":
                method = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": list(self.target.block)}
            text = json.dumps(config | {"quantization_config": method}, indent=2)
        write_file(self.folder / path.name, text)
        index = {"metadata": {}, "weight_map": self._files}
        write_file(self.folder / "model.safetensors.index.json", json.dumps(index, indent=2))
