# SPDX-License-Identifier: Apache-2.0
#
# Runs suites of tests. Their results are JUnit files in the folder $results, for sum_results.py.

# junit NAME OUTCOME TEXT: writes a result with one case, for a suite that left no result.
junit() {
  printf '<testsuite><testcase classname="suite" name="%s"><%s message="%s"/></testcase></testsuite>\n' \
    "$1" "$2" "$(sed 's/&/\&amp;/g; s/</\&lt;/g; s/"/\&quot;/g' <<<"$3")" >"$results/suite-$1.xml"
}

# suite NAME COMMAND...: a suite that fails is a failed case, because it may have ended before its first result.
suite() {
  local name="$1" status=0
  shift
  "$@" || status=$?
  if [ "$status" != 0 ]; then junit "$name" failure "ended with status $status"; fi
}
