"""A backend service's calls: an answer as it comes, one that is stopped, and a refusal.

`pip install millrace-client`, then: python backend.py HOST:PORT KEY MODEL
"""

import asyncio
import sys

from millrace_client import InvalidRequestError, MillraceClient


async def main(url: str, key: str, model: str) -> None:
    async with MillraceClient(url, key, timeout_s=60) as client:
        answer = client.chat("What is the capital of Japan?", model=model, temperature=0, max_tokens=60)
        async for part in answer:
            print("".join(choice.content for choice in part.choices), end="", flush=True)
        print(f"\n{answer.usage.completion_tokens} tokens, request {answer.request_id}")

        # Leaving the block ends the answer, in the engine as well.
        async with client.generate("Once upon", model=model, max_tokens=500, ignore_eos=True) as story:
            first = await anext(story)
            print("stopped after:", first.choices[0].text)

        try:
            await client.chat("Hello!", model=model, temperature=-1).text()
        except InvalidRequestError as error:
            print(f"refused: {error.reason} at {error.field}: {error.message}")


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
