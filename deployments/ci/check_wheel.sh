#!/bin/sh
# Builds the source distribution and the wheel, checks what the wheel holds, installs it into an empty environment, runs
# the demo from there, starts its service, asks one question over HTTP and stops it.
#
#   deployments/ci/check_wheel.sh [FOLDER]
#
# FOLDER keeps what is built; without it, a temporary folder is removed at the end. PYTHON chooses the interpreter (3.11
# or newer). Weights are fetched into RAG_POSFIX_CACHE_DIR, FOLDER/cache if it is not set.
set -eu

python=${PYTHON:-python3}
root=$(cd "$(dirname "$0")/../.." && pwd)
if [ $# -gt 0 ]; then
    mkdir -p "$1"
    folder=$(cd "$1" && pwd)
else
    folder=$(mktemp -d)
    trap 'rm -rf "$folder"' EXIT
fi
export RAG_POSFIX_CACHE_DIR="${RAG_POSFIX_CACHE_DIR:-$folder/cache}"
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_CONSTRAINT="$root/constraints.txt"
unset PYTHONPATH

say() { echo "check_wheel: $*" >&2; }

say "building the source distribution, and the wheel from it"
rm -rf "$folder/dist" "$folder/source"
"$python" -m venv --clear "$folder/build"
"$folder/build/bin/python" -m pip install --quiet hatchling
(cd "$root" && "$folder/build/bin/python" -m hatchling build -t sdist -d "$folder/dist")
mkdir "$folder/source"
tar -xzf "$folder"/dist/*.tar.gz -C "$folder/source" --strip-components=1
(cd "$folder/source" && "$folder/build/bin/python" -m hatchling build -t wheel -d "$folder/dist")
wheel=$(ls "$folder"/dist/*.whl)
"$python" "$root/deployments/ci/wheel_contents.py" "$wheel"

say "installing the wheel into an empty environment"
"$python" -m venv --clear "$folder/installed"
# Torch first, alone and by its exact version, so that nothing replaces it by a larger build of itself.
"$folder/installed/bin/python" -m pip install --quiet "$(grep '^torch==' "$root/constraints.txt")"
"$folder/installed/bin/python" -m pip install --quiet "$wheel[local,server,redis]"

cd "$folder" # nothing of the repository can be imported from here
PATH="$folder/installed/bin:$PATH"
say "running the demo"
rag-posfix models fetch
rag-posfix demo --json >"$folder/demo.json"
python -c 'import json, sys; found = json.load(open(sys.argv[1])); sys.exit("error" in found)' "$folder/demo.json"
say "starting the service"
python "$root/deployments/ci/ask_service.py"
say "done"
