#!/usr/bin/env bash
# Everything that needs a GPU, in one command, on a machine without network: tests, then benchmarks, a table last.
# Arguments go to benchmarks/run.py. Logs and numbers go to $OUT, by default benchmarks/results. $PYTHON chooses Python.
set -uo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
out=${OUT:-benchmarks/results}
mkdir -p "$out"
status=0

if ! "$python" -c "import fusepass.codegen" 2>"$out/install.log"; then
    "$python" -m pip install --quiet --no-index --no-deps --no-build-isolation --editable . \
        2>&1 | tee "$out/install.log" || exit 1
fi

tests=(tests -m gpu -q)
if ! "$python" -c "import hypothesis" 2>/dev/null; then
    echo "hypothesis is missing: property tests are skipped"
    tests+=(--ignore=tests/property)
fi
"$python" -m pytest "${tests[@]}" 2>&1 | tee "$out/tests.log" || status=$?

"$python" benchmarks/run.py --device cuda --json "$out/benchmarks.json" "$@" 2>&1 | tee "$out/benchmarks.log" || status=$?

echo "tests: $(tail -n 1 "$out/tests.log")"
exit "$status"
