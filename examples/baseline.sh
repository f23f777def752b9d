#!/bin/sh
# The baseline report: SmolLM2-135M-Instruct -> Gemma-3-270m and back, closed-form translators, by every arm.
#
#     sh examples/baseline.sh DATA OUT
#
# DATA holds text/train, text/valid and the tasks' folders. Each command goes on where a killed run of it stopped, so
# this can be started again at any time; a step that is done is not repeated. On 2 cores all of it takes many hours:
# set STEPS to the parts that are wanted, of "fit text squad controls tasks", PLANS to "none" or "full", and
# DIRECTIONS to "smol-to-gemma" or "gemma-to-smol".
set -eu
DATA=$1 OUT=$2
STEPS=${STEPS:-fit text squad controls tasks}
PLANS=${PLANS:-none full}
DIRECTIONS=${DIRECTIONS:-smol-to-gemma gemma-to-smol}
TRAIN=$(ls "$DATA"/text/train/*.txt.gz) VALID=$(ls "$DATA"/text/valid/*.txt.gz)
SMOL=demo/smollm2-135m-instruct GEMMA=demo/gemma-3-270m
MAIN=native,no_context,translated,wrong_document,no_source,raw_copy
mkdir -p "$OUT"

step() { case " $STEPS " in *" $1 "*) true ;; *) false ;; esac; }

run() { # DIRECTION PLAN PART ARGUMENTS...: an evaluation, unless it is done
    name=$1-$2-$3 known=$OUT/$1-none-$3/examples.jsonl plan=$2 reuse=
    shift 3
    # What no translator plays a part in is the same under both plans.
    if [ "$plan" != none ] && [ -f "$known" ]; then reuse="--reuse $known"; fi
    if [ ! -f "$OUT/$name/report.json" ]; then
        hf-mot evaluate "$OUT/${name%%-"$plan"-*}" "$@" --replay "$plan" $reuse --seed 0 --batch-size 16 \
            --report "$OUT/$name"
    fi
}

pair() { # DIRECTION SOURCE TARGET RANK TOKENS
    case " $DIRECTIONS " in *" $1 "*) ;; *) return 0 ;; esac
    if step fit && [ ! -d "$OUT/$1" ]; then
        hf-mot fit --source "$2" --target "$3" --text $TRAIN --rank "$4" --flops-share 0.125 --tokens "$5" --seed 0 \
            --out "$OUT/$1"
    fi
    for plan in $PLANS; do
        if step text; then
            run "$1" $plan text --text $VALID --limit 128 --arms all --fit-text $TRAIN --gate --cost-context 1024
        fi
        if step squad; then
            run "$1" $plan squad --tasks squad --data "$DATA" --arms $MAIN --no-cost
        fi
        if step controls; then
            run "$1" $plan controls --tasks squad --data "$DATA" --limit 100 --arms all --no-cost
        fi
        if step tasks; then
            for task in boolq pubmedqa mmlu_redux hotpotqa; do
                run "$1" $plan $task --tasks $task --data "$DATA" --limit 100 --arms $MAIN --no-cost
            done
        fi
    done
}

pair smol-to-gemma $SMOL $GEMMA 1536 200000
pair gemma-to-smol $GEMMA $SMOL 1024 150000
