#!/bin/sh
# Starts the server, registers the sites, and runs until Ctrl-C. server.conf has its settings.
set -eu
cd "$(dirname "$0")"
. ./server.conf
export FLWR_HOME="$PWD/flwr" FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION=1
export FLWR_SUPEREXEC_TASK_POLL_INTERVAL=0.05 # seconds; Flower's default of 1 makes rounds longer
mkdir -p "$FLWR_HOME"
cat > "$FLWR_HOME/config.toml" <<END
[superlink]
default = "sites"

[superlink.sites]
address = "127.0.0.1:$PORT"
root-certificates = "$PWD/ca.crt"
END
flower-superlink --host "$HOST" --port "$PORT" --ssl-ca-certfile ca.crt --ssl-certfile server.crt \
  --ssl-keyfile server.key --enable-supernode-auth --database superlink.db &
server=$!
trap 'kill "$server"; wait "$server" || true; exit' INT TERM
until flwr supernode list > flwr/register.log 2>&1; do
  kill -0 "$server"
  sleep 1
done
for key in site-*.pub; do
  flwr supernode register "$key" > flwr/register.log 2>&1 || grep -qi "already" flwr/register.log || cat flwr/register.log
done
echo "The server is ready: start the sites."
wait "$server"
