"""Token ids to what a client reads: text, reasoning and tool calls, the same for every way of cutting the
stream.
"""
