#!/bin/sh
# Qwen/Qwen2.5-0.5B -> Qwen/Qwen2.5-1.5B: the paper's Mixture-of-Translators, by its recipe (E.1).
#
# Translates layers 10-16 of the target's 28. Translator: 404,740,100 parameters
# (hidden_size 1024, 16 heads). Training takes about 12.0 GiB: a GPU of 24 GB.
#
# Layers: the middle, since the paper does not say which ones it chose. Search them, then give the best one as START:
#
#     hf-mot search-channels --source Qwen/Qwen2.5-0.5B --target Qwen/Qwen2.5-1.5B --preset paper \
#         --config hidden_size=1024 num_attention_heads=16 --dtype bfloat16 --max-steps 100 \
#         --text openwebtext.txt.gz --eval-text openwebtext-valid.txt.gz --out search-qwen2.5-0.5b-to-1.5b
#
# TEXT (files to train on), OUT (a folder) and START may be set; further options go to hf-mot train.
set -eu
exec hf-mot train --source Qwen/Qwen2.5-0.5B --target Qwen/Qwen2.5-1.5B \
    --text ${TEXT:-openwebtext.txt.gz} --out "${OUT:-mot-qwen2.5-0.5b-to-1.5b}" \
    --preset paper --start "${START:-10}" --config hidden_size=1024 num_attention_heads=16 \
    --dtype bfloat16 "$@"
