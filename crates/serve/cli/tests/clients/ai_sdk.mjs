// The Vercel AI SDK: text, streaming, tools in several steps, reasoning, cached tokens, errors.
import assert from 'node:assert/strict';
import { createOpenAICompatible } from '@ai-sdk/openai-compatible';
import { generateText, stepCountIs, streamText, tool } from 'ai';
import { z } from 'zod';

const provider = createOpenAICompatible({
  name: 'stolon',
  baseURL: process.env.STOLON_URL,
  includeUsage: true,
});
const model = provider('scripted');
const fixed = { model, temperature: 0, maxRetries: 0 };

const whole = await generateText({ ...fixed, prompt: 'Say something. script:plain' });
assert.equal(whole.text, 'Hello, world.');
assert.equal(whole.finishReason, 'stop');
const again = await generateText({ ...fixed, prompt: 'Say something. script:plain' });
assert.ok(again.usage.cachedInputTokens > 0, JSON.stringify(again.usage));

const stream = streamText({ ...fixed, prompt: 'Say something. script:plain' });
let text = '';
for await (const piece of stream.textStream) text += piece;
assert.equal(text, 'Hello, world.');
assert.equal((await stream.usage).outputTokens, again.usage.outputTokens);

const tools = {
  get_weather: tool({
    description: 'The weather of a city.',
    inputSchema: z.object({ city: z.string(), days: z.number().int() }),
    execute: async ({ city, days }) => `${days} warm days in ${city}. script:plain`,
  }),
};
const ask = { ...fixed, prompt: 'What is the weather? script:call', tools, stopWhen: stepCountIs(3) };
const stepped = await generateText(ask);
const streamed = streamText(ask);
await streamed.consumeStream();
for (const [steps, answer] of [
  [stepped.steps, stepped.text],
  [await streamed.steps, await streamed.text],
]) {
  assert.equal(steps.length, 2);
  const [call] = steps[0].toolCalls;
  assert.deepEqual([call.toolName, call.input], ['get_weather', { city: 'Paris', days: 2 }]);
  assert.equal(answer, 'Hello, world.');
}

const thought = await generateText({ ...fixed, prompt: 'script:think' });
assert.equal(thought.reasoningText, 'Let me think about it.');

// Any name stands for the only model.
const named = await generateText({ ...fixed, model: provider('another'), prompt: 'script:plain' });
assert.equal(named.text, 'Hello, world.');

console.log('Vercel AI SDK: all checks passed');
