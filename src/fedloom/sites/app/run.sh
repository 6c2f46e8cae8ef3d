#!/bin/sh
# Starts a run of the app and shows its log. With arguments, it runs another command of flwr: run.sh list
set -eu
cd "$(dirname "$0")/.."
. machines/run.conf
export FLWR_HOME="$PWD/machines/flwr" FLWR_TELEMETRY_ENABLED=0
mkdir -p "$FLWR_HOME"
cat > "$FLWR_HOME/config.toml" <<END
[superlink]
default = "sites"

[superlink.sites]
address = "$SERVER"
root-certificates = "$PWD/machines/server/ca.crt"
END
[ $# -gt 0 ] || set -- run . --stream
exec flwr "$@"
