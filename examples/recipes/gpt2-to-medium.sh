#!/bin/sh
# openai-community/gpt2 -> openai-community/gpt2-medium: the paper's Mixture-of-Translators, by its recipe (E.1).
#
# Translates layers 10-13 of the target's 24. Translator: 271,935,492 parameters
# (hidden_size 1024, 16 heads). Training takes about 6.1 GiB: a GPU of 16 GB.
#
# Layers: the middle, since the paper does not say which ones it chose. Search them, then give the best one as START:
#
#     hf-mot search-channels --source openai-community/gpt2 --target openai-community/gpt2-medium --preset paper \
#         --config hidden_size=1024 num_attention_heads=16 --dtype bfloat16 --max-steps 100 \
#         --text openwebtext.txt.gz --eval-text openwebtext-valid.txt.gz --out search-gpt2-to-medium
#
# TEXT (files to train on), OUT (a folder) and START may be set; further options go to hf-mot train.
set -eu
exec hf-mot train --source openai-community/gpt2 --target openai-community/gpt2-medium \
    --text ${TEXT:-openwebtext.txt.gz} --out "${OUT:-mot-gpt2-to-medium}" \
    --preset paper --start "${START:-10}" --config hidden_size=1024 num_attention_heads=16 \
    --dtype bfloat16 "$@"
