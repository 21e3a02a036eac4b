#!/usr/bin/env bash
# Measure the kept results on this GPU, in parts of at most ten minutes: what is not done by then is named as failed.
#
#   benchmarks/on_this_gpu.sh [--part NAME]... [DIR]    all parts that measure, or those named; DIR: new_results
#   benchmarks/on_this_gpu.sh --list                    the names of the parts
#   python benchmarks/keep.py --merge DIR               puts what was measured into benchmarks/results
#
# Install the package with its extra "dev" first, and flash-attn-4 if it should be measured. Parts "check" and
# "costs" run by name only: they write verified support and expected times into the package (nt_attention/kernels/verified
# and measured). Read the difference and commit it before you measure. Where there is no git, set COMMIT.
arguments=("$@")
. "$(dirname "$0")/parts.sh"
export FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED=1 PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
jobs=${JOBS:-$(nproc)}
gpus=$(nvidia-smi -L 2>/dev/null | wc -l)
case $(nvidia-smi -L 2>/dev/null) in *H100*) bandwidth=3.0 ;; *) bandwidth=4.3 ;; esac # TB/s

stage() { # a name, then a command; its output is written to DIR/NAME.txt
  local name=$1 since=$SECONDS
  shift
  mkdir -p "$out"
  "$@" >"$out/$name.txt" 2>"$out/$name.err" || failed+=("$name")
  echo "$name: $((SECONDS - since)) s"
}

part_check() { stage check python -W ignore tools/verify_backends.py --jobs "$jobs" --save; }
part_costs() {
  local card
  card=$(python -c 'import torch; from nt_attention.kernels.measurements import slug; print(slug(torch.cuda.get_device_name()))')
  stage tune python -W ignore -m nt_attention tune --minutes 7 --save "nt_attention/kernels/measured/$card.json"
  stage held_out python -W ignore benchmarks/held_out.py --minutes 2 --rows "$out/held_out.json"
}

bench() { keep "$1" benchmarks/backends.py "${@:2}"; }
part_backends() {
  bench backends
  bench backends --workloads "one long"
  keep backends -m nt_attention bench --lengths equal:17 --heads 12
  keep backends -m nt_attention bench --lengths equal:1 --heads 12
  bench backends --workloads A --options window_size=128,128
  bench backends --workloads B --kv-heads 1
  keep backends benchmarks/multihead.py --workload A --embed-dim 1024 --heads 16
  keep backends benchmarks/multihead.py --workload E
}
part_head_dims() {
  local workload heads head_dim
  for model in "F 24 32" "F 9 80" "A 10 96" "A 5 192" "A 4 256" "E 3 256" "A 2 512"; do
    read -r workload heads head_dim <<<"$model"
    bench head_dims --workloads "$workload" --heads "$heads" --head-dim "$head_dim"
  done
  bench head_dims --dtype float32 --workloads A E
  bench head_dims --dtype float32 --workloads A --heads 8 --head-dim 128
}
part_host() {
  keep host_time benchmarks/host_time.py
  keep operator_host_time benchmarks/operator_host_time.py --bursts 60
  keep bounds benchmarks/bounds.py --rounds 5
}
part_modules() {
  keep transformer_encoder benchmarks/transformer_encoder.py
  keep transformer_encoder benchmarks/transformer_encoder.py --workloads F E A --rounds 12
}
part_models() {
  keep hugging_face benchmarks/hugging_face.py --models llama llama-base bert --rounds 15
  keep hugging_face benchmarks/decoding.py
  keep trainers benchmarks/trainers.py --device cuda
}
part_more_models() { keep more_models benchmarks/hugging_face.py --models camembert mixtral olmo2 gemma bart --rounds 9; }
part_relative_bias() { keep relative_bias_models benchmarks/hugging_face.py --models mpnet deberta-v3 t5 --rounds 9; }
part_hybrids() {
  keep hybrids benchmarks/hybrids.py --models nemotron_h --width 2048
  keep hybrids benchmarks/hybrids.py --models qwen3_5 --width 1024
  keep encoder_layers benchmarks/encoder_layers.py --rounds 10
  keep hybrids benchmarks/hybrids.py --models lfm3 --width 2048 # last: transformers 5.17 has no lfm3
}
part_compiled_bert() { keep compiled_bert benchmarks/compiled_models.py bert; }
part_compiled_modernbert() { keep compiled_modernbert benchmarks/compiled_models.py modernbert; }
part_compiled_llama() { keep compiled_llama benchmarks/compiled_models.py llama; }
part_compiled_encoder() { keep compiled_encoder benchmarks/compiled_models.py encoder; }
part_cuda_graphs() { keep cuda_graphs benchmarks/cuda_graphs.py --parts speed torch --compiled --rounds 25; }
part_cuda_graphs_batches() {
  keep cuda_graphs_batches benchmarks/cuda_graphs.py --parts batches replays
  keep cuda_graphs_batches benchmarks/sentence_embeddings.py --models minilm --paragraphs 0 --batch-size 32 \
    --dtype float16 --cuda-graphs --rounds 3
}
training_graphs() { # a workload, then the ways in two processes
  local run=(benchmarks/training_graphs.py "$1" --warm-up-seconds 200 --ways patched)
  keep "training_graphs_${1/:/_}" "${run[@]}" "patched, compiled" "with graphs, compiled"
  keep "training_graphs_${1/:/_}" "${run[@]}" "reduce-overhead, dynamic" "reduce-overhead, static"
}
part_training_graphs_128() { training_graphs bert:128; }
part_training_graphs_512() { training_graphs bert:512; }
part_training_graphs_modernbert() {
  keep training_graphs_modernbert benchmarks/training_graphs.py modernbert:512 --warm-up-seconds 245 \
    --ways patched "patched, compiled" "with graphs" "with graphs, compiled"
}
part_paged() {
  keep paged_decoding benchmarks/paged_decoding.py --bandwidth "$bandwidth" --parts answers --least-bytes 0 --rounds 11
  keep paged_decoding benchmarks/paged_decoding.py --bandwidth "$bandwidth" --parts workloads --rounds 7
}
part_paged_grid() { keep paged_decoding_grid benchmarks/paged_decoding.py --bandwidth "$bandwidth" --parts prefill grid --rounds 7; }
part_trees() {
  keep tree_attention benchmarks/tree_attention.py --rounds 11
  keep shared_prefixes_steps benchmarks/shared_prefixes_steps.py
}
part_embeddings() { keep embedding benchmarks/sentence_embeddings.py --paragraphs 0; }
several() { keep "$1" -m torch.distributed.run --nproc-per-node "$gpus" "benchmarks/$1.py" "${@:2}"; }
part_several_gpus() { several context_parallel --rounds 11; }
part_several_gpus_training() { several context_parallel_training; }
part_tests() { keep pytest_gpu -m pytest -m gpu -q -rfEs --tb=short -n "$jobs" -p no:cacheprovider tests; }

all=(backends head_dims host modules models more_models relative_bias hybrids)
all+=(compiled_bert compiled_modernbert compiled_llama compiled_encoder)
all+=(cuda_graphs cuda_graphs_batches training_graphs_128 training_graphs_512 training_graphs_modernbert)
all+=(paged paged_grid trees embeddings tests)
[ "$gpus" -gt 1 ] && all+=(several_gpus several_gpus_training)
run_parts "${all[@]}"
