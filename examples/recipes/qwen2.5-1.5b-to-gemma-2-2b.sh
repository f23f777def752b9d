#!/bin/sh
# Qwen/Qwen2.5-1.5B -> google/gemma-2-2b: the paper's Mixture-of-Translators, by its recipe (E.1).
#
# Translates layers 9-16 of the target's 26. Translator: 672,765,956 parameters
# (hidden_size 1024, 16 heads). Training takes about 20.7 GiB: a GPU of 40 GB.
# Access to Gemma is granted on the Hub (then: hf auth login).
#
# Layers: the middle, since the paper does not say which ones it chose. Search them, then give the best one as START:
#
#     hf-mot search-channels --source Qwen/Qwen2.5-1.5B --target google/gemma-2-2b --preset paper \
#         --config hidden_size=1024 num_attention_heads=16 --dtype bfloat16 --max-steps 100 \
#         --text openwebtext.txt.gz --eval-text openwebtext-valid.txt.gz --out search-qwen2.5-1.5b-to-gemma-2-2b
#
# TEXT (files to train on), OUT (a folder) and START may be set; further options go to hf-mot train.
set -eu
exec hf-mot train --source Qwen/Qwen2.5-1.5B --target google/gemma-2-2b \
    --text ${TEXT:-openwebtext.txt.gz} --out "${OUT:-mot-qwen2.5-1.5b-to-gemma-2-2b}" \
    --preset paper --start "${START:-9}" --config hidden_size=1024 num_attention_heads=16 \
    --dtype bfloat16 "$@"
