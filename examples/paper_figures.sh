#!/bin/sh
# The paper's choices, SmolLM2-135M-Instruct -> Gemma-3-270m: its figures 22 (how channels are mapped), 23 (how many),
# 24 (layers with full attention), 30 (Top-S by length of the context) and Table 7 (translators, and how many a token), in
# kind: by short trainings of its literal form, STEPS x 4 sequences of 128 tokens, of which 64 are context.
#
#     sh examples/paper_figures.sh DATA OUT
#     python examples/paper_figures_report.py OUT --json model_cards/results/paper_figures.json \
#         --markdown model_cards/paper_figures.md
#
# DATA holds text/train and text/valid. What is there is skipped, a training goes on from its last checkpoint.
# PARTS="mapping grid" chooses among mapping (22, 23), grid (Table 7), layers (24) and sparse (30), which can run side by
# side once depth_ratio-0.3 is there: the last two are plans of that translator. Terminal channels lie at the end of the
# target and are paired from the end; the others lie in the middle.
set -eu
DATA=$1 OUT=$2
STEPS=${STEPS:-50} WIDTH=${WIDTH:-128} LIMIT=${LIMIT:-48} CONTEXT=${CONTEXT:-256}
PARTS=${PARTS:-mapping grid layers sparse} RATIOS=${RATIOS:-0.1 0.3 0.5 0.7 1.0} CONTEXTS=${CONTEXTS:-256 1024 4096}
DEPTH=${DEPTH:-18} # layers of the target, the shallower of the two
PAIR="--source ${SOURCE:-demo/smollm2-135m-instruct} --target ${TARGET:-demo/gemma-3-270m}"
TRAIN=$(ls "$DATA"/text/train/*) VALID=$(ls "$DATA"/text/valid/*)
RECIPE="--length 128 --context 64 --losses cc=1,pl=1 --batch-size 4 --accumulation 1"
mkdir -p "$OUT"

# A result from which no crashed arm is missing.
complete() { [ -f "$OUT/$1.json" ] && ! grep -q '"missing":' "$OUT/$1.json"; }

train() { # NAME MAPPING RATIO TRANSLATORS TOP_K
    [ ! -f "$OUT/$1/config.json" ] || return 0
    rest=$(awk "BEGIN { size = int($3 * $DEPTH + 0.5); print $DEPTH - (size > 1 ? size : 1) }")
    [ "$2" = terminal ] || rest=$((rest / 2))
    hf-mot train $PAIR --text $TRAIN --preset paper --channel-ratio "$3" --mapping "$2" --start "$rest" $RECIPE \
        --config hidden_size="$WIDTH" num_translators="$4" top_k="$5" --max-steps "$STEPS" --seed 0 --out "$OUT/$1"
    rm -rf "$OUT/$1/checkpoints"
}

measure() { # TRANSLATOR NAME CONTEXT LIMIT ARMS [OPTIONS...]; the windows of 256 tokens are read natively once
    dir=$OUT/$1 name=$2 context=$3 limit=$4 arms=$5
    shift 5
    ! complete "$name" || return 0
    native=$OUT/native-$context-$limit.jsonl
    [ ! -f "$native" ] || set -- "$@" --reuse "$native"
    hf-mot evaluate "$dir" $PAIR --text $VALID --context "$context" --limit "$limit" --arms "$arms" --batch-size 4 --seed 0 \
        --json "$OUT/$name.json" "$@"
    [ -f "$native" ] || cp "$OUT/$name.examples.jsonl" "$native"
}

point() { # NAME MAPPING RATIO TRANSLATORS TOP_K
    train "$@"
    measure "$1" "$1" "$CONTEXT" "$LIMIT" native,no_context,translated,wrong_source
}

curve() { # NAME CONTEXT LIMIT PLANS
    train depth_ratio-0.3 depth_ratio 0.3 2 1
    measure depth_ratio-0.3 "$1" "$2" "$3" native,no_context,translated --curve "$4"
}

for part in $PARTS; do
    case $part in
        mapping) for ratio in $RATIOS; do
            for mapping in depth_ratio terminal; do point "$mapping-$ratio" $mapping "$ratio" 2 1; done
        done ;;
        grid) for size in 1-1 2-1 2-2 4-1 4-2; do point "grid-$size" depth_ratio 0.3 "${size%-*}" "${size#*-}"; done ;;
        # Sliding layers whose window holds at most four times as many tokens keep it: fewer positions show more layers.
        layers) for top in 64 128; do
            plans=full
            for layers in ${LAYERS:-0 1 2 4 6 12}; do plans=$plans,sparse:$top/$layers; done
            curve "layers-$top" 1024 $((LIMIT / 2)) "$plans"
        done ;;
        sparse) for context in $CONTEXTS; do
            limit=$((context < 1024 ? LIMIT : context < 4096 ? LIMIT / 2 : LIMIT / 6))
            curve "sparse-$context" "$context" "$limit" full,sparse:16,sparse:32,sparse:64,sparse:128,sparse:256,sparse:512
        done ;;
    esac
done
