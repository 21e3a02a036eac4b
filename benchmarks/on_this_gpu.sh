#!/usr/bin/env bash
# Run everything that needs a GPU: verify the backends, measure expected times, run the benchmarks and the GPU tests.
#
#   benchmarks/on_this_gpu.sh [DIR]        DIR: the directory of the results; benchmarks/results/gpu by default
#
# Install the package with its extras "cli" and "dev" first, and flash-attn and flash-attn-4 if they should be measured.
# Verified support and expected times are written into the package (nt_attention/kernels/verified and measured). Read the
# difference before you commit it. If a stage fails, the others run. The last line names the stages that failed.
set -u
cd "$(dirname "$0")/.."
out=${1:-benchmarks/results/gpu}
jobs=${JOBS:-$(nproc)}
mkdir -p "$out"
export FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED=1 PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
failed=()

stage() { # a name, then a command; its output is written to DIR/NAME.txt
  local name=$1 began=$SECONDS
  shift
  "$@" >"$out/$name.txt" 2>"$out/$name.err" || failed+=("$name")
  echo "$name: $((SECONDS - began)) s"
}

stage check python -W ignore -m nt_attention check --jobs "$jobs" --save
card=$(python -c 'import torch; from nt_attention.kernels.measurements import slug; print(slug(torch.cuda.get_device_name()))')
stage tune python -W ignore -m nt_attention tune --minutes 30 --save "nt_attention/kernels/measured/$card.json"
stage held_out python -W ignore -m nt_attention tune --held-out 60 --rows "$out/held_out.json"
bench() { # a name, then arguments of bench
  local name=$1
  shift
  stage "bench_$name" python -W ignore -m nt_attention bench "$@"
}
bench A_to_E
bench one_long --workloads "one long"
bench all_17 --lengths equal:17
bench all_1 --lengths equal:1
bench window --workloads A --options window_size=128,128
bench one_key_head --workloads B --kv-heads 1
for model in "F 24 32" "F 9 80" "A 10 96" "A 5 192" "A 4 256" "E 3 256"; do
  read -r workload heads head_dim <<<"$model"
  bench "${workload}_$head_dim" --workloads "$workload" --heads "$heads" --head-dim "$head_dim"
done
bench float32 --dtype float32 --workloads A E
bench float32_A_128 --dtype float32 --workloads A --heads 8 --head-dim 128
stage host_time python -W ignore benchmarks/host_time.py
stage operator_host_time python -W ignore benchmarks/operator_host_time.py
stage multihead_A python -W ignore benchmarks/multihead.py --workload A --embed-dim 1024 --heads 16
stage multihead_E python -W ignore benchmarks/multihead.py --workload E
stage transformer_encoder python -W ignore benchmarks/transformer_encoder.py
stage hugging_face python -W ignore benchmarks/hugging_face.py
for model in bert modernbert llama encoder; do
  stage "compiled_$model" python -W ignore benchmarks/compiled_models.py "$model"
done
stage small_batches python -W ignore benchmarks/small_batches.py
stage sentence_embeddings python -W ignore benchmarks/sentence_embeddings.py --paragraphs 0
stage decoding python -W ignore benchmarks/decoding.py
if [ "$(nvidia-smi -L | wc -l)" -gt 1 ]; then
  for name in context_parallel context_parallel_training; do
    stage "$name" python -W ignore -m torch.distributed.run --nproc-per-node 2 "benchmarks/$name.py"
  done
fi
stage pytest_gpu python -W ignore -m pytest -m gpu -v -n "$jobs" -p no:cacheprovider tests
echo "failed: ${failed[*]:-nothing}"
[ ${#failed[@]} -eq 0 ]
