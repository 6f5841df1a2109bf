#!/usr/bin/env bash
# Checks the description of the API with a validator, and sends requests that are made from it to a
# server: no reply may have status 500 or above, and each must have the described form.
#
# usage: describe.sh STOLON PYTHON, where PYTHON is the interpreter of a virtual environment with
# schemathesis and openapi-spec-validator
set -euo pipefail
stolon=$(realpath "$1")
bin=$(realpath "$(dirname "$2")")
port=${PORT:-18473}
folder=$(mktemp -d)
cd "$folder"
"$stolon" serve --model demo --num-blocks 512 --pin-budget 16 --max-model-len 256 \
    --request-timeout 20 --port "$port" >"$folder/out" 2>"$folder/err" &
server=$!
trap 'kill $server 2>/dev/null || true; rm -rf "$folder"' EXIT
base=http://127.0.0.1:$port
for _ in $(seq 100); do
    curl -sf "$base/health" >/dev/null && break
    sleep 0.2
done
curl -sf "$base/openapi.json" >"$folder/openapi.json"
"$bin/python" -m openapi_spec_validator "$folder/openapi.json"
# A request may ask for less time than its answer takes.
cat >"$folder/schemathesis.toml" <<'EOF'
[checks]
not_a_server_error.expected-statuses = ["2xx", "3xx", "4xx", 504]
EOF
# The stream of events does not end by itself.
"$bin/schemathesis" run "$base/openapi.json" \
    --checks not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance \
    --exclude-path /v1/cache/events --phases examples,coverage,fuzzing \
    --max-examples "${EXAMPLES:-30}" --generation-database none --seed "${SEED:-1}" \
    --request-timeout 30 --workers 2
curl -sf "$base/v1/cache/audit" | grep -q '"ok":true'
if grep -q panicked "$folder/err"; then
    cat "$folder/err"
    exit 1
fi
