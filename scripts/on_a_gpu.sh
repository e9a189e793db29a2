#!/usr/bin/env bash
# Measure on a GPU, in at most 40 minutes and what tells most first: scripts/on_a_gpu.sh OUT
#
# OUT gets a log and the results of each step: costs_FAMILY_DTYPE_BATCH.json of `attn-reg bench`, models.json of compiled
# and sharded models, and the encoders' results.json. A step that fails or takes too long is told, and the next one runs.
#
# DEVICE=cpu      the same at toy size, to try the script
# GLUE=FOLDER     GLUE's folders, for the list of encoders, which takes longer (default: no encoders)
# ENCODER=FOLDER  their model, such as BERT-base, as the hub has it (default: MiniLM, of a package)
# POOLING=first   what their head reads, where they were not trained by the mean of their tokens (default: mean)
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
(($# == 1)) || { echo "usage: scripts/on_a_gpu.sh OUT" >&2 && exit 2; }
mkdir -p "$1" && out=$(cd "$1" && pwd) device=${DEVICE:-cuda}
[[ -n ${ATTN_REG_VENV:-} || ! -d $root/.venv ]] || ATTN_REG_VENV=$root/.venv
[[ -z ${ATTN_REG_VENV:-} ]] || export PATH="$ATTN_REG_VENV/bin:$PATH"
cd "$root"

size=base batches=(16 64 256) repeats=(--repeats 7 --warmup 2) part=()
models=("bert float32" "fairseq float32" "bert bfloat16" "fairseq bfloat16")
if [[ $device != cuda ]]; then
    size=tiny batches=(2) repeats=(--repeats 1 --warmup 0) part=(--collect-only tests/bench)
    models=("bert bfloat16" "fairseq float32")
fi
methods=ad_drop,tokens,random,attend_out,attention_dropout,head_drop,inactive,ad_drop_cross_tuned,naive
[[ $device == cuda ]] || methods=tokens,inactive
failed=0

step() { # step NAME SECONDS COMMAND...: in the log of its name
    local name=$1 seconds=$2 began=$SECONDS status=done
    shift 2
    timeout "$seconds" "$@" >"$out/$name.log" 2>&1 </dev/null || { status="failed ($?)" && failed=1; }
    printf '%-28s %s in %s s\n' "$name" "$status" "$((SECONDS - began))" | tee -a "$out/steps.txt"
}

step tests 420 python -m pytest -q -m gpu "${part[@]}"
for batch in "${batches[@]}"; do
    for model in "${models[@]}"; do
        read -r family dtype <<<"$model"
        step "costs_${family}_${dtype}_$batch" 90 attn-reg bench --family "$family" --size "$size" --batch "$batch" \
            --dtype "$dtype" --device "$device" "${repeats[@]}" --methods "$methods" \
            --json "$out/costs_${family}_${dtype}_$batch.json"
    done
done
step models 180 python scripts/gpu_models.py "$out/models.json" --device "$device"
if [[ -n ${GLUE:-} ]]; then
    encoder=(--jobs 8 ${ENCODER:+--model "$ENCODER"})
    pooling=(-- --pooling "${POOLING:-mean}")
    for shots in 16 64 256; do
        step "few_shot_$shots" 300 attn-reg run examples/evidence/few_shot.yaml --shots "$shots" \
            --data "$GLUE/SST-2" --out "$out/few_shot" "${encoder[@]}" "${pooling[@]}"
    done
    for task in rte cola mrpc qnli stsb; do
        step "regime_$task" 400 attn-reg run examples/evidence/glue_regime.yaml --task "$task" --data "$GLUE" \
            --out "$out/glue_regime" "${encoder[@]}" "${pooling[@]}"
    done
    step data 60 python scripts/evidence_data.py "$GLUE" "$out/data"
    for task in cola mrpc stsb; do
        step "encoders_$task" 300 attn-reg run examples/evidence/encoders.yaml --task "$task" --data "$out/data" \
            --out "$out/encoders" "${encoder[@]}"
    done
fi
exit $failed
