#!/bin/sh
# Starts this site and runs until Ctrl-C. site.conf has its settings.
set -eu
cd "$(dirname "$0")"
. ./site.conf
export FLWR_HOME="$PWD/flwr" FLWR_TELEMETRY_ENABLED=0
export FLWR_SUPEREXEC_TASK_POLL_INTERVAL=0.05 # seconds; Flower's default of 1 makes rounds longer
mkdir -p "$FLWR_HOME"
node="partition-id=$SITE num-partitions=$SITES memory='$PWD/memory' identity='$PWD/site.key' peers='$PWD/peers.pub'"
[ -z "$DATA" ] || node="$node data='$DATA'"
exec flower-supernode --superlink "$SERVER" --root-certificates ca.crt --auth-supernode-private-key site.key \
  --port "$PORT" --node-config "$node $MORE"
