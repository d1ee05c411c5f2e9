#!/usr/bin/env bash
# transformers 5.23.0 (torch 2.13.0): AutoTokenizer of a folder with a model alone returns a tokenizer that knows no text.
#
# Expected: an error, as for Llama and Mistral; model.save_pretrained writes no tokenizer, so such folders are usual.
# Seen: Qwen3 and GPT-2 get a tokenizer of one token, which makes no tokens of any text; Gemma 2 one of five, which makes
# one unknown token of any text. A perplexity of a quantised checkpoint is then one of nothing, or of unknown tokens.
set -euo pipefail
room=$(mktemp -d)
trap 'rm -rf "$room"' EXIT
python3 -m venv "$room/env"
"$room/env/bin/pip" install -q torch==2.13.0 transformers==5.23.0
HF_HUB_OFFLINE=1 TRANSFORMERS_VERBOSITY=error "$room/env/bin/python" - "$room" <<'PYTHON'
import sys

import transformers

print("transformers", transformers.__version__)
size = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2)
cases = {
    "Qwen3": (size, (1, 0, 0)),
    "GPT2": (dict(n_embd=32, n_layer=1, n_head=2), (1, 0, 0)),
    "Gemma2": (size, (5, 1, 1)),
    "Llama": (size, None),
    "Mistral": (size, None),
}
for name, (sizes, expected) in cases.items():
    config = getattr(transformers, f"{name}Config")(**sizes, vocab_size=64)
    kind = "GPT2LMHeadModel" if name == "GPT2" else f"{name}ForCausalLM"
    folder = f"{sys.argv[1]}/{name}"
    getattr(transformers, kind)(config).save_pretrained(folder)
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        texts = "Numbers are not bits.", "Another text, which is much longer than the first one."
        seen = len(tokenizer), *(len(tokenizer(text).input_ids) for text in texts)
    except ValueError:
        seen = None
    print(name, "refused" if seen is None else "vocabulary and tokens of two texts: %d, %d, %d" % seen)
    assert seen == expected, "another behaviour"
PYTHON
echo "as described"
