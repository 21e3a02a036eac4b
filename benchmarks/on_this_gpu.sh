#!/usr/bin/env bash
# Everything that needs a GPU: verified support, the fit of expected times, the tables and the plot, and the output of
# the GPU tests.
#
#   benchmarks/on_this_gpu.sh [DIR]        DIR: where results go, benchmarks/results/gpu if left out
#
# Run it where the package, its test requirements, matplotlib and whichever of flash-attn and flash-attn-4 there is are
# installed. Verified support and expected times are written into the package (nt_attention/kernels/verified, measured): read the
# difference before you commit it. A stage that fails does not stop the others; the script ends with what failed.
set -u
cd "$(dirname "$0")/.."
out=${1:-benchmarks/results/gpu}
jobs=${JOBS:-$(nproc)}
mkdir -p "$out"
export FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED=1 PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
failed=()

stage() { # a name, then a command; its output goes to DIR/NAME.txt
  local name=$1 began=$SECONDS
  shift
  "$@" >"$out/$name.txt" 2>"$out/$name.err" || failed+=("$name")
  echo "$name: $((SECONDS - began)) s"
}

stage check python -W ignore -m nt_attention check --jobs "$jobs" --save
stage fit_costs python -W ignore benchmarks/fit_costs.py --save nt_attention/kernels/measured/sm90.json
stage bench python -W ignore -m nt_attention bench --save "$out/bench"
stage bench_more python -W ignore -m nt_attention bench --save "$out/bench_more" \
  --batches "one long" "all 17" "all 1" window "GQA 32/1" "F d32" "F d80" "A d96" "A d192" "A d256" "E d256"
stage bench_float32 python -W ignore -m nt_attention bench --save "$out/bench_float32" --dtype float32 --batches A E "A d128"
stage host_time python -W ignore benchmarks/host_time.py
stage multihead_A python -W ignore benchmarks/multihead.py --batch A --embed-dim 1024 --heads 16
stage multihead_E python -W ignore benchmarks/multihead.py --batch E
stage transformer_encoder python -W ignore benchmarks/transformer_encoder.py
stage hugging_face python -W ignore benchmarks/hugging_face.py
stage decoding python -W ignore benchmarks/decoding.py
stage pytest_gpu python -W ignore -m pytest -m gpu -v -n "$jobs" -p no:cacheprovider tests
echo "failed: ${failed[*]:-nothing}"
[ ${#failed[@]} -eq 0 ]
