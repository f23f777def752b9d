#!/bin/sh
# The baseline report: SmolLM2-135M-Instruct -> Gemma-3-270m and back, closed-form translators, by every arm.
#
#     sh examples/baseline.sh DATA OUT
#
# DATA holds text/train, text/valid and the tasks' folders. Each command goes on where a killed run of it stopped, so
# this can be started again at any time; a step that is done is not repeated. On 2 cores all of it takes many hours:
# set STEPS to the parts that are wanted, of "fit text squad controls tasks".
set -eu
DATA=$1 OUT=$2
STEPS=${STEPS:-fit text squad controls tasks}
TRAIN=$(ls "$DATA"/text/train/*.txt.gz) VALID=$(ls "$DATA"/text/valid/*.txt.gz)
SMOL=demo/smollm2-135m-instruct GEMMA=demo/gemma-3-270m
MAIN=native,no_context,translated,wrong_document,no_source,ridge,raw_copy
mkdir -p "$OUT"

step() { case " $STEPS " in *" $1 "*) true ;; *) false ;; esac; }

run() { # NAME ARGUMENTS...: an evaluation, unless it is done
    name=$1
    shift
    [ -f "$OUT/$name/report.json" ] || hf-mot evaluate "$@" --seed 0 --batch-size 16 --report "$OUT/$name"
}

pair() { # DIRECTION SOURCE TARGET TOKENS
    if step fit && [ ! -d "$OUT/$1" ]; then
        hf-mot fit --source "$2" --target "$3" --text $TRAIN --tokens "$4" --seed 0 --out "$OUT/$1"
    fi
    for plan in none full; do
        if step text; then
            run "$1-$plan-text" "$OUT/$1" --text $VALID --limit 128 --arms all --fit-text $TRAIN --gate \
                --replay $plan --cost-context 1024
        fi
        if step squad; then
            run "$1-$plan-squad" "$OUT/$1" --tasks squad --data "$DATA" --arms $MAIN --replay $plan --no-cost
        fi
        if step controls; then
            run "$1-$plan-controls" "$OUT/$1" --tasks squad --data "$DATA" --limit 100 --arms all --replay $plan \
                --no-cost
        fi
        if step tasks; then
            for task in boolq pubmedqa mmlu_redux hotpotqa; do
                run "$1-$plan-$task" "$OUT/$1" --tasks $task --data "$DATA" --limit 100 --arms $MAIN --replay $plan \
                    --no-cost
            done
        fi
    done
}

pair smol-to-gemma $SMOL $GEMMA 200000
pair gemma-to-smol $GEMMA $SMOL 100000
