#!/bin/sh
# A gate in CI: three base runs are recorded once, and each later run is judged against them.
#     examples/gate.sh bench.py base/      exit code 4: it is slower beyond noise
set -e
python=${PYTHON:-python}
program=${1:-examples/loop.py}
base=${2:-base}
mkdir -p "$base"
for run in 1 2 3; do
    [ -e "$base/$run.cbtop" ] || $python -m cbtop run --quiet --record "$base/$run.cbtop" -- $python "$program"
done
rm -f "$base/new.cbtop"
$python -m cbtop run --quiet --record "$base/new.cbtop" -- $python "$program"
$python -m cbtop check --baseline "$base/1.cbtop" --baseline "$base/2.cbtop" --baseline "$base/3.cbtop" \
    --new "$base/new.cbtop"
