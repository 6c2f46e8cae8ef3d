"""The sites' part of the app."""

import fedloom.engines.flower.deploy.client

app = fedloom.engines.flower.deploy.client.app
