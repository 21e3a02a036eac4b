#!/usr/bin/env bash
# Measure the kept results on this CPU, in parts of at most ten minutes: what is not done by then is named as failed.
#
#   benchmarks/on_this_cpu.sh [--part NAME]... [DIR]    all parts, or those named; DIR: new_results
#   benchmarks/on_this_cpu.sh --list                    the names of the parts
#   python benchmarks/keep.py --merge DIR               puts what was measured into benchmarks/results
#
# Install the package with its extras "demo" and "dev" first. OMP_NUM_THREADS is 2 unless it is set.
arguments=("$@")
. "$(dirname "$0")/parts.sh"
export CUDA_VISIBLE_DEVICES= OMP_NUM_THREADS="${OMP_NUM_THREADS:-2}"

part_attention() { keep attention benchmarks/cpu_attention.py --repeats 9; }
part_compiled_layer() { keep compiled_layer benchmarks/compiled_layer_cpu.py; }
part_embedding() {
  keep embedding examples/embed_paragraphs.py
  keep embedding examples/sentence_embeddings.py --limit 0
  keep embedding examples/fine_tune_with_trainer.py
  keep embedding benchmarks/sentence_embeddings.py --paragraphs 128 --rounds 3
}
part_trainers() { keep trainers benchmarks/trainers.py --threads "$OMP_NUM_THREADS" --steps 4 --rounds 3 --batch-size 8; }
part_patch() {
  keep patch_time benchmarks/patch_time.py
  keep fallbacks benchmarks/fallbacks.py
}
part_simulation() { keep simulated_context_parallel benchmarks/simulate_context_parallel.py; }
part_random_configs() { keep random_configs tests/helpers/random_configs.py --count 100 --jobs "$(nproc)" --seconds 560; }

run_parts attention compiled_layer embedding trainers patch simulation random_configs
