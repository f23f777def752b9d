#!/bin/sh
# Skipping the target's prefill, SmolLM2-135M-Instruct -> Gemma-3-270m, within an eighth of its FLOPs: the closed form, and
# then a distillation of its up-projection, gains and biases from captured states.
#
#     sh examples/skip_prefill.sh DATA OUT
#
# DATA holds text/train, text/valid and the tasks' folders. Each command goes on where a killed run of it stopped, so this
# can be started again at any time. Of one core the fit takes half an hour to an hour, the states of EXAMPLES texts as
# long (13 GB), the training half an hour, its control without source the same; measuring takes an hour and a half.
# SOURCE and TARGET name another pair, e.g. the way back.
set -eu
DATA=$1 OUT=$2
EXAMPLES=${EXAMPLES:-640} STEPS=${STEPS:-320}
PAIR="--source ${SOURCE:-demo/smollm2-135m-instruct} --target ${TARGET:-demo/gemma-3-270m}"
TRAIN=$(ls "$DATA"/text/train/*.txt.gz) VALID=$(ls "$DATA"/text/valid/*.txt.gz)
ARMS=native,no_context,translated,wrong_document,native_wrong_document,no_source
mkdir -p "$OUT"

if [ ! -d "$OUT/fit" ]; then
    hf-mot fit $PAIR --text $TRAIN --rank 1536 --flops-share 0.125 --source-window 2 --tokens 200000 \
        --statistics "$OUT/statistics.safetensors" --seed 0 --out "$OUT/fit"
fi
LAYERS=$(python -c "import json, sys; print(*json.load(open(sys.argv[1]))['source_layers'])" "$OUT/fit/config.json")
hf-mot capture $PAIR --text $TRAIN --source-layers $LAYERS --context 128 1024 --length 1152 --copy-share 0.4 \
    --top-logits hidden --examples "$EXAMPLES" --batch-size 1 --seed 0 --out "$OUT/states"
hf-mot train $PAIR --states "$OUT/states" --init "$OUT/fit" --twin --losses distill=1 --train-only "gain|bias|up" \
    --learning-rate 2e-3 --linear-learning-rate 1e-5 --max-steps "$STEPS" --batch-size 1 --accumulation 4 \
    --vocabulary-size 16384 --seed 0 --out "$OUT/distilled"
hf-mot evaluate "$OUT/distilled" --tasks squad --data "$DATA" --arms native,no_context,translated,wrong_document,no_source \
    --no-cost --batch-size 16 --seed 0 --report "$OUT/squad"
hf-mot evaluate "$OUT/distilled" --text $VALID --limit 128 --arms $ARMS,wrong_source --gate --fit-text $TRAIN \
    --cost-context 1024 --batch-size 16 --seed 0 --report "$OUT/text"
hf-mot evaluate "$OUT/distilled" --text $VALID --context 1024 --limit 48 --arms $ARMS --no-cost --batch-size 4 --seed 0 \
    --report "$OUT/1024"
hf-mot evaluate "$OUT/distilled" --text $VALID --context 4096 --limit 16 --arms $ARMS --no-cost --batch-size 1 --seed 0 \
    --report "$OUT/4096"
