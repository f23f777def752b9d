#!/bin/sh
# facebook/opt-350m -> facebook/opt-125m: the paper's Mixture-of-Translators, by its recipe (E.1).
#
# Translates layers 4-7 of the target's 12. Translator: 256,221,188 parameters
# (hidden_size 1024, 16 heads). Training takes about 5.3 GiB: a GPU of 8 GB.
#
# Layers: the middle, since the paper does not say which ones it chose. Search them, then give the best one as START:
#
#     hf-mot search-channels --source facebook/opt-350m --target facebook/opt-125m --preset paper \
#         --config hidden_size=1024 num_attention_heads=16 --dtype bfloat16 --max-steps 100 \
#         --text openwebtext.txt.gz --eval-text openwebtext-valid.txt.gz --out search-opt-350m-to-125m
#
# TEXT (files to train on), OUT (a folder) and START may be set; further options go to hf-mot train.
set -eu
exec hf-mot train --source facebook/opt-350m --target facebook/opt-125m \
    --text ${TEXT:-openwebtext.txt.gz} --out "${OUT:-mot-opt-350m-to-125m}" \
    --preset paper --start "${START:-4}" --config hidden_size=1024 num_attention_heads=16 \
    --dtype bfloat16 "$@"
