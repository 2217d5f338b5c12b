#!/usr/bin/env bash
# The tests of the page drive Chromium. Installs it where it is missing and may be installed; else says what to do.
set -euo pipefail
if command -v chromedriver >/dev/null && { command -v chromium || command -v chromium-browser || command -v google-chrome; } >/dev/null; then
    exit 0
fi
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    echo "installing chromium for the tests of the page (once)"
    export DEBIAN_FRONTEND=noninteractive
    apt-get update -qq && apt-get install -qq -y --no-install-recommends chromium chromium-driver >/dev/null && exit 0
fi
# Without it these tests are skipped, or fail where CI is set.
echo "chromium and chromedriver are missing: apt-get install chromium chromium-driver" >&2
