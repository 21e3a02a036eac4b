#!/usr/bin/env bash
# Measure the kept results on this GPU: the most useful first, in at most LIMIT seconds, 1200 unless it is set.
#
#   benchmarks/on_this_gpu.sh [--only NAME] [DIR]    all results that are not in DIR yet, or one of them; DIR: new_results
#   benchmarks/on_this_gpu.sh --compile "NAME …"     runs these all at once before, so that their kernels are compiled
#   python benchmarks/keep.py --merge DIR            puts them into benchmarks/results, and their tables into the pages
#
# With several GPUs it measures context parallelism as well. Set CUDA_VISIBLE_DEVICES to use one of them.
# Install the package with its extra "dev" first, and flash-attn-4. Where there is no git, set COMMIT.
. "$(dirname "$0")/parts.sh"
export FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED=1 PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"

# each step has other sizes, and padded Llama needs most of the memory
PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True keep 300 hugging_face benchmarks/hugging_face.py --steps 7
keep 120 backends benchmarks/backends.py
keep 90 transformer_encoder benchmarks/transformer_encoder.py --rounds 7
keep 120 tree_attention benchmarks/tree_attention.py --rounds 7 --shapes 8
keep 240 held_out benchmarks/held_out.py --seed 20261130 --processes 15 --minutes 2
keep 120 continuous_batching benchmarks/continuous_batching.py --rounds 2
for task in pairs cross triplets cached; do
  keep 100 small_models benchmarks/small_models.py $task --warm-up 60 --rounds 3
done
keep 80 classification benchmarks/trainers.py --device cuda --task classification --batch-size 32 --steps 60 --warm 40 --rounds 2
keep 180 shared_prefixes_steps benchmarks/shared_prefixes_steps.py --rounds 3
for total in "causal --rows 56" "pairs --model bert --rows 426"; do
  keep 240 total_time benchmarks/small_models.py $total --total 500 --ways patch 'cuda_graphs="auto"'
done
keep 60 multihead benchmarks/multihead.py --workload A --embed-dim 1024 --heads 16
keep 40 multihead benchmarks/multihead.py --workload E
keep 90 hybrids benchmarks/hybrids.py --models qwen3_5 --width 1024 --rounds 3
keep 150 trainers benchmarks/trainers.py --device cuda --rounds 2
keep 100 paged_decoding benchmarks/paged_decoding.py --parts workloads --rounds 5
keep 60 cuda_graphs benchmarks/cuda_graphs.py
keep 120 host_time benchmarks/host_time.py
for model in bert modernbert; do
  keep 140 compiled_models benchmarks/hugging_face.py --models $model --steps 6 \
    --ways "padded, compiled" "patch, compiled" "graphs, compiled"
done
keep 80 patch_time benchmarks/patch_time.py --device cuda --rounds 3
keep 60 encoder_layers benchmarks/encoder_layers.py --rounds 5
gpus=$(python -c 'import torch; print(torch.cuda.device_count())')
if [ "$gpus" -gt 1 ]; then
  keep 300 "context_parallel_$gpus" -m torch.distributed.run --nproc-per-node "$gpus" benchmarks/context_parallel.py
fi
finish
