# Sourced by on_this_gpu.sh and on_this_cpu.sh. Each result is written when it is measured. What is there already is not
# measured again, so the same command goes on where it stopped.
set -u
cd "$(dirname "$0")/.."
out=new_results only= compile= failed=()
while [ $# -gt 0 ]; do
  case $1 in
    --only) only=$2 && shift 2 ;;
    --compile) compile=" $2 " && shift 2 ;;
    *) out=$1 && shift ;;
  esac
done

keep() { # the most seconds, the name of a result, then arguments of python
  local left=$((${LIMIT:-1200} - SECONDS)) most=$1 since=$SECONDS
  shift
  [ -n "$only" ] && [ "$1" != "$only" ] && return
  if [ -n "$compile" ]; then
    [[ $compile == *" $1 "* ]] && timeout "$most" python -W ignore "${@:2}" &> /dev/null &
    return
  fi
  [ "$left" -lt "$most" ] && most=$left
  if [ "$most" -lt 15 ]; then
    failed+=("$*: no time was left")
  elif python benchmarks/keep.py --seconds "$most" "$out" "$@"; then
    echo "$SECONDS s: $* ($((SECONDS - since)) s)"
  else
    failed+=("$*") && echo "$SECONDS s: $* failed: $(tail -n 1 "$out"/"$1"_*.err | cut -c1-200)"
  fi
}

finish() {
  [ -n "$compile" ] && wait && return
  printf 'not measured: %s\n' "${failed[@]:-nothing}"
  [ ${#failed[@]} -eq 0 ]
}
