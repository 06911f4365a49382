"""modelexpress inside SGLang: a load format of its own, and the back end of `remote_instance`."""
