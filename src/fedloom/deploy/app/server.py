"""The server's part of the app."""

import fedloom.deploy.server

app = fedloom.deploy.server.app
