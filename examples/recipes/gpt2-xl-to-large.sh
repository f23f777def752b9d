#!/bin/sh
# openai-community/gpt2-xl -> openai-community/gpt2-large: the paper's Mixture-of-Translators, by its recipe (E.1).
#
# Translates layers 12-22 of the target's 36. Translator: 1,667,566,084 parameters
# (hidden_size 1280, 20 heads). Training takes about 32.0 GiB: a GPU of 80 GB.
#
# Layers: the middle, since the paper does not say which ones it chose. Search them, then give the best one as START:
#
#     hf-mot search-channels --source openai-community/gpt2-xl --target openai-community/gpt2-large --preset paper \
#         --config hidden_size=1280 num_attention_heads=20 --dtype bfloat16 --max-steps 100 \
#         --text openwebtext.txt.gz --eval-text openwebtext-valid.txt.gz --out search-gpt2-xl-to-large
#
# TEXT (files to train on), OUT (a folder) and START may be set; further options go to hf-mot train.
set -eu
exec hf-mot train --source openai-community/gpt2-xl --target openai-community/gpt2-large \
    --text ${TEXT:-openwebtext.txt.gz} --out "${OUT:-mot-gpt2-xl-to-large}" \
    --preset paper --start "${START:-12}" --config hidden_size=1280 num_attention_heads=20 \
    --dtype bfloat16 "$@"
