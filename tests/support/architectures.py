# SPDX-License-Identifier: Apache-2.0
"""Tiny models of random weights, one for each architecture of docs/models.md, and the coverage of a recipe in them.

    python -m tests.support.architectures

writes the table there anew; it needs ``pip install transformers peft``.
"""

import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import fmtsim
from fmtsim.nn.coverage import Coverage, percent

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
MARK = "<!-- coverage -->\n"
RECIPE = "te_current"

_SIZES = {"vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "pad_token_id": 0,
          "bos_token_id": 0, "eos_token_id": 0}  # fmt: skip
_WIDE = _SIZES | {"intermediate_size": 128}
_GROUPED = _WIDE | {"num_key_value_heads": 2, "head_dim": 16}
_ROUTED = {"num_experts": 4, "num_experts_per_tok": 2}
_IMAGES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
           "image_size": 32, "patch_size": 8}  # fmt: skip
_LATENT = {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16,
           "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "n_routed_experts": 4, "num_experts_per_tok": 2,
           "moe_intermediate_size": 64}  # fmt: skip
_SPEECH = {"vocab_size": 512, "d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
           "decoder_attention_heads": 4, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128, "num_mel_bins": 16,
           "max_source_positions": 64, "max_target_positions": 64, "pad_token_id": 0, "bos_token_id": 0,
           "eos_token_id": 0, "decoder_start_token_id": 0}  # fmt: skip
_TEXT_SIDE = {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4, "vocab_size": 512,
              "decoder_start_token_id": 0}  # fmt: skip
