#!/usr/bin/env bash
# Converts GGUF models to Hugging Face checkpoints and checks them with transformers and llama.cpp.
#
#   scripts/interop_transformers.sh MODEL.gguf[,PROMPT,LOGITS] ...
#
# For each model: `preshard convert --layout hf --weights bf16` into a temporary directory; then
#   load    transformers finds every tensor it wants, and no other;
#   tokens  the converted tokenizer gives llama.cpp's token ids for varied text;
#   chat    the chat template, where there is one, renders a message;
#   logits  with PROMPT (token ids, comma separated, in a file) and LOGITS (tokens x vocabulary, f32, made
#           by llama.cpp from the weights rounded to bf16): they agree to 1e-5 of the rms.
# A model in splits is given by any of its files. Exit 1 when a check fails.
#
#   VENV=DIR          where torch, transformers and sentencepiece are installed from PyPI; default target/interop
#   LLAMA_PYTHON=EXE  a Python that has llama-cpp-python; default the one of VENV, where the check of tokens
#                     is skipped unless it was installed there
#   PRESHARD=EXE      the program; default target/release/preshard, built
#
# Example: f=tests/fixtures; scripts/interop_transformers.sh $f/dense/tiny-llama-Q4_K_M.gguf
set -euo pipefail
[ $# -gt 0 ] || { sed -n '2,/^set/p' "$0" | sed '$d; s/^# \{0,1\}//'; exit 2; }
here=$(cd "$(dirname "$0")/.." && pwd)
venv=${VENV:-$here/target/interop}
if [ -z "${PRESHARD:-}" ]; then
  (cd "$here" && cargo build --release --quiet)
  PRESHARD=${CARGO_TARGET_DIR:-$here/target}/release/preshard
fi
if ! "$venv/bin/python" -c 'import torch, transformers' 2>/dev/null; then
  python3 -m venv "$venv"
  "$venv/bin/pip" install --quiet 'transformers>=5,<6' torch jinja2 numpy
fi
llama=${LLAMA_PYTHON:-$venv/bin/python}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

cat > "$work/texts.py" <<'P'
# Composed text only: some tokenizers compose (NFC) where llama.cpp does not.
TEXTS = [
    "", " ", "  ", "\n", "\n\n\n", "\t", "x", "Hello, world! How are you?",
    "def f(x):\n\treturn {k: v**2 for k, v in x.items() if v != 0}  # comment\n\n\n    print(f'{x!r}')\n",
    "   leading and   runs    of     spaces      \t\t tabs\t\n\n \n  \r\n end  ",
    "1 12 123 1234 12345 3.14159e-10 0xFF 1,000,000 12345678",
    "I'm you've they'LL we'D it'S don't CAN'T",
    "你好，世界！今天天气很好。「引用」漢字かなカナ한국어",
    "Привет мир, как дела? Ελληνικά עברית العربية हिन्दी ไทย",
    "🙂😀👨‍👩‍👧‍👦🏳️‍🌈 🚀 emoji🙂text 🇩🇪", "naïve café Ångström ﬁ Ⅷ ½ ² ³ µ",
    "a\u00a0b\u2003c\u3000d\u200be", "!!! ??? ... --- === ### @@@ $$$ %%% ^^^ &&& *** ((( ))) {{{ }}} <<< >>> |||",
    "http://example.com/path?query=1&other=two#frag user@mail.org", "<div class=\"x\">text</div><!-- c -->",
    "camelCaseWords snake_case_words kebab-case-words ALLCAPS MiXeD", "α+β=γ ∑∫√∞ ≤≥≠ ←→ ∀∃ ℝℂ",
]
P
cat > "$work/llama.py" <<'P'
import json, os, sys
sys.path.insert(0, os.path.dirname(sys.argv[2]))
from texts import TEXTS
from llama_cpp import Llama
model = Llama(sys.argv[1], vocab_only=True, verbose=False)
special = [t for t in json.load(open(sys.argv[3])) if t.strip() == t]
texts = TEXTS + ["a " + t + " b" + t for t in special[:64]]
ids = [model.tokenize(t.encode(), add_bos=False, special=True) for t in texts]
json.dump([texts, ids, model.tokenize(b"Hello", add_bos=True, special=True)], open(sys.argv[2], "w"))
P
cat > "$work/special.py" <<'P'
import json, sys
from transformers import AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
json.dump([t.content for t in tokenizer.added_tokens_decoder.values()], open(sys.argv[2], "w"))
P
cat > "$work/check.py" <<'P'
import json, os, sys
import numpy as np, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
directory, tokens, prompt, reference = sys.argv[1:]
failed = 0
def report(what, ok, detail):
    global failed
    failed |= not ok
    print(f"  {what:7}{'ok' if ok else 'FAILED':8}{detail}")
model, info = AutoModelForCausalLM.from_pretrained(
    directory, dtype=torch.float32, attn_implementation="eager", output_loading_info=True)
# Draft layers (multi-token prediction), numbered after the last layer, are not part of the class.
draft = tuple(f"model.layers.{model.config.num_hidden_layers + i}." for i in range(8))
info["unexpected_keys"] = [k for k in info["unexpected_keys"] if not k.startswith(draft)]
wrong = {k: sorted(v)[:5] for k, v in info.items() if v}
report("load", not wrong, f"{type(model).__name__}, {sum(p.numel() for p in model.parameters()):,} parameters {wrong or ''}")
tokenizer = AutoTokenizer.from_pretrained(directory)
if os.path.exists(tokens):
    texts, theirs, first = json.load(open(tokens))
    ours = [tokenizer.encode(t, add_special_tokens=False) for t in texts]
    differ = [t for t, a, b in zip(texts, ours, theirs) if a != b]
    report("tokens", not differ, f"{len(texts)} texts, {len(differ)} differ {differ[:3] or ''}")
    report("first", tokenizer.encode("Hello") == first, f"{tokenizer.encode('Hello')} {first}")
else:
    print("  tokens skipped (no llama-cpp-python: set LLAMA_PYTHON)")
if tokenizer.chat_template:
    text = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True)
    report("chat", "Hi" in text, repr(text[-60:]))
