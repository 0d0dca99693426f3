#!/usr/bin/env bash
# Measure a command at the base commit and in this checkout, and judge the difference with `cbtop check`.
# action.yml runs this script in $GITHUB_WORKSPACE, and passes its inputs as GATE_*. The exit code is that of the check.
set -euo pipefail
unset $(git rev-parse --local-env-vars)  # for example GIT_INDEX_FILE, which names the index of a different checkout

fail() {
  echo "::error title=cbtop gate::$1"
  exit "${2:-2}"
}

check() {
  # -P: cbtop must not import files from the project's directory
  "$GATE_PYTHON" -P -m cbtop check "$@" -- bash -eo pipefail -c "$GATE_COMMAND"
}

[ -n "$GATE_COMMAND" ] || fail 'the input command is empty; pass a command, such as "python bench.py"'
[ -n "$GATE_BASELINE" ] || fail 'this event has no pull request; pass the commit to compare with as the input baseline'
# the base commit is missing if the checkout is shallow
if ! git cat-file -e "$GATE_BASELINE^{commit}" 2>/dev/null; then
  git fetch --quiet --no-tags --depth=1 origin "$GATE_BASELINE" || fail "there is no commit $GATE_BASELINE"
  GATE_BASELINE=$(git rev-parse FETCH_HEAD)
fi
work=$(mktemp -d "$RUNNER_TEMP/cbtop-gate-XXXXXX")
trap 'git worktree remove --force "$work/base" || true; rm -rf "$work"' EXIT
git worktree add --quiet --detach "$work/base" "$GATE_BASELINE^{commit}"

judged=(--baseline "$work/base.json" --format text --format github --format "junit=$RUNNER_TEMP/cbtop-check.xml")
[ "$GATE_SUMMARY" != true ] || judged+=(--format "markdown=$GITHUB_STEP_SUMMARY")
while read -r line; do [ -z "$line" ] || judged+=(--format "$line"); done <<< "$GATE_FORMATS"
while read -r line; do [ -z "$line" ] || judged+=("$line"); done <<< "$GATE_THRESHOLDS"

echo "::group::the base, $(git log -1 --format='%h %s' "$GATE_BASELINE")"
pushd "$work/base" > /dev/null
bash -eo pipefail -c "$GATE_SETUP"
check --baseline "$work/base.json" --learn "$GATE_LEARN" || fail 'the base commit cannot be measured, see the log' $?
popd > /dev/null
echo "::endgroup::"
bash -eo pipefail -c "$GATE_SETUP"
check "${judged[@]}"
