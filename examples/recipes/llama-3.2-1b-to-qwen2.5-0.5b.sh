#!/bin/sh
# meta-llama/Llama-3.2-1B -> Qwen/Qwen2.5-0.5B: the paper's Mixture-of-Translators, by its recipe (E.1).
#
# Translates layers 9-13 of the target's 24. Translator: 267,262,468 parameters
# (hidden_size 1024, 16 heads). Training takes about 8.6 GiB: a GPU of 16 GB.
# Access to Llama is granted on the Hub (then: hf auth login).
#
# Layers: the middle, since the paper does not say which ones it chose. Search them, then give the best one as START:
#
#     hf-mot search-channels --source meta-llama/Llama-3.2-1B --target Qwen/Qwen2.5-0.5B --preset paper \
#         --config hidden_size=1024 num_attention_heads=16 --dtype bfloat16 --max-steps 100 \
#         --text openwebtext.txt.gz --eval-text openwebtext-valid.txt.gz --out search-llama-3.2-1b-to-qwen2.5-0.5b
#
# TEXT (files to train on), OUT (a folder) and START may be set; further options go to hf-mot train.
set -eu
exec hf-mot train --source meta-llama/Llama-3.2-1B --target Qwen/Qwen2.5-0.5B \
    --text ${TEXT:-openwebtext.txt.gz} --out "${OUT:-mot-llama-3.2-1b-to-qwen2.5-0.5b}" \
    --preset paper --start "${START:-9}" --config hidden_size=1024 num_attention_heads=16 \
    --dtype bfloat16 "$@"