# Model, config, its arguments, and names of inputs.
ARCHITECTURES: dict[str, tuple[str, str, dict[str, Any], tuple[str, ...]]] = {
    "GPT-2": ("GPT2LMHeadModel", "GPT2Config", {"n_embd": 64, "n_head": 4, "n_layer": 2, "vocab_size": 512}, ("ids",)),
    "Llama": ("LlamaForCausalLM", "LlamaConfig", _GROUPED, ("ids",)),
    "Qwen3": ("Qwen3ForCausalLM", "Qwen3Config", _GROUPED, ("ids",)),
    "Gemma": ("GemmaForCausalLM", "GemmaConfig", _GROUPED, ("ids",)),
    "Phi-3": ("Phi3ForCausalLM", "Phi3Config", _WIDE | {"num_key_value_heads": 2}, ("ids",)),
    "OPT": ("OPTForCausalLM", "OPTConfig", _SIZES | {"ffn_dim": 128, "word_embed_proj_dim": 64}, ("ids",)),
    "GPT-NeoX": ("GPTNeoXForCausalLM", "GPTNeoXConfig", _WIDE, ("ids",)),
    "Falcon": ("FalconForCausalLM", "FalconConfig", _SIZES, ("ids",)),
    "BERT": ("BertForMaskedLM", "BertConfig", _WIDE, ("ids",)),
    "ModernBERT": ("ModernBertForMaskedLM", "ModernBertConfig", _WIDE | {"cls_token_id": 0, "sep_token_id": 0},
                   ("ids",)),
    "T5": ("T5ForConditionalGeneration", "T5Config", _TEXT_SIDE, ("ids", "decoder")),
    "ViT": ("ViTForImageClassification", "ViTConfig", _IMAGES, ("images",)),
    "CLIP": ("CLIPModel", "CLIPConfig", {"text_config": _WIDE | {"max_position_embeddings": 32, "eos_token_id": 511},
             "vision_config": _IMAGES, "projection_dim": 32}, ("ids", "images")),
    "Whisper": ("WhisperForConditionalGeneration", "WhisperConfig", _SPEECH, ("sound", "decoder")),
    "Mamba": ("MambaForCausalLM", "MambaConfig", {"vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 2},
              ("ids",)),
    "Mixtral": ("MixtralForCausalLM", "MixtralConfig", _GROUPED | {"num_local_experts": 4}, ("ids",)),
    "Qwen3-MoE": ("Qwen3MoeForCausalLM", "Qwen3MoeConfig", _GROUPED | _ROUTED | {"moe_intermediate_size": 64},
                  ("ids",)),
    "OLMoE": ("OlmoeForCausalLM", "OlmoeConfig", _WIDE | {"num_key_value_heads": 2} | _ROUTED, ("ids",)),
    "GPT-OSS": ("GptOssForCausalLM", "GptOssConfig",
                _GROUPED | {"num_local_experts": 4, "num_experts_per_tok": 2}, ("ids",)),
    "DeepSeek-V3": ("DeepseekV3ForCausalLM", "DeepseekV3Config", _WIDE | {"num_key_value_heads": 4} | _LATENT,
                    ("ids",)),
    "Llama with LoRA": ("LlamaForCausalLM", "LlamaConfig", _GROUPED, ("ids",)),
}  # fmt: skip
# Others, whose attention is counted.
MORE: dict[str, tuple[str, str, dict[str, Any], tuple[str, ...]]] = {
    "Mistral": ("MistralForCausalLM", "MistralConfig", _GROUPED, ("ids",)),
    "Gemma 2": ("Gemma2ForCausalLM", "Gemma2Config", _GROUPED, ("ids",)),
    "Gemma 3": ("Gemma3ForCausalLM", "Gemma3TextConfig", _GROUPED, ("ids",)),
    "OLMo-2": ("Olmo2ForCausalLM", "Olmo2Config", _WIDE, ("ids",)),
    "RoBERTa": ("RobertaForMaskedLM", "RobertaConfig", _WIDE, ("ids",)),
    "DistilBERT": ("DistilBertForMaskedLM", "DistilBertConfig",
                   {"vocab_size": 512, "dim": 64, "hidden_dim": 128, "n_layers": 2, "n_heads": 4}, ("ids",)),
    "BART": ("BartForConditionalGeneration", "BartConfig",
             {k: v for k, v in _SPEECH.items() if "positions" not in k and "mel" not in k}, ("ids", "decoder")),
    "Granite": ("GraniteForCausalLM", "GraniteConfig", _WIDE | {"num_key_value_heads": 2}, ("ids",)),
    "StarCoder2": ("Starcoder2ForCausalLM", "Starcoder2Config", _WIDE | {"num_key_value_heads": 2}, ("ids",)),
    "Jamba": ("JambaForCausalLM", "JambaConfig",
              _WIDE | _ROUTED | {"num_key_value_heads": 2, "use_mamba_kernels": False, "attn_layer_period": 2,
              "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1},
              ("ids",)),
    "Mamba-2": ("Mamba2ForCausalLM", "Mamba2Config",
                {"vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 2, "num_heads": 8, "head_dim": 16,
                 "state_size": 16, "n_groups": 1, "chunk_size": 16}, ("ids",)),
}  # fmt: skip
_ADAPTED = {"Llama with LoRA": ["q_proj", "v_proj", "down_proj"]}  # by adapters of PEFT, the rest frozen
_DEPTHS = ("num_hidden_layers", "n_layer", "num_layers", "encoder_layers", "decoder_layers")
_INPUTS = {"ids": "input_ids", "decoder": "decoder_input_ids", "images": "pixel_values", "sound": "input_features"}


def architecture(name: str, layers: int = 2) -> tuple[nn.Module, dict[str, Tensor]]:
    """Return a tiny model and a batch; raise ImportError where transformers or PEFT is not installed."""
    model, config, arguments, inputs = (ARCHITECTURES | MORE)[name]
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(1, 511, (2, 32), generator=generator)
    made = {"ids": tokens, "decoder": tokens, "images": torch.randn(2, 3, 32, 32, generator=generator),
            "sound": torch.randn(2, 16, 128, generator=generator)}  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the packages that it imports
        import transformers

        transformers.logging.set_verbosity_error()
        torch.manual_seed(0)
        built = getattr(transformers, model)(getattr(transformers, config)(**_deep(arguments, layers)))
        if name in _ADAPTED:
            import peft

            built = peft.get_peft_model(built, peft.LoraConfig(r=8, target_modules=_ADAPTED[name]))
        return built, {_INPUTS[key]: made[key] for key in inputs}


def _deep(arguments: dict[str, Any], layers: int) -> dict[str, Any]:
    """Return the arguments of a config for another number of layers; of one, experts are in the first."""
    if layers == 2:
        return arguments
    parts = {key: _deep(value, layers) if isinstance(value, dict) else value for key, value in arguments.items()}
    parts |= {key: layers for key in _DEPTHS if key in parts}
    return parts | ({"first_k_dense_replace": 0} if "first_k_dense_replace" in parts else {})


def coverage(name: str) -> Coverage:
    """Return the coverage of the recipe in an architecture."""
    model, batch = architecture(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fmtsim.errors.CoverageWarning)
        fmtsim.convert(model, recipe=RECIPE)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return fmtsim.report(model, batch).coverage


def table() -> str:
    rows = ["| Architecture | Simulated | Left, and why |", "|---|---|---|"]
    for name in ARCHITECTURES:
        result = coverage(name)
        rows.append(
            f"| {name} | {percent(result.simulated, result.total)} | {result.left() or '-'} |".replace("*", r"\*")
        )
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(MARK)
    PAGE.write_text(f"{before}{MARK}{table()}{MARK}{rest.partition(MARK)[2]}", encoding="utf-8")
