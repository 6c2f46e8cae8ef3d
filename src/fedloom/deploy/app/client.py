"""The sites' part of the app."""

from fedloom.deploy import client

app = client.app
