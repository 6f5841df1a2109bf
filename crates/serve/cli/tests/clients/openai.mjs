// OpenAI's package for JavaScript: chat, streaming, tools, reasoning, errors, cached tokens, and
// a client that cancels.
import assert from 'node:assert/strict';
import OpenAI from 'openai';

const client = new OpenAI({ baseURL: process.env.STOLON_URL, apiKey: 'none', maxRetries: 0 });
const model = 'scripted';
const ask = (text) => ({ model, temperature: 0, messages: [{ role: 'user', content: text }] });
const weather = {
  type: 'function',
  function: {
    name: 'get_weather',
    parameters: {
      type: 'object',
      properties: { city: { type: 'string' }, days: { type: 'integer' } },
    },
  },
};

const models = await client.models.list();
assert.ok(models.data.some((listed) => listed.id === model));

const plain = ask('Say something. script:plain');
const whole = await client.chat.completions.create(plain);
assert.equal(whole.choices[0].message.content, 'Hello, world.');
assert.equal(whole.choices[0].finish_reason, 'stop');

const again = await client.chat.completions.create(plain);
assert.ok(again.usage.prompt_tokens_details.cached_tokens > 0, JSON.stringify(again.usage));

let text = '';
let usage = null;
const pieces = await client.chat.completions.create({
  ...plain,
  stream: true,
  stream_options: { include_usage: true },
});
for await (const piece of pieces) {
  text += piece.choices[0]?.delta.content ?? '';
  usage = piece.usage ?? usage;
}
assert.equal(text, 'Hello, world.');
assert.deepEqual(usage, again.usage);

const turn = ask('What is the weather? script:call');
const called = await client.chat.completions.create({ ...turn, tools: [weather] });
const runner = client.chat.completions.stream({ ...turn, tools: [weather] });
for (const completion of [called, await runner.finalChatCompletion()]) {
  const [choice] = completion.choices;
  assert.equal(choice.finish_reason, 'tool_calls');
  const [call] = choice.message.tool_calls;
  assert.equal(call.function.name, 'get_weather');
  assert.deepEqual(JSON.parse(call.function.arguments), { city: 'Paris', days: 2 });
}

// The helper that calls functions and sends their results until the model answers in text.
const run = client.chat.completions.runTools({
  ...turn,
  tools: [
    {
      type: 'function',
      function: {
        ...weather.function,
        parse: JSON.parse,
        function: ({ city, days }) => `${days} warm days in ${city}. script:plain`,
      },
    },
  ],
});
assert.equal(await run.finalContent(), 'Hello, world.');

const thought = await client.chat.completions.create(ask('script:think'));
assert.equal(thought.choices[0].message.reasoning_content, 'Let me think about it.');

const response = await client.responses.create({ model, input: 'script:plain' });
assert.equal(response.output_text, 'Hello, world.');

await assert.rejects(
  client.chat.completions.create({ ...plain, temperature: -1 }),
  (error) => error instanceof OpenAI.BadRequestError && error.param === 'temperature',
);
// Any name stands for the only model, but it does not exist.
const named = await client.chat.completions.create({ ...plain, model: 'another' });
assert.equal(named.choices[0].message.content, 'Hello, world.');
await assert.rejects(
  client.models.retrieve('another'),
  (error) => error instanceof OpenAI.NotFoundError && error.code === 'model_not_found',
);

const canceled = await client.chat.completions.create({
  ...plain,
  stream: true,
  max_completion_tokens: 2000,
  ignore_eos: true,
});
let seen = 0;
for await (const _ of canceled) {
  seen += 1;
  if (seen === 3) break;
}
assert.equal((await client.chat.completions.create(plain)).choices[0].message.content, text);

console.log('openai for JavaScript: all checks passed');
