"""Messages to tokens and back: templates, tool calls, conversations, segments."""
