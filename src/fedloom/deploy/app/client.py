"""The sites' part of the app."""

import fedloom.deploy.client

app = fedloom.deploy.client.app
