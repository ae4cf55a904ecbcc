"""The live side: controller loop, store, HTTP API, who may do what, forecast and replay."""
