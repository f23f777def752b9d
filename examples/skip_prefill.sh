#!/bin/sh
# Skipping the target's prefill, SmolLM2-135M-Instruct -> Gemma-3-270m, within an eighth of its FLOPs: the closed form, and
# then a short distillation of its up-projection, gains and biases from captured states.
#
#     sh examples/skip_prefill.sh DATA OUT
#
# DATA holds text/train, text/valid and the tasks' folders. Each command goes on where a killed run of it stopped, so this
# can be started again at any time. On 2 cores the fit takes about an hour, the states of EXAMPLES texts four seconds each,
# a training of 200 steps a quarter of an hour and its control without source as long again; measuring takes an hour.
set -eu
DATA=$1 OUT=$2
EXAMPLES=${EXAMPLES:-540} STEPS=${STEPS:-200}
PAIR="--source demo/smollm2-135m-instruct --target demo/gemma-3-270m"
TRAIN=$(ls "$DATA"/text/train/*.txt.gz) VALID=$(ls "$DATA"/text/valid/*.txt.gz)
ARMS=native,no_context,translated,wrong_document,wrong_source,no_source
mkdir -p "$OUT"

if [ ! -d "$OUT/fit" ]; then
    hf-mot fit $PAIR --text $TRAIN --rank 1536 --flops-share 0.125 --source-window 2 --tokens 200000 \
        --statistics "$OUT/statistics.safetensors" --seed 0 --out "$OUT/fit"
fi
LAYERS=$(python -c "import json, sys; print(*json.load(open(sys.argv[1]))['source_layers'])" "$OUT/fit/config.json")
hf-mot capture $PAIR --text $TRAIN --source-layers $LAYERS --context 128 384 --length 448 --copy-share 0.4 \
    --top-logits hidden --examples "$EXAMPLES" --seed 0 --out "$OUT/states"
hf-mot train $PAIR --states "$OUT/states" --init "$OUT/fit" --twin --losses distill=1 --train-only "gain|bias|up" \
    --learning-rate 2e-3 --linear-learning-rate 1e-5 --max-steps "$STEPS" --batch-size 4 --accumulation 1 \
    --vocabulary-size 16384 --seed 0 --out "$OUT/distilled"
hf-mot evaluate "$OUT/distilled" --tasks squad --data "$DATA" --arms native,no_context,translated,wrong_document,no_source \
    --no-cost --batch-size 16 --seed 0 --report "$OUT/squad"
hf-mot evaluate "$OUT/distilled" --text $VALID --limit 128 --arms $ARMS --gate --fit-text $TRAIN --cost-context 1024 \
    --batch-size 16 --seed 0 --report "$OUT/text"
