"""Runs sglang.bench_serving's own chat client over given prompts; prints its CPU time and chunk count.

Started by `load_generator.py` with the foreign environment's Python: no import of this project here.

    python bench_serving_client.py URL PROMPTS.json OUTPUT_TOKENS STREAMS
"""

import argparse
import asyncio
import json
import sys
import time
from pathlib import Path

from sglang import bench_serving


async def main(url: str, prompts: list[str], output_tokens: int, streams: int) -> dict[str, float]:
    """Send the prompts over so many streams, behind a semaphore as the tool itself does, and count."""
    gate = asyncio.Semaphore(streams)

    async def send(request: bench_serving.RequestFuncInput) -> bench_serving.RequestFuncOutput:
        async with gate:
            return await bench_serving.async_request_openai_chat_completions(request)

    bench_serving.set_global_args(
        argparse.Namespace(disable_stream=False, disable_ignore_eos=False, print_requests=False, header=None)
    )
    requests = [
        bench_serving.RequestFuncInput(
            prompt=prompt,
            api_url=f"{url}/v1/chat/completions",
            prompt_len=1,
            output_len=output_tokens,
            model="fake-model",
            lora_name="",
            image_data=None,
            extra_request_body={},
        )
        for prompt in prompts
    ]
    cpu, wall = time.process_time(), time.perf_counter()
    outputs = await asyncio.gather(*map(send, requests))
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    failed = [output.error for output in outputs if not output.success]
    if failed:
        raise SystemExit(failed[0])
    return {"cpu_s": cpu, "wall_s": wall, "chunks": sum(1 + len(output.itl) for output in outputs)}


if __name__ == "__main__":
    url, prompts, output_tokens, streams = sys.argv[1:]
    texts = json.loads(Path(prompts).read_text())
    print(json.dumps(asyncio.run(main(url, texts, int(output_tokens), int(streams)))))
