"""Bodies as the chat pages Open WebUI and LibreChat send them."""

from __future__ import annotations

from typing import Any

from tests.support.serving import QUESTION

OPEN_WEBUI: dict[str, Any] = {
    "stream": True,
    "model": "fake",
    "messages": [
        {"role": "system", "content": "User Context:\n\nBe brief."},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hello! What would you like to know?", "done": True},
        {"role": "user", "content": QUESTION},
    ],
    "params": {},
    "tool_servers": [],
    "features": {"voice": False, "image_generation": False, "code_interpreter": False, "web_search": False},
    "variables": {"{{USER_NAME}}": "User", "{{CURRENT_DATE}}": "2026-11-23"},
    "model_item": {"id": "fake", "object": "model", "owned_by": "openai", "urlIdx": 0},
    "session_id": "zJv2dD4xQmTzNnKcAAAB",
    "chat_id": "8f14e45f-ceea-467f-a5a1-2a3b4c5d6e7f",
    "id": "45c48cce-2e2d-4fbd-aa1a-2a3b4c5d6e7f",
    "background_tasks": {"title_generation": True, "tags_generation": True, "follow_up_generation": False},
    "stream_options": {"include_usage": True},
    "metadata": {"user_id": "u1", "chat_id": "c1", "message_id": "m1", "files": None, "function_calling": "default"},
    "user": {"name": "User", "id": "u1", "email": "user@example.org", "role": "user"},
    "files": None,
    "tool_ids": None,
}
"""What the page sends for a turn; most of it never leaves its own server, but proxies pass it on."""

LIBRECHAT: dict[str, Any] = {
    "model": "fake",
    "user": "65f0c9d2a1b2c3d4e5f60718",
    "stream": True,
    "temperature": 0,
    "top_p": 1,
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "max_tokens": 64,
    "stop": ["||>", "\nUser:", "<|diff_marker|>"],
    "messages": [
        {"role": "system", "content": [{"type": "text", "text": "Be brief."}]},
        {"role": "user", "content": [{"type": "text", "text": QUESTION}], "name": "user"},
    ],
    "stream_options": {"include_usage": True},
    "conversationId": "0f1e2d3c",
    "parentMessageId": "00000000-0000-0000-0000-000000000000",
    "n": 1,
}
