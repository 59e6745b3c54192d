"""The engine that is an SGLang server: the process, its requests, its weights."""
