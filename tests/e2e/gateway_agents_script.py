"""The OpenAI Agents SDK against a gateway; runs in that SDK's own environment.

usage: gateway_agents_script.py URL   (prints `REPORT {…}`)
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from agents import (
    Agent,
    CodeInterpreterTool,
    HostedMCPTool,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI


@function_tool
def get_weather(city: str) -> str:
    """Weather of a city."""
    return f"sunny in {city}"


async def main(url: str) -> dict[str, Any]:
    set_tracing_disabled(True)
    model = OpenAIResponsesModel("fake", AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0))
    code: Any = {"type": "code_interpreter", "container": {"type": "auto"}}
    consent: Any = {"type": "mcp", "server_label": "container", "require_approval": "always"}

    weather = await Runner.run(Agent("weather", model=model, tools=[get_weather]), "weather")
    coding = Runner.run_streamed(Agent("coding", model=model, tools=[CodeInterpreterTool(code)]), "coding")
    kinds = [event.type async for event in coding.stream_events()]

    agent = Agent("careful", model=model, tools=[HostedMCPTool(consent)])
    waiting = await Runner.run(agent, "careful")
    interruptions = len(waiting.interruptions)
    state = waiting.to_state()
    for interruption in waiting.interruptions:
        state.approve(interruption)
    approved = await Runner.run(agent, state)
    return {
        "weather": weather.final_output,
        "coding": coding.final_output,
        "streamed": len(kinds),
        "interruptions": interruptions,
        "approved": approved.final_output,
    }


if __name__ == "__main__":
    print("REPORT", json.dumps(asyncio.run(main(sys.argv[1]))))
