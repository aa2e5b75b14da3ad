"""Preprocessing of texts, chats and token ids into the text cache."""
