# Sourced by on_this_gpu.sh and on_this_cpu.sh: runs the parts of the command line, each for at most ten minutes.
set -u
cd "$(dirname "$0")/.."
failed=()

keep() { # a name of a result, then arguments of python
  local left=$((began + 600 - SECONDS)) since=$SECONDS
  if [ "$left" -le 0 ] || ! timeout "$left" python benchmarks/keep.py "$out" "$@"; then failed+=("$part: $*"); fi
  echo "$part: $* ($((SECONDS - since)) s)"
}

run_parts() { # the names of all parts; --part NAME, as often as you like, and DIR are in "$arguments"
  local chosen=() all=("$@")
  out=new_results
  set -- "${arguments[@]}"
  while [ $# -gt 0 ]; do
    case $1 in
      --part) chosen+=("${2:-}") && shift $(($# > 1 ? 2 : 1)) ;;
      --list) printf '%s\n' "${all[@]}" && exit ;;
      *) out=$1 && shift ;;
    esac
  done
  for part in "${chosen[@]}"; do
    declare -F "part_$part" >/dev/null || { echo "There is no part '$part'. --list names them." && exit 2; }
  done
  for part in "${chosen[@]:-${all[@]}}"; do
    began=$SECONDS
    "part_$part"
  done
  printf 'failed: %s\n' "${failed[@]:-nothing}"
  [ ${#failed[@]} -eq 0 ]
}
