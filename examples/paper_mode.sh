#!/bin/sh
# The paper's mode, SmolLM2-135M-Instruct -> Gemma-3-270m: Mixture-of-Translators in its literal form (`--preset paper`,
# three tenths of the layers, plan full) beside a single backbone, its ablations, each departure of this package alone, an
# MLP and the closed form, all on the same text: STEPS x 4 sequences of 128 tokens, of which 64 are context.
#
#     sh examples/paper_mode.sh DATA OUT
#     python examples/paper_mode_report.py OUT --json model_cards/results/paper_mode.json --markdown model_cards/paper_mode.md
#
# DATA holds text/train and text/valid. There are two windows: the one from layer 0, and the one that a search chooses
# (START=6 takes that one without a search), where the runs in RUNS_THERE are repeated. A run whose result is there is
# skipped, a training goes on from its last checkpoint. RUNS="mot-0 single-0", WINDOWS=0 and ARMS choose. Once "control"
# is there, parts may run side by side. DTYPE=bfloat16 trains between models in that dtype, which "bf16" does in any case;
# all is measured in float32.
#
# The literal form reads no token embeddings of the target, so without a source nothing is left to read. The control of
# all runs of a window is therefore one translator without source that reads these embeddings; "best" has its own twin.
set -eu
DATA=$1 OUT=$2
STEPS=${STEPS:-200} SEARCH_STEPS=${SEARCH_STEPS:-30} WIDTH=${WIDTH:-256} RANK=${RANK:-1024}
LIMIT=${LIMIT:-128} CONTEXT=${CONTEXT:-256} START=${START:-} DTYPE=${DTYPE:-float32}
RUNS=${RUNS:-control mot-0 mot-1 mot-2 single-0 single-1 single-2 uniform-0 moe-0 mlp-0 bf16-0 closed-0 routing-0 \
    activation-0 position-0 embedding-0 best-0}
RUNS_THERE=${RUNS_THERE:-control mot-0 single-0 uniform-0 moe-0 closed-0}
PAIR="--source ${SOURCE:-demo/smollm2-135m-instruct} --target ${TARGET:-demo/gemma-3-270m}"
TRAIN=$(ls "$DATA"/text/train/*) VALID=$(ls "$DATA"/text/valid/*)
RECIPE="--length 128 --context 64 --losses cc=1,pl=1 --batch-size 4 --accumulation 1"
ARMS=${ARMS:-native,no_context,translated,no_source,wrong_document,native_wrong_document}
mkdir -p "$OUT"

json() { python -c "import json, sys; value = json.load(open(sys.argv[1]))$2; print(value)" "$1"; }

form() { # NAME: what differs from the paper's form, as fields of the config
    case $1 in
        control) echo "source_layers=[] embedding_window=5" ;;
        single) echo "num_translators=1" ;;
        uniform) echo "routing=uniform" ;;
        moe) echo "experts=ffn" ;;
        mlp) echo "method=mlp hidden_size=$((7 * WIDTH))" ;; # about as many parameters as a single backbone
        routing) echo "routing=straight_through" ;;
        activation) echo "output_activation=null" ;;
        position) echo "position_free=true" ;;
        embedding) echo "embedding_window=5" ;;
        best) echo "routing=straight_through output_activation=null position_free=true embedding_window=5 linear_path=true" ;;
    esac
}

train() { # DIR START NAME SEED [OPTION]
    dtype=$DTYPE
    [ "$3" != bf16 ] || dtype=bfloat16
    [ -f "$1/config.json" ] || hf-mot train $PAIR --text $TRAIN --preset paper --start "$2" $RECIPE --max-steps "$STEPS" \
        --config hidden_size="$WIDTH" $(form "$3") --seed "$4" --dtype "$dtype" --out "$1" ${5:-}
    # What the routers did is kept; gigabytes of optimizer are not.
    [ -f "$1/trainer_state.json" ] || cp "$1/checkpoints/checkpoint-$STEPS/trainer_state.json" "$1"
    rm -rf "$1/checkpoints" "$1/no_source/checkpoints"
}

# A result from which no crashed arm is missing.
complete() { [ -f "$1.json" ] && ! grep -q '"missing":' "$1.json"; }

measure() { # DIR RESULT [OPTIONS...]; what the target does without a translator is computed once
    dir=$1 result=$2
    shift 2
    [ ! -f "$OUT/native.jsonl" ] || set -- "$@" --reuse "$OUT/native.jsonl"
    hf-mot evaluate "$dir" $PAIR --text $VALID --limit "$LIMIT" --context "$CONTEXT" --arms $ARMS --batch-size 8 --seed 0 \
        --json "$result.json" "$@"
    [ -f "$OUT/native.jsonl" ] || cp "$result.examples.jsonl" "$OUT/native.jsonl"
}

run() { # START NAME SEED
    window=$OUT/start-$1 dir=$OUT/start-$1/$2-$3
    ! complete "$dir" || return 0
    train "$window/control" "$1" control 0
    case $2 in
        control) return 0 ;;
        closed) # fitted for all layers, of which the plan puts in those of the window
            [ -d "$OUT/closed" ] || hf-mot fit $PAIR --text $TRAIN --rank "$RANK" --tokens $((STEPS * 4 * 128)) \
                --statistics "$OUT/statistics.safetensors" --seed 0 --out "$OUT/closed"
            layers=$(json "$window/control/config.json" "['target_layers']; value = f'{value[0]}-{value[-1]}'")
            measure "$OUT/closed" "$dir" --replay "full:$layers"
            return 0
            ;;
        best) train "$dir" "$1" "$2" "$3" --twin ;;
        *)
            train "$dir" "$1" "$2" "$3"
            [ -d "$dir/no_source" ] || ln -s ../control "$dir/no_source"
            ;;
    esac
    measure "$dir" "$dir"
}

if [ -z "$START" ]; then
    # Windows are compared on the last file of the training text: no document that judges has a part in the choice.
    [ -f "$OUT/search/report.json" ] || hf-mot search-channels $PAIR --text $(echo "$TRAIN" | sed '$d') \
        --eval-text "$(echo "$TRAIN" | tail -n 1)" --preset paper $RECIPE --config hidden_size="$WIDTH" \
        --max-steps "$SEARCH_STEPS" --eval-limit 16 --seed 0 --out "$OUT/search"
    START=$(json "$OUT/search/report.json" "['best']['start']")
fi
[ "$START" = 0 ] || WINDOWS=${WINDOWS:-0 $START}
for start in ${WINDOWS:-0}; do
    for name in $RUNS; do
        case "$start $RUNS_THERE " in "0 "* | *" $name "*) run "$start" "${name%-*}" "${name##*-}" ;; esac
    done
done
