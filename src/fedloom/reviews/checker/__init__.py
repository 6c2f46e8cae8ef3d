"""The checker of methods: tiny instrumented rounds whose results must agree (`fedloom check`)."""
