"""The server's part of the app."""

from fedloom.deploy import server

app = server.app
