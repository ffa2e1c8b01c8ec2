"""Prompt files in the shapes that people have, and what becomes of them: prompts, trunks, loss masks, overlap.

Knows text, chat templates and token ids. Does not know models: a tokenizer is passed in.
"""
