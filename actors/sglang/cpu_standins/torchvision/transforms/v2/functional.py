"""Empty: SGLang imports this module and, for text models, calls nothing in it."""
