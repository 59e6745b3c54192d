#!/usr/bin/env bash
# Checks of one bare GPU machine: Python with torch, transformers and triton; no Ray, no SGLang, no
# network. Each part ends within ten minutes, and is begun again where an earlier command ended.
#
#   benchmarks/gpu/kit.sh                     every part, in order of worth, one after the other
#   benchmarks/gpu/kit.sh learner sharding    these parts: one command of at most ten minutes each
#   benchmarks/gpu/kit.sh device=cpu size=tiny [PART ...]     a rehearsal
#   OUT=DIR benchmarks/gpu/kit.sh ...         results.jsonl and logs there; outputs/gpu by default
#   WHEELS=DIR benchmarks/gpu/kit.sh ...      wheels of what the machine lacks (chz), carried along
set -u
cd "$(dirname "$0")/../.."
OUT=${OUT:-outputs/gpu}
mkdir -p "$OUT" && OUT=$(cd "$OUT" && pwd) || exit 2
PYTHON=${PYTHON:-python3}
# By worth: is the learner right and how fast; the sharded one; a whole run; attention; the memory
# plan; single pieces; a push; compiled layers.
ALL="learner sharding local attention memory pieces push compiling"

parts="" settings=""
for word in "$@"; do
    case $word in
        *=*) settings="$settings $word" ;;
        *) parts="$parts $word" ;;
    esac
done

export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" TOKENIZERS_PARALLELISM=false
if ! "$PYTHON" -c 'import chz' 2>/dev/null; then
    site=$OUT/site
    "$PYTHON" -m pip install --quiet --no-index --no-deps --target "$site" "${WHEELS:-wheels}"/*.whl ||
        exit 2
    export PYTHONPATH="$PYTHONPATH:$site"
fi
nvidia-smi --query-gpu=name,memory.total,driver_version,clocks.sm,ecc.mode.current \
    --format=csv 2>/dev/null

failed=0
for part in ${parts:-$ALL}; do
    # shellcheck disable=SC2086 - settings are words
    "$PYTHON" -m benchmarks.gpu only="$part" out="$OUT" scratch="$OUT/scratch" resume=True \
        budget_s=570 $settings || failed=1
done
exit $failed
