#!/usr/bin/env bash
# Measure the kept results on this CPU, in at most LIMIT seconds, 1200 unless it is set.
#
#   benchmarks/on_this_cpu.sh [--only NAME] [DIR]    all results that are not in DIR yet, or one of them; DIR: new_results
#   python benchmarks/keep.py --merge DIR            puts them into benchmarks/results, and their tables into the pages
#
# Install the package with its extras "demo" and "dev" first. OMP_NUM_THREADS is 2 unless it is set.
. "$(dirname "$0")/parts.sh"
export CUDA_VISIBLE_DEVICES= OMP_NUM_THREADS="${OMP_NUM_THREADS:-2}" COLUMNS=120

keep 300 attention benchmarks/cpu_attention.py --repeats 5
keep 200 embedding benchmarks/sentence_embeddings.py --models minilm --paragraphs 128 --rounds 3
keep 200 embedding examples/embed_paragraphs.py --every 6
keep 200 trainers benchmarks/trainers.py --steps 4 --rounds 2 --batch-size 8
finish
