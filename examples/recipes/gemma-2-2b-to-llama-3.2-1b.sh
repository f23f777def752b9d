#!/bin/sh
# google/gemma-2-2b -> meta-llama/Llama-3.2-1B: the paper's Mixture-of-Translators, by its recipe (E.1).
#
# Translates layers 5-9 of the target's 16. Translator: 308,733,956 parameters
# (hidden_size 1024, 16 heads). Training takes about 13.3 GiB: a GPU of 24 GB.
# Access to both models is granted on the Hub (then: hf auth login).
#
# Layers: the middle, since the paper does not say which ones it chose. Search them, then give the best one as START:
#
#     hf-mot search-channels --source google/gemma-2-2b --target meta-llama/Llama-3.2-1B --preset paper \
#         --config hidden_size=1024 num_attention_heads=16 --dtype bfloat16 --max-steps 100 \
#         --text openwebtext.txt.gz --eval-text openwebtext-valid.txt.gz --out search-gemma-2-2b-to-llama-3.2-1b
#
# TEXT (files to train on), OUT (a folder) and START may be set; further options go to hf-mot train.
set -eu
exec hf-mot train --source google/gemma-2-2b --target meta-llama/Llama-3.2-1B \
    --text ${TEXT:-openwebtext.txt.gz} --out "${OUT:-mot-gemma-2-2b-to-llama-3.2-1b}" \
    --preset paper --start "${START:-5}" --config hidden_size=1024 num_attention_heads=16 \
    --dtype bfloat16 "$@"
