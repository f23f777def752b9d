#!/bin/sh
# The baseline report: SmolLM2-135M-Instruct -> Gemma-3-270m and back, closed-form translators, by every arm.
#
#     sh examples/baseline.sh DATA OUT
#
# DATA holds text/train, text/valid and the tasks' folders. Each command goes on where a killed run of it stopped, so
# this can be started again at any time; a step that is done is not repeated. On 2 cores all of it takes many hours:
# set STEPS to the parts that are wanted, of "fit text squad controls tasks", and DIRECTIONS to "smol-to-gemma" or
# "gemma-to-smol". Where all layers are translated, plan full gives the cache of plan none, so there is one plan.
set -eu
DATA=$1 OUT=$2
STEPS=${STEPS:-fit text squad controls tasks}
DIRECTIONS=${DIRECTIONS:-smol-to-gemma gemma-to-smol}
TRAIN=$(ls "$DATA"/text/train/*.txt.gz) VALID=$(ls "$DATA"/text/valid/*.txt.gz)
SMOL=demo/smollm2-135m-instruct GEMMA=demo/gemma-3-270m
MAIN=native,no_context,translated,wrong_document,no_source
mkdir -p "$OUT"

step() { case " $STEPS " in *" $1 "*) true ;; *) false ;; esac; }

# A report from which no crashed arm is missing; that its gate says no is a result too.
complete() { [ -f "$1/report.json" ] && ! grep -q '"missing":' "$1/report.json"; }

run() { # DIRECTION PART ARGUMENTS...: an evaluation, unless it is done
    name=$1-none-$2 translator=$1
    shift 2
    complete "$OUT/$name" || hf-mot evaluate "$OUT/$translator" "$@" --replay none --seed 0 --no-cost \
        --report "$OUT/$name" || complete "$OUT/$name"
}

pair() { # DIRECTION SOURCE TARGET RANK TOKENS
    case " $DIRECTIONS " in *" $1 "*) ;; *) return 0 ;; esac
    if step fit && [ ! -d "$OUT/$1" ]; then
        hf-mot fit --source "$2" --target "$3" --text $TRAIN --rank "$4" --flops-share 0.125 --source-window 1 --tokens "$5" \
            --seed 0 --out "$OUT/$1"
    fi
    if step text; then
        run "$1" text --text $VALID --limit 128 --arms all --fit-text $TRAIN --gate --batch-size 16
    fi
    if step squad; then
        run "$1" squad --tasks squad --data "$DATA" --arms $MAIN --batch-size 16
    fi
    if step controls; then
        run "$1" controls --tasks squad --data "$DATA" --limit 100 --arms all --batch-size 8
    fi
    if step tasks; then
        for task in boolq mmlu_redux pubmedqa; do
            run "$1" $task --tasks $task --data "$DATA" --limit 100 --arms $MAIN,raw_copy --batch-size 8
        done
        run "$1" hotpotqa --tasks hotpotqa --data "$DATA" --limit 100 --arms $MAIN --batch-size 4
    fi
}

pair smol-to-gemma $SMOL $GEMMA 1536 200000
pair gemma-to-smol $GEMMA $SMOL 1024 150000