if prompt:
    # llama.cpp has one epsilon for all norms of the model.
    for name, module in model.named_modules():
        if name.endswith(("q_a_layernorm", "kv_a_layernorm")):
            module.variance_epsilon = model.config.rms_norm_eps
    ids = torch.tensor([[int(i) for i in open(prompt).read().split(",")]])
    with torch.no_grad():
        logits = model.eval()(ids, use_cache=False).logits[0].float().numpy()
    expected = np.fromfile(reference, np.float32).reshape(logits.shape)
    error = float(np.sqrt(((logits - expected) ** 2).mean() / (expected ** 2).mean()))
    report("logits", error < 1e-5, f"rms of the difference / rms {error:.1e}, largest {abs(logits - expected).max():.1e}")
sys.exit(failed)
P

status=0
for argument in "$@"; do
  IFS=, read -r model prompt reference <<< "$argument"
  echo "== $model"
  out=$work/out
  rm -rf "$out" "$work"/*.json
  if ! "$PRESHARD" convert "$model" --layout hf --weights bf16 --quiet -o "$out"; then status=1; continue; fi
  "$venv/bin/python" "$work/special.py" "$out" "$work/special.json" 2> "$work/log" || { cat "$work/log"; status=1; continue; }
  if "$llama" -c 'import llama_cpp' 2>/dev/null; then
    "$llama" "$work/llama.py" "$model" "$work/tokens.json" "$work/special.json" 2> "$work/log" || { cat "$work/log"; status=1; }
  fi
  "$venv/bin/python" "$work/check.py" "$out" "$work/tokens.json" "${prompt:-}" "${reference:-}" 2> "$work/log" || {
    grep -E 'rror' "$work/log" | tail -n 3 || true; status=1; }
done
exit $status
