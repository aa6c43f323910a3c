#!/usr/bin/env bash
# Sets everything up in .venv and writes the documentation, an API page from the docstrings included, as a site
# to build/site. Arguments go to mkdocs build.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/venv.sh"

prepare docs
cd "$root"
pages=build/docs
rm -rf "$pages"
mkdir -p "$pages"
cp -r docs/. "$pages"
cp CONTRIBUTING.md CHANGELOG.md CITATION.cff LICENSE .pre-commit-config.yaml "$pages"
cp README.md "$pages/index.md"
cp -r scripts "$pages/scripts" # which the pages link to, with its pictures
# In the site all pages lie side by side.
sed -i.bak -e 's#](docs/#](#g' -e 's#](../#](#g' "$pages"/*.md
rm "$pages"/*.bak

say "mkdocs build"
"$python" -m mkdocs build "$@" </dev/null
say "written: $root/build/site/index.html"
