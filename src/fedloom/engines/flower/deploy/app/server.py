"""The server's part of the app."""

import fedloom.engines.flower.deploy.server

app = fedloom.engines.flower.deploy.server.app
